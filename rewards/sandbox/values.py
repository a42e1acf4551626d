"""Reader of values that a tested program returned, in a process of its own with a time limit.

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
    """Return `[value as JSON, what was wrong]` for the calls that were answered; None if it took too long.

    Args:
        stdout: lines; those count that carry the token, as long as they are in order and whole.
        token: of this process.
        n: calls that it was asked for.
    """
    found: list[list[str]] | None = await _asked("read", stdout.decode("utf-8", "replace"), token, n)
    return found


async def compare(tests: Sequence[tuple[str, Any, Sequence[str]]]) -> list[str] | None:
    """Return for each test what was returned where that is wrong, else an empty text; None if it took too long.

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
