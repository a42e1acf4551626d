r"""Run one program in the sandbox and return its result.

    finished = await run(("python", "main.py"), files={"main.py": b"print(6 * 7)"})
    finished.ending, finished.stdout        # Ending.OK, b"42\n"

Each run has a fresh folder, which is gone afterwards with all that the program began. What a program writes is bytes
that it chose: nothing in a `Finished` but its ending, times and sizes is a fact.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, runtime_checkable

from rewards.sandbox.confined import Bounds as Bounds
from rewards.sandbox.confined import ExitReason as ExitReason
from rewards.sandbox.confined import Finished as Finished
from rewards.sandbox.confined import SandboxError as SandboxError
from rewards.sandbox.confined import check_paths, run_at
from rewards.sandbox.level import Isolation
from rewards.sandbox.probe import probe_isolation
from rlhf.data.clock import waiting_for_turn

_T = TypeVar("_T")

#: As many runs at a time as there are cores, whoever asks: more would take each other's time and miss their limits.
_pool = ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1)


@runtime_checkable
class Sandbox(Protocol):
    """A place that programs run in, other than this machine's own sandbox; its fields are recipe keys."""

    def refuse_absent(self, where: str) -> None:
        """Raise RecipeError, about the key `where`, if nothing can be run there now."""

    async def run(
        self, program: Sequence[str], *, stdin: bytes, files: Mapping[str, bytes], bounds: Bounds
    ) -> Finished:
        """Run one program in a fresh folder; what it may use, and what is returned and raised, as by `run` below."""


async def run(
    program: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    bounds: Bounds | None = None,
    isolation: Isolation | Sandbox | None = None,
) -> Finished:
    """Run `program` and wait; at most one per core of this process, the others queue.

    Args:
        program: command; `python` is the sandbox's interpreter, anything else a full path that is visible inside.
        stdin: what it reads from its standard input.
        files: what its folder holds, by relative path.
        bounds: what it may use.
        isolation: at which level, or in which sandbox, else the best of this machine.

    Returns:
        how it ended. A program that hangs, crashes or breaks a limit is a result like any other.

    Raises:
        SandboxError: it could not be run, or not be watched.
        RewardError: a file's path leads out of the folder, or this machine has no sandbox.
    """
    if isinstance(isolation, Sandbox):
        check_paths(files or {})
        return await isolation.run(program, stdin=stdin, files=files or {}, bounds=bounds or Bounds())
    given_up = threading.Event()
    try:
        return await in_turn(lambda: run_blocking(program, stdin, files or {}, bounds or Bounds(), isolation, given_up))
    except asyncio.CancelledError:
        given_up.set()
        raise


async def in_turn(work: Callable[[], _T]) -> _T:
    """Run `work` in a sandbox thread; the reward's clock stands until its turn comes."""
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def working() -> _T:
        loop.call_soon_threadsafe(begun.set)
        return work()

    future = loop.run_in_executor(_pool, working)
    try:
        with waiting_for_turn():
            await begun.wait()
        return await future
    finally:
        future.cancel()  # where nobody waits any more


def run_blocking(
    program: Sequence[str],
    stdin: bytes,
    files: Mapping[str, bytes],
    bounds: Bounds,
    isolation: Isolation | None = None,
    given_up: threading.Event | None = None,
) -> Finished:
    """Do what `run` does in the present thread; setting `given_up` ends the program."""
    return run_at(program, stdin, files, bounds, isolation or probe_isolation().isolation, given_up)
