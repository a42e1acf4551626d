"""Asking one reward from within another: verifiers and functions, sync or async, number or verdict."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from rewards.gate import checked_verdict
from rewards.verified import Verified, is_verifier
from rlhf.data import Task, Trajectory, Verdict


async def ask(part: Any, task: Task, trajectory: Trajectory) -> Verdict:
    """Return the verdict of `part`; a plain function that is not `inline` runs in a thread.

    Raises:
        RewardError: it returned no finite number. What it raises itself is passed on.
    """
    reward: Any = Verified(part) if is_verifier(part) else part
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        said = await reward(task, trajectory)
    elif getattr(reward, "inline", False) is True:
        said = reward(task, trajectory)
    else:
        said = await asyncio.to_thread(reward, task, trajectory)
    if inspect.isawaitable(said):
        said = await said
    return checked_verdict(said, getattr(part, "__name__", type(part).__name__))
