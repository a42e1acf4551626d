"""Reader of returned values in a process of its own, with a time limit.

A few bytes can take hours to read or to compare: thousands of numbers with one hash in a set, lists of lists to be
sorted. That is the program's doing, so the test is failed, and nothing else waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from rewards.sandbox.run import in_turn
from rewards.worker_pool import Pool, TooSlow

#: Processor seconds for what one process of a program returned.
LIMIT_S = 1.0


async def read(stdout: bytes, token: str, n: int) -> list[list[str]] | None:
    """`[value as JSON, error]` of the answered calls; None on a timeout.

    Args:
        stdout: lines; those count that carry the token, as long as they are in order and whole.
        token: of this process.
        n: calls that it was asked for.
    """
    found: list[list[str]] | None = await _asked("read", stdout.decode("utf-8", "replace"), token, n)
    return found


async def compare(tests: Sequence[tuple[str, Any, Sequence[str]]]) -> list[str] | None:
    """Wrong value of each test, or an empty text; None on a timeout.

    Args:
        tests: `("assert", its text, values of its calls)`, or `("returns", the JSON wanted, [value])`; values as JSON.
    """
    found: list[str] | None = await _asked("compare", [list(test) for test in tests])
    return found


async def _asked(name: str, *arguments: Any) -> Any:
    try:
        return await in_turn(lambda: _pool().call(name, *arguments, limit_s=LIMIT_S))
    except TooSlow:
        return None


@cache
def _pool() -> Pool:
    return Pool("rewards.sandbox.judge:serve")
