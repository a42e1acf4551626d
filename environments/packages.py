"""Shared parts of package adapters: version, contents, and a folder for what is made once.

A version names a release; the hash of its files tells whether what is installed is that release, unchanged. Both go
into task ids, so that scores of two different packages cannot be mixed up.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rlhf.errors import EnvError
from rlhf.extras import import_optional, missing

#: The environment variable that says where generated games and plans are kept.
CACHE_VARIABLE = "RLHF_CACHE"


@cache
def version_of(distribution: str, extra: str) -> str:
    """Version of an installed distribution. Raises MissingPackageError, naming the extra that brings it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise missing(extra, f"the package {distribution} is missing", distribution, error) from error


@cache
def content_hash(distribution: str, extra: str, *prefixes: str) -> str:
    """Eight hexadecimal digits over the files of a distribution whose paths begin with one of `prefixes`.

    They come from the list that was written when it was installed, so nothing is read but this list. Compiled files are
    left out: they differ between platforms that play the same games.

    Raises:
        MissingPackageError: it is not installed.
        EnvError: it was installed without a list of its files, so nobody can say what it is.
    """
    version_of(distribution, extra)
    files = importlib.metadata.distribution(distribution).files or ()
    listed = sorted((path.as_posix(), path.hash.value) for path in files if path.hash is not None)
    chosen = [line for line in listed if line[0].startswith(prefixes) and not line[0].endswith((".pyc", ".so"))]
    if not chosen:
        raise EnvError(
            "the package has no list of its files",
            where=f"looking for the files of {distribution}",
            got=f"{len(listed)} files with a hash, none of them under {', '.join(prefixes)}",
            hint=f"install a released wheel: pip install --force-reinstall {distribution}",
        )
    return hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]


def import_from(module: str, distribution: str, extra: str) -> Any:
    """Import a module of an optional distribution. Raises MissingPackageError, naming the extra that brings it."""
    return import_optional(module, extra, f"the package {distribution} is missing", distribution)


def cache_folder(name: str) -> Path:
    """Folder `name` of the cache, made if need be: below `$RLHF_CACHE`, else below `~/.cache/rlhf`.

    Raises:
        EnvError: it cannot be made.
    """
    root = os.environ.get(CACHE_VARIABLE)
    folder = (Path(root).expanduser() if root else Path.home() / ".cache" / "rlhf") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvError(
            "the folder for generated games cannot be made",
            where=str(folder),
            got=str(error),
            hint=f"set {CACHE_VARIABLE} to a folder that can be written",
        ) from error
    return folder


@contextlib.contextmanager
def made_at_once(target: Path) -> Iterator[Path]:
    """Context of an empty folder that becomes `target` atomically at the end.

    Of several processes that make the same, one wins and the others throw theirs away. Nothing is left after an error.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        yield folder
        with contextlib.suppress(OSError):  # another process was faster
            folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
