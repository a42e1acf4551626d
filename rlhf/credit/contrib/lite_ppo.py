"""Lite PPO: group-mean baseline, batch standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.groups import (
    CriticFree,
    broadcast_trajectories,
    group_counters,
    group_returns,
    mean_and_std,
    normalise,
)
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LitePPO(CriticFree):
    """Lite PPO: group mean, step-wide deviation: A_i = (R_i − mean R of its group) / (std R of the step + ε).

    It is the same for every token of trajectory i.

    The deviation is that of the scores of all trajectories of the step, each counted once. Equal scores in a group and
    a lone trajectory give exactly 0, though both count in the deviation.

    Source: Tricks or Traps, arXiv 2508.08221 (Lite PPO, which also sums over tokens: `reduction: {kind: token_mean}`).
    """

    ddof: Literal[0, 1] = 1
    """1 divides the sum of squares by the number of trajectories − 1, 0 by their number."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`, which is taken to be the whole step."""
        return self.over_batch([group])[0]

    def over_batch(self, groups: Sequence[ScoredGroup]) -> list[Credit]:
        """Return the credit of each group of a step."""
        returns = [group_returns(group) for group in groups]
        _, std = mean_and_std([r for row in returns for r in row], self.ddof)
        scale = std + self.eps if std else 1.0
        return [
            Credit(
                broadcast_trajectories(group, [x / scale for x in normalise(row, by_std=False)]), group_counters(row)
            )
            for group, row in zip(groups, returns, strict=True)
        ]
