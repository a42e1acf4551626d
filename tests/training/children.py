"""`rlhf` commands in processes of their own, which may be killed, limited or interrupted.

The processes are forked from a server that has loaded torch once; each begins as a fresh interpreter would.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["rlhf.cli", "rlhf.build.train", "peft"])

#: Longest that a command of a test may take.
LIMIT_S = 600.0


@dataclass(frozen=True)
class EpisodeEnded:
    """How a command ended: its exit code (minus the signal that killed it) and what it said."""

    code: int
    out: str
    err: str


def run(
    folder: Path,
    *arguments: str | Path,
    kill_at: int | None = None,
    kill_after_s: float | None = None,
    within: str = "/run",
    max_file_bytes: int | None = None,
) -> EpisodeEnded:
    """Run `rlhf ARGUMENTS` and wait for its end.

    Args:
        folder: where its output is kept.
        arguments: of the command line.
        kill_at: SIGKILL before the n-th time that it opens, renames or removes a file of a run.
        kill_after_s: SIGKILL so long after the first time.
        within: part of the paths that count.
        max_file_bytes: no file may grow beyond; a write that would fails, as on a full disk.
    """
    texts = folder / "stdout.txt", folder / "stderr.txt"
    events = _Events(kill_at, kill_after_s, within)
    process = _CONTEXT.Process(target=_main, args=([str(a) for a in arguments], *texts, events, max_file_bytes))
    process.start()
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"rlhf {arguments} took longer than {LIMIT_S:g} s: {texts[1].read_text()}")
    return EpisodeEnded(process.exitcode, texts[0].read_text(), texts[1].read_text())


def n_events(ended: EpisodeEnded) -> int:
    """How often the command touched files of a run."""
    return int(ended.err.splitlines()[-1].removeprefix("events "))


def _main(arguments: list[str], out: Path, err: Path, events: _Events, max_file_bytes: int | None) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch

    from rlhf.cli import main

    torch.set_num_threads(1)
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))
    sys.addaudithook(events)
    sys.argv = ["rlhf", *arguments]
    try:
        main()
    finally:
        print(f"events {events.n}", file=sys.stderr, flush=True)


@dataclass
class _Events:
    """Counts what a process does to the files of its run, and ends it at one of them, or some time after the first."""

    kill_at: int | None
    kill_after_s: float | None
    within: str
    n: int = 0

    NAMES: ClassVar = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"})

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in self.NAMES and self.within in str(arguments[0]):
            self.n += 1
            if self.n == self.kill_at:
                _end()
            if self.n == 1 and self.kill_after_s is not None:
                threading.Timer(self.kill_after_s, _end).start()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
