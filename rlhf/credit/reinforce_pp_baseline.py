"""REINFORCE++-baseline: group-mean baseline, normalised over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.flat_tokens import silenced, whiten
from rlhf.credit.groups import (
    CriticFree,
    broadcast_trajectories,
    group_counters,
    group_returns,
    normalise,
    with_counters,
)
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReinforcePPBaseline(CriticFree):
    """REINFORCE++ with a group-mean baseline, normalised over the batch.

    A_t = (a_i − mean a) / (std a + ε), a_i = R_i − mean R of its group.

    Mean and deviation of a run over all tokens of the step.

    One task's deviation no longer magnifies small differences, as GRPO's does. With `subtract_mean` a group whose
    scores are all equal gets a small number of its own, since tokens of long and short trajectories do not balance; it
    is 0 without. Equal scores in every group, and lone trajectories only, give exactly 0 and count in
    `credit/n_zero_std_steps`; verl leaves a lone trajectory its score.

    ε is added to the deviation, as everywhere here; the authors add 1e-8 to the variance.

    Source: REINFORCE++, arXiv 2501.03262; verl, `compute_reinforce_plus_plus_baseline_outcome_advantage`.
    """

    subtract_mean: bool = True
    """Subtract the mean over the step's tokens a second time, as the authors do."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation, the one with n − 1."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`, which is taken to be the whole step."""
        return self.over_batch([group])[0]

    def over_batch(self, groups: Sequence[ScoredGroup]) -> list[Credit]:
        """Return the credit of each group of a step."""
        centred = [
            Credit(broadcast_trajectories(group, normalise(returns, by_std=False)), group_counters(returns))
            for group, returns in ((group, group_returns(group)) for group in groups)
        ]
        whitened = whiten(groups, centred, subtract_mean=self.subtract_mean, eps=self.eps)
        n_flat = float(whitened is None and any(group.trajectories for group in groups))
        return with_counters(whitened or silenced(centred), {"credit/n_zero_std_steps": n_flat})
