"""LightningRL: every policy call is a sample, with the score of its trajectory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.groups import (
    CriticFree,
    broadcast_trajectories,
    call_numbers,
    group_counters,
    group_returns,
    normalise,
)
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Lightning(CriticFree):
    """LightningRL advantage: A_i = (R_i − mean R) / (std R + ε) on every call of trajectory i.

    Statistics are per trajectory, or per call.

    Per trajectory it is GRPO, whatever an agent's calls are: planner or executor, with prompts that extend each other
    or not. `statistics: call` counts each trajectory once per call, as a trainer does that takes calls for single-turn
    samples: long trajectories then weigh more in the baseline, which is biased; it is there for comparison.

    The paper's loss gives each trajectory one weight: `reduction: {kind: per_trajectory_mean}`. Equal scores and a lone
    trajectory give exactly 0; a trajectory without calls counts in the statistics per trajectory alone.

    Source: Agent Lightning, arXiv 2508.03680; microsoft/agent-lightning, `rollout_level_advantage.py`.
    """

    statistics: Literal["trajectory", "call"] = "trajectory"
    """Unit of mean and deviation: each trajectory once, or each policy call once."""
    ddof: Literal[0, 1] = 1
    """1 divides the sum of squares by n − 1, 0 by n."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        population = returns
        if self.statistics == "call":
            population = [r for r, t in zip(returns, group.trajectories, strict=True) for _ in call_numbers(t)]
        advantages = normalise(returns, by_std=True, ddof=self.ddof, eps=self.eps, population=population)
        return Credit(broadcast_trajectories(group, advantages), group_counters(returns))
