"""Dr.GRPO: group-mean baseline, without division by the standard deviation."""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from rlhf.checking import Scale
from rlhf.credit.groups import CriticFree, broadcast_trajectories, group_counters, group_returns, normalise
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DrGRPO(CriticFree):
    """A_i = R_i − mean R, the same for every token of trajectory i.

    Not dividing by the deviation removes the extra weight of tasks that are nearly always or nearly never solved. The
    bias towards long wrong answers goes only with a reduction that divides by a constant:
    `reduction: {kind: seq_mean_token_sum_norm, max_tokens: ...}`. Equal scores and a lone trajectory give exactly 0.

    Source: Understanding R1-Zero-like training, arXiv 2503.20783.
    """

    scale: ClassVar[Scale] = "group_mean"

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        return Credit(broadcast_trajectories(group, normalise(returns, by_std=False)), group_counters(returns))
