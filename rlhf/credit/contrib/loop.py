"""LOOP: leave-one-out advantages, the negligible ones set to 0."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.groups import broadcast_trajectories, group_counters, group_returns
from rlhf.credit.rloo import RLOO, leave_one_out
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LOOP(RLOO):
    """LOOP: leave-one-out advantage of RLOO, and 0 where |A_i| < `min_advantage`.

    A_i = R_i − mean of the other R_j.

    The authors leave such trajectories out of the update; here they keep their place in the reduction's denominators,
    unless their whole group is 0 (`filters.drop_zero_advantage`). The rest of LOOP is a PPO loss of several epochs,
    clipped to [1 / (1 + ε), 1 + ε] with ε = 0.1: `loss: {kind: ppo_clip, clip_low: 0.090909, clip_high: 0.1}` and
    `reduction: {kind: seq_mean_token_mean}`. Their other ratios, one per turn or per trajectory as the product over its
    tokens, are `ratio: turn` and `ratio: trajectory` of that loss, with `reduction: {kind: seq_mean_token_sum}`.

    Source: Reinforcement Learning for Long-Horizon Interactive LLM Agents, arXiv 2502.01600; apple/ml-loop.
    """

    min_advantage: Annotated[float, Field(ge=0)] = 0.01
    """Advantages with a smaller magnitude, in units of the score, are set to 0."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        advantages = leave_one_out(returns)
        kept = [a if abs(a) >= self.min_advantage else 0.0 for a in advantages]
        n_small = sum(bool(a) and not k for a, k in zip(advantages, kept, strict=True))
        return Credit(
            broadcast_trajectories(group, kept), group_counters(returns) | {"credit/n_small_advantages": float(n_small)}
        )
