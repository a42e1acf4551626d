"""RLOO: REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic.dataclasses import dataclass

from rlhf.checking import Scale
from rlhf.credit.groups import CriticFree, broadcast_trajectories, group_counters, group_returns, normalise
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RLOO(CriticFree):
    """Leave-one-out advantage (RLOO): A_i = R_i − mean of the other R_j = G / (G − 1) · (R_i − mean R).

    It is the same for every token of trajectory i.

    The baseline of a trajectory does not depend on it, so the gradient is unbiased. Equal scores give exactly 0. A lone
    trajectory has no baseline and gives 0 (published versions disagree: 0, or its score).

    Source: Back to Basics, arXiv 2402.14740.
    """

    scale: ClassVar[Scale] = "baseline"

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        return Credit(broadcast_trajectories(group, leave_one_out(returns)), group_counters(returns))


def leave_one_out(returns_G: Sequence[float]) -> list[float]:
    """Return `[G]` minus the mean of the others; exactly 0 where all are equal, and for one alone."""
    correction = len(returns_G) / max(len(returns_G) - 1, 1)
    return [correction * x for x in normalise(returns_G, by_std=False)]
