"""What functions of an untrusted program return, asked from outside."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rewards.sandbox.harness import decode, encode
from rewards.sandbox.level import Way
from rewards.sandbox.run import Bounds, Finished, run


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of the tested program.

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
    """What came of a call.

    Attributes:
        value: a plain value, made here from text; without meaning where something was wrong.
        wrong: why there is no value; empty where there is one.
    """

    value: Any = None
    wrong: str = ""


async def call_all(
    program: str, calls: Sequence[Call], bounds: Bounds, way: Way | None = None, *, stop_early: bool = False
) -> list[Returned]:
    """Load `program` and do `calls` in order, in one process as long as that lives.

    A call that ends the process (by an exit, a crash, a limit) has no value, and the calls after it are done in a new
    one; a program that ends before its first call is not tried again. The bounds are those of each process.

    Args:
        program: Python text; what it runs under `if __name__ == "__main__"` is not run.
        calls: to do.
        bounds: of each process.
        way: at which level, else the best of this machine.
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
        files = {"program.py": program.encode(errors="replace"), "harness.py": _harness()}
        stdin = json.dumps(order).encode()
        finished = await run(("python", "harness.py"), stdin=stdin, files=files, bounds=bounds, way=way)
        new = _returned(finished, token, len(calls) - len(found))
        found += new
        if len(found) < len(calls):
            is_dead = not new
            found.append(Returned(wrong=_how(finished)))
            if is_dead or stop_early:
                found += [Returned(wrong=found[-1].wrong)] * (len(calls) - len(found))
    return found


def _returned(finished: Finished, token: str, n: int) -> list[Returned]:
    """Read the lines that carry the token, as long as they are in order and whole."""
    found: list[Returned] = []
    for line in finished.stdout.split(b"\n"):
        try:
            said_token, index, said = json.loads(line)
            if said_token != token or index != len(found) or len(found) == n:
                continue
            found.append(Returned(wrong=str(said["raised"])) if "raised" in said else Returned(decode(said["value"])))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            continue
    return found


def _how(finished: Finished) -> str:
    last = finished.stderr.decode(errors="replace").rstrip().rpartition("\n")[2][:200]
    return f"{finished.ending}: {last}" if last else f"{finished.ending} without an answer"


def _coded(value: Any) -> Any:
    return ["call", value.coded()] if isinstance(value, Call) else encode(value)


@cache
def _harness() -> bytes:
    return Path(__file__).with_name("harness.py").read_bytes()
