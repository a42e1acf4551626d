"""Asking one reward from within another: verifiers and functions, sync or async, number or verdict."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from rewards.base import Capabilities, name_of
from rewards.trl_function import as_reward
from rewards.validation import checked_verdict
from rlhf.data import Task, Trajectory, Verdict


async def ask(part: Any, task: Task, trajectory: Trajectory) -> Verdict:
    """Return the verdict of `part`; a plain function that is not `inline` runs in a thread.

    Raises:
        RewardError: it returned no finite number. What it raises itself is passed on.
    """
    reward = as_reward(part)
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        said = await reward(task, trajectory)
    elif Capabilities(reward).inline:
        said = reward(task, trajectory)
    else:
        said = await asyncio.to_thread(reward, task, trajectory)
    if inspect.isawaitable(said):
        said = await said
    return checked_verdict(said, name_of(part))
