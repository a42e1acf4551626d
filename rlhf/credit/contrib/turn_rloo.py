"""Turn-level RLOO: return to go of a turn less that of the other trajectories."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import Scale
from rlhf.credit.groups import CriticFree, broadcast_turns, group_counters, group_returns, turn_rewards
from rlhf.credit.returns import discounted_returns
from rlhf.credit.rloo import leave_one_out
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TurnRLOO(CriticFree):
    """Turn-level RLOO: A_{i,k} = D_{i,k} − mean of D_{j,k} over the other trajectories j.

    D_{i,k} = Σ_{l≥k} γ^{l−k} r_{i,l} is the return to go.

    A trajectory that has ended before turn k stands with its last turn, and one without turns with its score. What was
    earned before a turn is no part of its credit, and its baseline depends on the others alone, so with γ = 1 the
    gradient is unbiased, and its variance smaller than RLOO's where rewards come on the way. Where all that is earned
    is earned in the last turn and γ = 1, it is RLOO. A lone trajectory gives 0, and so do equal numbers.

    Source: Back to Basics, arXiv 2402.14740, for the others as baseline; Greensmith, Bartlett, Baxter, JMLR 5, 2004,
    for baselines of single turns.
    """

    scale: ClassVar[Scale] = "baseline"
    turn_discount: ClassVar[str] = "gamma"

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per turn."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        totals = group_returns(group)
        ahead_GK = [discounted_returns(row, self.gamma) for row in turn_rewards(group)]
        credit_GK = [[0.0] * len(row) for row in ahead_GK]
        n_alone = 0
        for k in range(max(map(len, ahead_GK), default=0)):
            column = [row[min(k, len(row) - 1)] if row else total for row, total in zip(ahead_GK, totals, strict=True)]
            present = [i for i, row in enumerate(ahead_GK) if k < len(row)]
            n_alone += len(present) == 1
            compared = leave_one_out(column)
            for i in present:
                credit_GK[i][k] = compared[i]
        is_silent = not any(x for row in credit_GK for x in row)
        counters = {"credit/n_singleton_turns": float(n_alone)}
        counters["credit/n_zero_std_groups"] = float(len(totals) > 1 and is_silent)
        return Credit(broadcast_turns(group, credit_GK), group_counters(totals) | counters)
