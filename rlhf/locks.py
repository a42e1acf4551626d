"""Folder locks: one writer per run, evaluation or export; a second one learns who holds it.

The lock is a file `.lock` in the folder. Its owner holds the kernel's `flock` on it for as long as it lives, which ends
with the process however that ends, and has written into it who it is: host, boot, process, begin, and a random token.
Every `BEAT_S` seconds it writes that it is alive. Who finds a lock

- that the kernel says is held is refused, on the same machine at once and always rightly;
- of the same machine whose process is gone takes it over;
- of another machine, where the kernel may know nothing of it, takes it over if it was silent for `STALE_S` seconds.
  Ages are differences of two times of the file system, so that a clock that is off changes nothing; it is said.

An owner that was taken for dead finds another token in its place, and stops at its next `check`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlhf.errors import CheckpointError, disk
from rlhf.lock_owner import LOCK, STALE_S, Owner, file_system, life, read, read_path, started_at, time_of, write

#: Seconds between two signs of life.
BEAT_S = 10.0
#: How often the kernel is asked for a lock whose owner is unknown or gone, and seconds in between.
_N_ASKED, _ASKED_S = 20, 0.05


class FolderInUse(CheckpointError):
    """Another process writes this folder."""


@dataclass
class Lock:
    """A lock that is held.

    Attributes:
        folder: that nobody else writes.
        owner: this process, with the time of its last sign of life.
        notes: what the user is to hear of how it was taken.
    """

    folder: Path
    owner: Owner
    notes: list[str] = field(default_factory=list)
    _file: int = -1
    _n: int = 1
    _over: threading.Event = field(default_factory=threading.Event)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def _path(self) -> Path:
        return self.folder / LOCK

    def check(self) -> None:
        """Raise FolderInUse if another process has taken the lock."""
        with self._turn:
            if self._file < 0:
                return
            if not _is_at(self._file, self._path):
                self._take_again()
            found = read(self._file)
            if found is not None and found.token != self.owner.token:
                raise _in_use(self.folder, found, "it has taken over, as this process seemed dead")

    def _take_again(self) -> None:
        """Recreate a removed lock file, unless another process has."""
        with disk("the lock", self._path):
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                other = read_path(self._path)
                raise _in_use(self.folder, other, "this process's lock was removed, and another one made") from None
        with suppress(OSError):
            _flock(file)
        os.close(self._file)
        self._file = file
        write(file, self.owner)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with suppress(OSError, CheckpointError):  # said by the next `check`
                self.check()
                with self._turn:
                    if self._file >= 0:
                        self.owner = replace(self.owner, beat_at=time.time())
                        write(self._file, self.owner)

    def _release(self) -> None:
        self._over.set()
        with self._turn, suppress(OSError):
            file, self._file = self._file, -1
            try:
                found = read(file)
                if _is_at(file, self._path) and found is not None and found.token == self.owner.token:
                    self._path.unlink()
            finally:
                os.close(file)


_held: dict[str, Lock] = {}
_guard = threading.Lock()


@contextmanager
def held(folder: Path, doing: str) -> Iterator[Lock]:
    """Hold the exclusive lock of a folder, so that no other process writes it; re-entrant.

    Args:
        folder: that exists.
        doing: what this process does, for who is refused meanwhile.

    Raises:
        FolderInUse: another process does; it is named.
        CheckpointError: nothing can be written there.
    """
    name = os.path.realpath(folder)
    with _guard:
        lock = _held.get(name)
        if lock is None:
            lock = _held[name] = _taken(folder, Owner.here(doing))
            threading.Thread(target=lock._beat, name="lock", daemon=True).start()
        else:
            lock._n += 1
    try:
        yield lock
    finally:
        with _guard:
            lock._n -= 1
            if not lock._n:
                _held.pop(name, None)
                lock._release()


def check(folder: Path) -> None:
    """Raise FolderInUse where this process held the lock of `folder` and another one has it now."""
    if (lock := _held.get(os.path.realpath(folder))) is not None:
        lock.check()


def notes(folder: Path) -> list[str]:
    """Messages for the user about how this process took the lock; each is returned once."""
    lock = _held.get(os.path.realpath(folder))
    found, lock_notes = ([], []) if lock is None else (list(lock.notes), lock.notes)
    lock_notes.clear()
    return found


def owner_of(folder: Path) -> Owner | None:
    """Owner of the lock of `folder`, if it seems alive; None else."""
    found = read_path(folder / LOCK)
    return found if found is not None and life(found, folder / LOCK, by_kernel=False)[0] else None


def is_empty(folder: Path) -> bool:
    """True if a folder holds nothing but a lock."""
    return not any(not is_lock(path) for path in folder.iterdir())


def is_lock(path: Path) -> bool:
    """True if a file is a lock, or belongs to one."""
    return path.name.startswith(LOCK)


# --- taking ---


def _taken(folder: Path, owner: Owner) -> Lock:
    path = folder / LOCK
    while True:
        with disk("the lock", path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            by_kernel = _flock_or_refuse(folder, file)
            if by_kernel and not _is_at(file, path):  # its owner has ended meanwhile, and removed it
                os.close(file)
                continue
            with _claimed(folder, is_needed=not by_kernel):
                said = _judged(folder, file, by_kernel)
                with disk("the lock", path):
                    write(file, owner)
        except BaseException:
            os.close(file)
            raise
        return Lock(folder, owner, said + _of_share(folder, by_kernel), file)


def _flock(file: int) -> bool:
    """Take the kernel's lock; False where this file system has none. Raises BlockingIOError where it is held."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def _flock_or_refuse(folder: Path, file: int) -> bool:
    """`_flock`; a FolderInUse with who it is where it is held."""
    path = folder / LOCK
    for _ in range(_N_ASKED):
        try:
            with disk("the lock", path):
                return _flock(file)
        except CheckpointError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
        owner = read(file) or read_path(path)
        gone = owner is not None and owner.is_of_here and started_at(owner.pid) != owner.started
        if owner is not None and not gone:
            break
        time.sleep(_ASKED_S)  # it may be about to say who it is; or be gone, and its child about to let go of the lock
    raise _in_use(folder, owner, "it is gone, but a process that it began holds the lock on" if gone else "")


def _judged(folder: Path, file: int, by_kernel: bool) -> list[str]:
    """Messages about the dead owner of a lock, if there was one. Raises FolderInUse for one that lives."""
    before = read(file)
    if before is None:
        return []
    lives, why = life(before, folder / LOCK, by_kernel=by_kernel)
    if lives:
        raise _in_use(folder, before, why)
    return [f"the lock of {folder} is taken over from {before}: {why}"]


@contextmanager
def _claimed(folder: Path, *, is_needed: bool) -> Iterator[None]:
    """Mutual exclusion of takeovers by a claim file, for file systems without kernel locks."""
    claim = folder / f"{LOCK}.claim"
    while is_needed:
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL, 0o644))
            break
        except FileExistsError:
            with suppress(FileNotFoundError):
                if time_of(folder) - claim.stat().st_mtime > STALE_S:  # its maker has died
                    claim.unlink()
            time.sleep(0.05)
    try:
        yield
    finally:
        if is_needed:
            claim.unlink(missing_ok=True)


def _in_use(folder: Path, owner: Owner | None, why: str = "") -> FolderInUse:
    hint = "wait until it ends, or give another folder"
    if owner is not None and owner.is_of_here and owner.pid != os.getpid():
        hint = f"wait until it ends, end it (kill {owner.pid}), or give another folder"
    return FolderInUse(
        "another process is writing this folder",
        where=str(folder),
        got="; ".join(filter(None, (str(owner or "a process that has not identified itself yet"), why))),
        expected="a folder that one process writes",
        hint=hint,
    )


def _of_share(folder: Path, by_kernel: bool) -> list[str]:
    kind, is_shared = file_system(folder)
    if by_kernel and not is_shared:
        return []
    return [
        f"{folder} lies on a file system that other machines may write too, or that has no locks ({kind}): a process "
        f"of another machine is kept out by the sign of life that this one gives every {BEAT_S:.0f} s"
    ]


def _is_at(file: int, path: Path) -> bool:
    """True if an open file is the one of this name."""
    try:
        there, own = path.stat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (there.st_ino, there.st_dev) == (own.st_ino, own.st_dev)


def _let_go() -> None:
    """In a process that was forked: the lock stays the parent's, and ends with it."""
    for lock in _held.values():
        with suppress(OSError):
            os.close(lock._file)
        lock._file = -1
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
