"""Copies of a store in checkpoints: saved with a hash, and restored exactly."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from agents.stores.faults import StoreDamaged
from agents.stores.store import Store
from rlhf.digests import FILES, verify
from rlhf.errors import StoreError, disk

#: Names of the files: of a store, in a run's folder and a checkpoint's, and beside a copy that of its hash.
FILE, HASH = "store.sqlite", "store.sha256"


def content_hash(store: Store) -> str:
    """SHA-256 over everything that is in a store: entries, versions, links, vectors, and the next id.

    Two stores have one hash if and only if they hold the same, however their files came about.
    """
    digest = hashlib.sha256()
    for table, row in store.rows_of_all():
        plain = [value.hex() if isinstance(value, bytes) else value for value in row]
        digest.update(json.dumps([table, *plain], ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()


def save(store: Store, folder: Path) -> str:
    """Copy `store` into `folder` and return the hash of what was copied.

    Raises:
        StoreFull: there is no room; what was copied is removed.
        CheckpointError: the hash cannot be written.
    """
    target = folder / FILE
    store.back_up(target)
    try:
        with Store(target) as copy:
            found = content_hash(copy)
        with disk("the hash of the store", folder / HASH):
            (folder / HASH).write_text(found)
        return found
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def check(folder: Path) -> None:
    """Verify a store's copy in a checkpoint against its recorded digest, if there is one.

    Raises:
        CheckpointError: the file is not what was written.
        StoreDamaged: it holds something else than its hash says.
    """
    _verify(folder)
    if not (folder / HASH).is_file() or not (folder / FILE).is_file():
        return  # of before there were any, or found where it is opened
    with Store(folder / FILE) as copy:
        _refuse_other(content_hash(copy), (folder / HASH).read_text().strip(), folder / FILE)


def _verify(folder: Path) -> None:
    if (folder / FILES).is_file():
        verify(folder, FILE)
        verify(folder, HASH)


def _refuse_other(found: str, expected: str, path: Path) -> None:
    if found != expected:
        raise StoreDamaged("the store is not the one that was saved", where=str(path), got=found, expected=expected)


def restore(folder: Path, path: Path) -> str:
    """Restore the store of `folder` to `path`, replacing what is there; returns its digest.

    Raises:
        CheckpointError: its file in a checkpoint is not what was written; `path` stays as it was.
        StoreDamaged: there is none, or it is not what was saved; `path` stays as it was.
    """
    source, partial = folder / FILE, path.with_name(f".{path.name}.partial")
    _verify(folder)
    try:
        expected = (folder / HASH).read_text().strip()
        shutil.copyfile(source, partial)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StoreDamaged(
            "there is no store to restore", where=str(folder), got=str(error), expected=f"{FILE} and {HASH}"
        ) from error
    try:
        with Store(partial) as copy:
            found = content_hash(copy)
        _refuse_other(found, expected, source)
        # What a process that was killed left beside the old file would be rolled back into the new one.
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
        os.replace(partial, path)
        return found
    except OSError as error:
        raise StoreError("the store cannot be restored", where=str(path), got=str(error)) from error
    finally:
        partial.unlink(missing_ok=True)
