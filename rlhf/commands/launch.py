"""Several processes of one run on this machine: started together, watched, and stopped together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rlhf.errors import TrainingError
from rlhf.processes import free_port, reasons_in

#: Seconds that the others have to end by themselves once one has failed.
GRACE_S = 20.0
_POLL_S = 0.1


def launch(arguments: Sequence[str], n: int, folder: Path, *, quiet: bool = False) -> int:
    """Run `rlhf ARGUMENTS` in `n` processes and return the exit code of the first one.

    They find each other by the variables that `torchrun` sets too. SIGINT and SIGTERM are handed on. Where one fails,
    the others end within `GRACE_S` or are killed.

    Args:
        arguments: of the command line.
        n: processes.
        folder: of the run, where a process that fails leaves its reason.
        quiet: what they write to standard output is not shown.

    Raises:
        TrainingError: a process was killed, or failed while the first one had nothing to say of it.
    """
    for old in folder.glob("process-*.failed"):
        old.unlink()
    shared = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // n))
    children: list[subprocess.Popen[bytes]] = []
    with _handing_on(children):
        for r in range(n):
            own = {name: str(value) for name, value in {**shared, "RANK": r, "LOCAL_RANK": r}.items()}
            child = subprocess.Popen(
                [sys.executable, "-m", "rlhf.cli", *arguments],
                env=os.environ | own,
                stdout=subprocess.DEVNULL if quiet else None,
                start_new_session=True,  # the terminal's Ctrl-C comes here, and is handed on once
            )
            children.append(child)
        first = _watched(children)
    codes = [child.returncode for child in children]
    if first is None or (codes[0] > 0 and codes[first] >= 0):
        return codes[0]
    reason = reasons_in(folder).get(first, "")
    raise TrainingError(
        f"process {first} of {n} {_ending(codes[first])}",
        where=str(folder),
        got=reason or "no message from it",
        expected=f"{n} processes that finish",
        hint="the others were stopped; " * (n > 1)
        + f"rlhf train --resume {folder}{f' --nproc {n}' * (n > 1)} resumes from the last checkpoint",
    )


def _watched(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all; return the number of the one that failed first, or None."""
    first: int | None = None
    deadline = float("inf")
    while None in [child.poll() for child in children]:
        failed = [i for i, child in enumerate(children) if child.returncode]
        if failed and first is None:
            first, deadline = failed[0], time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        time.sleep(_POLL_S)
    if first is None:
        first = next((i for i, child in enumerate(children) if child.returncode), None)
    return first


@contextmanager
def _handing_on(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def hand_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for child in children:
            child.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
