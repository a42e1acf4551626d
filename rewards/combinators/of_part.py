"""A reward for one part of a mixture of environments."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.base import Reward
from rewards.combinators.ask import ask
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OfPart:
    """Another reward for attempts at tasks of one part, and 0 for all others.

    A task of `environment: {kind: mixed}` has the name of its part in `Task.info["part"]`.
    """

    part: Annotated[str, Field(min_length=1)]
    """Name of the part."""
    reward: Reward
    """A reward or a verifier, with its kind and keys."""

    def asks(self, task: Task) -> bool:
        """True if the task is of the part."""
        return task.info.get("part") == self.part

    async def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Ask the reward where the task is of the part."""
        if not self.asks(task):
            return Verdict(0.0, why=f"not of {self.part}")
        return await ask(self.reward, task, trajectory)
