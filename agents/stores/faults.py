"""Errors of a store, one type each; none loses stored data."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.errors import StoreError


class StoreLocked(StoreError):
    """Another process holds the file."""


class StoreFull(StoreError):
    """The disk, or the size that the store may have, is used up."""


class StoreDamaged(StoreError):
    """The file is not a store, is truncated, or holds something else than its hash says."""


class StoreReadOnly(StoreError):
    """Write to a store that is open for reading only."""


class StoreLeak(StoreError):
    """A task that judges the policy would leave something in the store, or has left something there."""


class UnknownEntry(StoreError):
    """No entry has this id."""


_KINDS: dict[int, tuple[type[StoreError], str, str]] = {
    sqlite3.SQLITE_BUSY: (
        StoreLocked,
        "the store is locked by another process",
        "end the other process, or raise busy_s; nothing was written",
    ),
    sqlite3.SQLITE_LOCKED: (
        StoreLocked,
        "the store is locked by this process",
        "end the other transaction first; nothing was written",
    ),
    sqlite3.SQLITE_FULL: (
        StoreFull,
        "there is no room for what was to be stored",
        "free disk space, or raise max_mb; what was stored before is whole",
    ),
    sqlite3.SQLITE_IOERR: (
        StoreFull,
        "the disk failed",
        "free disk space or fix the disk; what was stored before is whole",
    ),
    sqlite3.SQLITE_READONLY: (
        StoreReadOnly,
        "the store may only be read here",
        "write from a training run, and see to the rights of the file",
    ),
    sqlite3.SQLITE_CANTOPEN: (StoreError, "the store cannot be opened", "look whether its folder is there"),
    sqlite3.SQLITE_NOTADB: (StoreDamaged, "this file is not a store", "restore it from a checkpoint"),
    sqlite3.SQLITE_CORRUPT: (StoreDamaged, "the file of the store is damaged", "restore it from a checkpoint"),
}


@contextmanager
def explained(path: Path | str) -> Iterator[None]:
    """Turn what SQLite raises inside into a StoreError that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        kind, what, hint = _KINDS.get((code or 0) & 0xFF, (StoreError, "the store cannot be used", ""))
        raise kind(what, where=str(path), got=f"{type(error).__name__}: {error}", hint=hint) from error


def unknown(path: Path | str, number: int, known: list[int]) -> UnknownEntry:
    """The error for an id that no entry has."""
    some = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
    return UnknownEntry(
        "no entry has this id", where=str(path), got=str(number), expected=some or "an id; the store is empty"
    )
