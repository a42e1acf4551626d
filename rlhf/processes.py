"""Process group of the learners: rank, number of processes, and collectives of Python objects.

All of them run the same program on the same recipe. Each drives its share of the tasks of a step and of its
micro-batches; everything else they compute alike, from the same values, so there is nothing to agree on. The first one
alone writes files. Every wait has a limit; a process that fails leaves its reason in the run's folder, where the others
find it when it no longer answers.

A process is one of several for as long as it lives, as `torch.distributed` has it too, so what it is part of is a
matter of the process: `current()`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rlhf.errors import RecipeError, RlhfError, TrainingError
from rlhf.spans import span

T = TypeVar("T")

#: Seconds that another process's reason is waited for when it no longer answers.
_REASON_S = 3.0

#: What the libraries say when another process does not answer; they raise plain RuntimeErrors.
_SIGNS = ("gloo", "nccl", "connection", "peer", "timed out", "timeout", "socket", "distributed")


class ProcessError(TrainingError):
    """Another process has ended, or does not answer."""


@dataclass
class ProcessGroup:
    """Process group of a stage, as seen by one rank.

    Attributes:
        rank: which one this is, from 0.
        n: how many there are.
        timeout_s: longest wait for another one.
        folder: of the run, where a process that fails leaves its reason.
        stops: whether a signal has asked this one to stop.
        stops_together: whether all have agreed to.
    """

    rank: int = 0
    n: int = 1
    timeout_s: float = 1800.0
    folder: Path | None = None
    stops: bool = False
    stops_together: bool = False
    _group: Any = None

    @property
    def is_main(self) -> bool:
        """True for the process that writes files and talks to the user."""
        return self.rank == 0

    def begin(self, folder: Path) -> None:
        """Work for the run in `folder`; what earlier failures have left there goes."""
        self.folder, self.stops, self.stops_together = folder, False, False
        if self.is_main:
            for old in folder.glob("process-*.failed"):
                old.unlink()
        self.gather(None, "the folder of the run")

    def share(self, n: int) -> slice:
        """Slice of `n` things for this process: contiguous, balanced to within one.

        Five for two processes: 0 to 2, and 3 to 4.
        """
        each, more = divmod(n, self.n)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def gather(self, value: T, what: str) -> list[T]:
        """Return what every process gave, by rank.

        Args:
            value: anything that can be pickled.
            what: is gathered, for messages.

        Raises:
            ProcessError: another process has ended or did not come within `timeout_s`.
        """
        if self.n == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.n
        with span("processes"), self.comm_errors(what):
            dist.all_gather_object(found, value, group=self._group)
        return found

    def from_main(self, value: T, what: str) -> T:
        """Return what the first process gave."""
        if self.n == 1:
            return value
        import torch.distributed as dist

        found: list[Any] = [value if self.is_main else None]
        with self.comm_errors(what):
            dist.broadcast_object_list(found, src=0, group=self._group)
        first: T = found[0]
        return first

    def agree_to_stop(self) -> bool:
        """True if a stop signal reached any process; all get the same answer."""
        self.stops_together = self.n > 1 and any(self.gather(self.stops, "whether to stop"))
        return self.stops_together

    @contextmanager
    def comm_errors(self, what: str) -> Iterator[None]:
        """Context that turns a failure of waiting for the other processes into a ProcessError with their reason."""
        begun = time.monotonic()
        try:
            yield
        except RlhfError:
            raise
        except RuntimeError as error:
            text = str(error)
            if self.n == 1 or not any(sign in text.lower() for sign in _SIGNS):
                raise
            waited = time.monotonic() - begun
            raise self._silence(what, text, waited) from error

    def record_failure(self, error: BaseException) -> None:
        """Leave the reason why this one stops, for the others; a silence of another one is none."""
        if self.n == 1 or self.folder is None or isinstance(error, ProcessError):
            return
        text = str(error) if isinstance(error, RlhfError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self._reason_file.with_suffix(".partial")
            partial.write_text(text)
            partial.rename(self._reason_file)

    @property
    def _reason_file(self) -> Path:
        return (self.folder or Path()) / f"process-{self.rank}.failed"

    def reasons(self) -> dict[int, str]:
        """Return what processes that failed have left, by rank."""
        return reasons_in(self.folder) if self.folder else {}

    def _silence(self, what: str, text: str, waited: float) -> ProcessError:
        found = self.reasons()
        deadline = time.monotonic() + _REASON_S
        while not found and time.monotonic() < deadline:
            time.sleep(0.05)
            found = self.reasons()
        others = {rank: reason for rank, reason in found.items() if rank != self.rank}
        if others:
            rank, reason = next(iter(others.items()))
            return ProcessError(f"process {rank} has failed: {reason}", where=f"process {self.rank}, {what}")
        is_late = waited >= 0.9 * self.timeout_s
        return ProcessError(
            "another process did not arrive in time" if is_late else "another process exited without an error message",
            where=f"process {self.rank}, {what}",
            got=f"nothing in {waited:.0f} s ({text.splitlines()[0][:200]})",
            expected=f"an answer within {self.timeout_s:g} s",
            hint="raise trainer.timeout_s if it was only slow"
            if is_late
            else "check whether it was killed, for example for lack of memory",
        )


_current = ProcessGroup()


def current() -> ProcessGroup:
    """Return the group that this process is part of: itself alone, unless it has joined others."""
    return _current


def reasons_in(folder: Path) -> dict[int, str]:
    """Return what processes that failed have left in a run's folder, by rank."""
    found = {}
    for path in sorted(folder.glob("process-*.failed")):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.stem.removeprefix("process-"))] = path.read_text()
    return found


def n_wanted() -> int:
    """Return how many processes a launcher has started, by the environment; 1 where there was none."""
    return _number("WORLD_SIZE", 1)


def n_here() -> int:
    """Number of processes on this machine."""
    return _number("LOCAL_WORLD_SIZE", n_wanted())


def join(timeout_s: float) -> ProcessGroup:
    """Find the other processes that a launcher has started; one alone makes a group of its own.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as `torchrun`, DeepSpeed's launcher and
    `rlhf train --nproc` set them. A process that shares its machine with others takes one GPU of it.

    Raises:
        ProcessError: they did not come within `timeout_s`.
    """
    global _current
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return _current
    n, rank = n_wanted(), _number("RANK", 0)
    if n == 1:
        atexit.register(leave)  # which NCCL wants
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(free_port())
    elif "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise RecipeError(
            "the launcher did not set the address of the first process",
            where="the environment",
            got=f"WORLD_SIZE={n} without MASTER_ADDR and MASTER_PORT",
            expected="all three",
            hint="start with torchrun, or with rlhf train RECIPE --nproc N",
        )
    take_one_gpu()
    found = ProcessGroup(rank, n, timeout_s)
    limit = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with found.comm_errors("the beginning"):
        try:
            dist.init_process_group(backend, rank=rank, world_size=n, timeout=limit)
        except dist.DistError as error:
            raise RuntimeError(f"distributed: {error}") from error
        found._group = dist.new_group(backend="gloo", timeout=limit)
    _current = found
    return found


def leave() -> None:
    """Part from the others. What is still on its way to them is lost."""
    global _current
    import torch.distributed as dist

    _current = ProcessGroup()
    if dist.is_initialized():
        dist.destroy_process_group()


def take_one_gpu() -> None:
    """Restrict CUDA to the visible GPU numbered LOCAL_RANK, which becomes device 0.

    Must come before anything asks CUDA what there is; once done, doing it again changes nothing.

    Raises:
        RecipeError: fewer GPUs are visible than processes were started on this machine.
    """
    local = _number("LOCAL_RANK", 0)
    visible = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    if n_here() == 1 and not local:
        return
    if len(visible) == 1:  # a launcher has given each process a GPU; libraries take the one numbered LOCAL_RANK
        os.environ["LOCAL_RANK"] = "0"
        return
    if not visible:
        import torch

        visible = [str(i) for i in range(torch.cuda.device_count())]
    if not visible:
        return
    if local >= len(visible):
        raise RecipeError(
            "there are more processes than GPUs",
            where="the environment variable LOCAL_RANK",
            got=f"{local}, with {len(visible)} visible GPUs",
            expected=f"at most {len(visible) - 1}",
            hint="start as many processes as there are GPUs",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[local]
    os.environ["LOCAL_RANK"] = "0"


def in_turn(items: Sequence[T], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Results for `items` in order, where process r has worked on items r, r + n, r + 2n and so on.

    Args:
        items: all of them.
        parts: of each process its results, in order; more than its share are left out.
    """
    return [parts[i % len(parts)][i // len(parts)] for i in range(len(items))]


def free_port() -> int:
    """Unused port outside the range of outgoing connections, which could take it before anyone listens."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if value and not value.isdecimal():
        raise RecipeError(
            "invalid process number", where=f"the environment variable {name}", got=value, expected="0, 1, ..."
        )
    return int(value) if value else default
