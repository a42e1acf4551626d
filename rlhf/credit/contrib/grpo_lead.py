"""GRPO-LEAD: short right answers earn more, wrong ones cost, and hard tasks weigh more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.groups import (
    CriticFree,
    broadcast_trajectories,
    correct,
    group_counters,
    group_returns,
    mean_and_std,
    normalise,
)
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GRPOLead(CriticFree):
    """Difficulty-weighted GRPO (GRPO-LEAD).

    A_i = w(ρ) a_i where a_i > 0, else w(1 − ρ) a_i; a_i = (R'_i − mean R') / (std R' + ε), ρ the share of right.

    R'_i = R_i exp(−α z_i) for a right trajectory, z_i being its number of sampled tokens in deviations from the mean of
    the right ones, and `wrong_score` for the others. w(ρ) = A + (B − A) / (1 + exp(k (ρ − ρ₀))) falls from B for tasks
    that are hardly solved to A for easy ones. A group of wrong ones only, equal R' and a lone trajectory give exactly
    0; advantages do not sum to 0.

    The authors' code shortens only where answers exceed 4000 tokens, and gives degenerate repetition −2: not so here,
    as both are made for long answers to problems in mathematics, and a reward can do the second.

    Source: GRPO-LEAD, arXiv 2504.09696; aeroplanepaper/GRPO-LEAD.
    """

    alpha: Annotated[float, Field(ge=0)] = 0.05
    """α, the effect of one standard deviation of length on the score of a correct trajectory."""
    wrong_score: Annotated[float, Field(allow_inf_nan=False)] = -1.0
    """R' of a wrong trajectory, replacing its score."""
    correct_above: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """null: an attempt is correct if the environment reports success. A number: if its total score is above it."""
    min_weight: Annotated[float, Field(ge=0)] = 0.4
    """A, the weight that w falls to."""
    max_weight: Annotated[float, Field(ge=0)] = 1.5
    """B, the weight that w falls from."""
    midpoint: float = 0.75
    """ρ₀, the share of correct attempts at the midpoint of w."""
    steepness: Annotated[float, Field(ge=0)] = 10.0
    """k, how fast w falls."""
    ddof: Literal[0, 1] = 1
    """1 divides the sums of squares by n − 1, 0 by n."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviations."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        scores = group_returns(group)
        is_right = correct(group, self.correct_above)
        lengths = [t.n_policy_tokens for t in group.trajectories]
        factors = iter(self.length_factors([n for n, right in zip(lengths, is_right, strict=True) if right]))
        shaped = [r * next(factors) if right else self.wrong_score for r, right in zip(scores, is_right, strict=True)]
        share = sum(is_right) / max(len(is_right), 1)
        up, down = self.difficulty_weight(share), self.difficulty_weight(1 - share)
        advantages = [(up if a > 0 else down) * a for a in normalise(shaped, by_std=True, ddof=self.ddof, eps=self.eps)]
        return Credit(broadcast_trajectories(group, advantages), group_counters(shaped))

    def length_factors(self, n_tokens: Sequence[int]) -> list[float]:
        """Return exp(−α z) for the lengths of the right trajectories; 1 for one alone."""
        mean, std = mean_and_std([float(n) for n in n_tokens], self.ddof)
        return [math.exp(-self.alpha * (n - mean) / (std + self.eps)) if std else 1.0 for n in n_tokens]

    def difficulty_weight(self, share: float) -> float:
        """Return w(ρ)."""
        # tanh does not overflow where exp would: 1 / (1 + e^x) = (1 − tanh(x / 2)) / 2.
        falls = (1 - math.tanh(self.steepness * (share - self.midpoint) / 2)) / 2
        return self.min_weight + (self.max_weight - self.min_weight) * falls
