"""Return values of functions of an untrusted program, asked from outside."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rewards.sandbox import values
from rewards.sandbox.harness import HARNESS, PROGRAM, decode, encode
from rewards.sandbox.level import Isolation
from rewards.sandbox.run import Bounds, Finished, Sandbox, run
from rlhf.data.clock import CALL_CLOCK

#: Share of the time of a reward that the programs of one answer may take together.
_PROGRAMS_SHARE = 0.8
#: Why a test is failed that was not begun.
NO_TIME = "no time was left for it: the program has used up its share of limits.reward_timeout_s"


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Call of a function of the tested program.

    Attributes:
        name: of the function, or such as `Solution().add`.
        args, kwargs: plain values, or calls whose results are passed on without leaving the sandbox.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def coded(self) -> dict[str, Any]:
        """Return it as JSON. Raises TypeError where an argument is no plain value."""
        return {
            "name": self.name,
            "args": [_coded(value) for value in self.args],
            "kwargs": {key: _coded(value) for key, value in self.kwargs.items()},
        }

    def __str__(self) -> str:
        given = [*map(str, self.args), *(f"{key}={value}" for key, value in self.kwargs.items())]
        return f"{self.name}({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of a call.

    Attributes:
        coded: a plain value as JSON; see `rewards.sandbox.harness.decode`.
        wrong: why there is no value; empty where there is one.
    """

    coded: str = ""
    wrong: str = ""

    @property
    def value(self) -> Any:
        """The plain value, made anew each time; it may take long. None where something was wrong."""
        return None if self.wrong else decode(json.loads(self.coded))


async def call_all(
    program: str,
    calls: Sequence[FunctionCall],
    bounds: Bounds,
    isolation: Isolation | Sandbox | None = None,
    *,
    files: Mapping[str, bytes] | None = None,
    stop_early: bool = False,
) -> list[Returned]:
    """Load `program` and do `calls` in order, in one process as long as that lives.

    A call that ends the process (by an exit, a crash, a limit) has no value, and the calls after it are done in a new
    one; a program that ends before its first call is not tried again. The bounds are those of each process.

    Args:
        program: Python text; what it runs under `if __name__ == "__main__"` is not run.
        calls: to do.
        bounds: of each process.
        isolation: at which level, or in which sandbox, else the best of this machine.
        files: what its folder holds besides, by relative path.
        stop_early: give up at the first call without a value.

    Returns:
        one for each call.

    Raises:
        SandboxError: a process could not be run.
    """
    found: list[Returned] = []
    while len(found) < len(calls):
        token = secrets.token_hex(16)
        order = {"token": token, "calls": [call.coded() for call in calls[len(found) :]]}
        held = {**(files or {}), PROGRAM: program.encode(errors="replace"), HARNESS: _harness()}
        stdin = json.dumps(order).encode()
        left_s = program_s(bounds.wall_s)
        if not left_s:
            return [*found, *[Returned(wrong=NO_TIME)] * (len(calls) - len(found))]
        within = replace(bounds, wall_s=left_s)
        finished = await run(("python", HARNESS), stdin=stdin, files=held, bounds=within, isolation=isolation)
        new = await values.read(finished.stdout, token, len(calls) - len(found))
        found += [Returned(coded, wrong) for coded, wrong in new or ()]
        if len(found) < len(calls):
            found.append(
                Returned(wrong=_how(finished) if new is not None else "it returned what takes too long to read")
            )
            if not new or stop_early:
                found += [Returned(wrong=found[-1].wrong)] * (len(calls) - len(found))
    return found


def program_s(wall_s: float) -> float:
    """Seconds for a program's next process: `wall_s`, or less near the end of the reward's time.

    The rest of it is ours, so that a program that takes all of its own is failed and never cuts the reward short.
    """
    clock = CALL_CLOCK.get()
    left_s = None if clock is None else clock.left_s(_PROGRAMS_SHARE)
    return wall_s if left_s is None else min(wall_s, left_s)


def _how(finished: Finished) -> str:
    last = finished.stderr.decode(errors="replace").rstrip().rpartition("\n")[2][:200]
    return f"{finished.ending}: {last}" if last else f"{finished.ending} without an answer"


def _coded(value: Any) -> Any:
    return ["call", value.coded()] if isinstance(value, FunctionCall) else encode(value)


@cache
def _harness() -> bytes:
    return Path(__file__).with_name("harness.py").read_bytes()
