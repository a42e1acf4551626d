"""Rewards that the environment itself decides."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT

_Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Outcome:
    """Outcome reward: one value for a solved episode, another for any other end."""

    inline: ClassVar[bool] = True

    success: _Finite = 1.0
    """Reward of a solved episode."""
    failure: _Finite = 0.0
    """Reward of one that failed or ran into a limit."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge by how the episode ended."""
        return Verdict(self.success if trajectory.solved else self.failure, why=trajectory.outcome.value)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EnvironmentReward:
    """The environment's own rewards, each on the turn that earned it."""

    inline: ClassVar[bool] = True

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Sum the rewards of the turns."""
        per_turn = tuple(turn.reward for turn in trajectory.turns)
        return Verdict(math.fsum(per_turn), why="sum of the environment's rewards", per_turn=per_turn)
