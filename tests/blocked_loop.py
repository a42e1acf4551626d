"""For how long an event loop did not turn while something ran on it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EVERY_S = 0.002


def _queued_s() -> float:
    """Seconds for which this thread was ready to run and had no core: a busy machine's doing."""
    try:
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@dataclass(frozen=True)
class Stood:
    """What came of it, and the longest time between two turns of the loop, without that of waiting for a core."""

    result: Any
    longest_s: float


def standing(work: Callable[[], Coroutine[Any, Any, Any]]) -> Stood:
    """Run `work` on an event loop and look how long that stands."""

    async def both() -> Stood:
        longest_s, is_over = 0.0, False

        async def look() -> None:
            nonlocal longest_s
            last, queued_s = time.monotonic(), _queued_s()
            while not is_over:
                await asyncio.sleep(_EVERY_S)
                now, queued_now_s = time.monotonic(), _queued_s()
                longest_s = max(longest_s, now - last - _EVERY_S - (queued_now_s - queued_s))
                last, queued_s = now, queued_now_s

        looking = asyncio.ensure_future(look())
        await asyncio.sleep(0.01)
        try:
            result = await work()
            await asyncio.sleep(0.01)
        finally:
            is_over = True
            await looking
        return Stood(result, longest_s)

    return asyncio.run(both())
