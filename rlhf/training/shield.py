"""Awaiting work to its end even when the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def shielded(work: Awaitable[T]) -> T:
    """Return what `work` returns; if cancelled meanwhile, raise CancelledError once it has ended.

    An error of `work` is raised in either case. A second cancellation does not wait.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        raise
