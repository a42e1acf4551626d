"""Asking one reward from within another: verifiers and functions, sync or async, number or verdict."""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any

from rewards.verified import Verified, is_verifier
from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import RewardError


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
    if isinstance(said, Verdict):
        return said
    if isinstance(said, int | float) and math.isfinite(said):
        return Verdict(float(said))
    name = getattr(part, "__name__", type(part).__name__)
    raise RewardError("returned no finite number", where=name, got=repr(said)[:200], expected="float or Verdict")
