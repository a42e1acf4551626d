"""Stop request: a run writes a checkpoint and ends.

A run in one process, or in several that a launcher started, hears SIGTERM, which `rlhf stop` sends it where it runs on
the same machine. A run on Ray hears a file in its folder, which may be written on any node.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf import locks
from rlhf.errors import TrainingError, UsageError, disk
from rlhf.given_parts import how_to_resume
from rlhf.lock_owner import LOCK, Owner, life, read_path, write

#: Files of the process that waits for learners on Ray, and of whoever wants it to end; a folder is empty with them.
_RUNS, _STOPS = f"{LOCK}-ray", f"{LOCK}-stop"
_POLL_S = 0.2


@contextmanager
def heard(folder: Path) -> Iterator[None]:
    """Context in which this process runs what is in a folder on Ray, and may be asked to stop.

    Raises:
        UsageError: another process of this machine does.
    """
    file = folder / _RUNS
    owner = read_path(file)
    if owner is not None and owner.is_of_here and owner.pid != os.getpid() and life(owner, file, by_kernel=False)[0]:
        raise UsageError("the run is under way on Ray", where=str(folder), got=str(owner), hint=f"rlhf stop {folder}")
    (folder / _STOPS).unlink(missing_ok=True)
    with disk("the owner of the run", file):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        write(descriptor, Owner.here("rlhf train on Ray"))
        os.close(descriptor)
    try:
        yield
    finally:
        for path in (folder / _STOPS, file):
            path.unlink(missing_ok=True)


def is_asked(folder: Path) -> bool:
    """Return whether the run on Ray in a folder was asked to stop."""
    return (folder / _STOPS).exists()


def stop(folder: Path, limit_s: float) -> None:
    """Have the run in a folder write a checkpoint and end; returns when it has.

    Raises:
        UsageError: nothing trains there, or it runs on another machine.
        TrainingError: it has not ended in time.
    """
    is_gone, asked = _asked_on_ray(folder) or _asked_by_signal(folder)
    deadline = time.monotonic() + limit_s
    while not is_gone():
        if time.monotonic() > deadline:
            raise TrainingError(
                "the run has not ended yet",
                where=str(folder),
                got=f"{asked}, {limit_s:g} s ago",
                hint="wait longer with --timeout, or read its output",
            )
        time.sleep(_POLL_S)


def _asked_on_ray(folder: Path) -> tuple[Callable[[], bool], str] | None:
    path = folder / _RUNS
    owner = read_path(path)
    if owner is None or (owner.is_of_here and not life(owner, path, by_kernel=False)[0]):
        return None
    with disk("the request to stop", folder / _STOPS):
        (folder / _STOPS).touch()

    def is_gone() -> bool:
        return not path.exists() or (owner.is_of_here and not life(owner, path, by_kernel=False)[0])

    return is_gone, f"asked {owner}"


def _asked_by_signal(folder: Path) -> tuple[Callable[[], bool], str]:
    owner = locks.owner_of(folder)
    if owner is None:
        raise UsageError(
            "no run is training in this folder",
            where=str(folder),
            hint=f"to resume it, unless it is finished: {how_to_resume(folder)}",
        )
    if not owner.is_of_here:
        raise UsageError(
            "the run is on another machine, or in another container",
            where=str(folder),
            got=str(owner),
            hint=f"there: rlhf stop {folder}",
        )
    os.kill(owner.pid, signal.SIGTERM)

    def is_gone() -> bool:
        now = locks.owner_of(folder)
        return now is None or now.token != owner.token

    return is_gone, f"sent SIGTERM to {owner}"
