"""REINFORCE++: token returns, normalised over the whole batch, without groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.flat_tokens import FlatTokens, credits_of, own_tokens, scan, whitened
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReinforcePP:
    """REINFORCE++ advantage: A_t = (G_t − mean G) / (std G + ε) over all sampled tokens of the step.

    G_t is the discounted score from token t on. The score of a turn lies on its last token, that of a turn in which
    nothing was sampled on the turn before it, or after where there is none; observations take no time. Works with one
    attempt per task. Equal returns everywhere, and a step of one token, give exactly 0 and count in
    `credit/n_zero_std_steps`.

    Differences from the paper and its code: a penalty for leaving the reference is a term of the loss here (`kl`), not
    part of the reward; and ε is added to the deviation, as everywhere here, not to the variance. verl also sets the
    return to 0 before every observation, which would cut a dialogue into pieces, and raises for a step of one token.

    Source: REINFORCE++, arXiv 2501.03262; verl, `compute_reinforce_plus_plus_outcome_advantage`.
    """

    needs_values: ClassVar[bool] = False
    min_group: ClassVar[int] = 1

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per sampled token."""
    subtract_mean: bool = True
    """Subtract the mean of the step, the only baseline."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation, the one with n − 1."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`, which is taken to be the whole step."""
        return self.over_batch([group])[0]

    def over_batch(self, groups: Sequence[ScoredGroup]) -> list[Credit]:
        """Return the credit of each group of a step."""
        line = FlatTokens.of(groups)
        returns_N = scan(line.rewards_N, line.tokens_S, self.gamma)
        found = whitened(returns_N, own_tokens(groups), subtract_mean=self.subtract_mean, eps=self.eps)
        return credits_of(groups, np.zeros_like(returns_N) if found is None else found, is_flat=found is None)
