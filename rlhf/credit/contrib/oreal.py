"""OREAL: behaviour cloning of correct attempts, a penalty on wrong ones, and token weights of a critic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.estimator import require_values
from rlhf.credit.groups import group_counters, group_returns
from rlhf.credit.rloo import leave_one_out
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.data.scoring import TokensGNT
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OREAL:
    """OREAL advantage: leave-one-out scores, right and wrong attempts normalised apart, with optional token weights.

    Tokens of right attempts get N / N⁺ · a_i · ω⁺, those of wrong ones η N / N⁻ · a_i · ω⁻.
    a_i is the score less the mean of the others, above 0 for a right attempt. For scores of 0 and 1 that is the share
    of wrong ones times G / (G − 1): rare successes are cloned hardest, and failures of mostly solved tasks weigh most.
    N⁺ and N⁻ are the policy's tokens of right and wrong attempts that are used, N those of all in groups that differ:
    with `reduction: {kind: token_mean}` the loss is (1/N⁺) Σ −a ω⁺ log π + (η/N⁻) Σ −a ω⁻ log π, one mean for each side
    however the step falls out. Right and wrong attempts of 2 and 4 tokens, scores 1 and 0 and η = .5: a = ±1, N = 6,
    tokens get 3 and −.75.

    With `weights: critic` a token-level reward w_t (`critic: {kind: token_rewards}`) says which tokens matter:
    p_t = σ(mean of w up to token t), ω⁺ = max(2 p_t − 1, 0) and ω⁻ = max(1 − 2 p_t, 0). w = (2, −2): p = (.880797, .5),
    ω⁺ = (.761594, 0). Without it both are 1.

    With `one_of_each` a group counts as one right and one wrong attempt: each of n right ones has a share of 1/n in the
    sum and in N⁺, and likewise the wrong ones. Their code draws one of each; this is what is to be expected of it.
    Groups that do not differ have nothing to tell and give 0.

    Source: OREAL, arXiv 2502.06781; its `train_oreal.py` (`rloo`, `threshold_rescale` at .5, `pos_mult_adv`).
    """

    min_group: ClassVar[int] = 2
    #: Kind of the critic that it can have.
    takes_critic: ClassVar[str] = "token_rewards"

    weights: Literal["none", "critic"] = "none"
    """Token weights: none, or those of a token-reward critic."""
    negative_weight: Annotated[float, Field(ge=0)] = 0.5
    """η, the weight of wrong attempts; 0 is behaviour cloning."""
    one_of_each: bool = True
    """Count each group as one correct and one wrong attempt; otherwise every attempt counts."""

    @property
    def needs_values(self) -> bool:
        """True if a critic weighs tokens."""
        return self.weights == "critic"

    @property
    def needs_critic(self) -> str:
        """Kind of that critic."""
        return self.takes_critic

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`, which is taken to be the whole step."""
        return self.over_batch([group], None if values is None else [values])[0]

    def over_batch(self, groups: Sequence[ScoredGroup], values: Sequence[Values] | None = None) -> list[Credit]:
        """Return the credit of each group of a step.

        Raises:
            DataError: a score is not finite, or a critic is to weigh tokens and has not.
        """
        rewards: list[TokensGNT | None] = [None] * len(groups)
        if self.needs_values:
            rewards = [v.values_GNT for v in require_values(values, type(self).__name__)]
        returns = [group_returns(group) for group in groups]
        advantages = [_advantages(returns_G) for returns_G in returns]
        shares = [self.shares(advantages_G) for advantages_G in advantages]
        scale = self._scale(groups, advantages, shares)
        return [
            Credit(
                tuple(
                    _of_attempt(
                        [g.n_tokens for g in t.generations], a, share * scale[a < 0], None if w is None else w[i]
                    )
                    for i, (t, a, share) in enumerate(zip(group.trajectories, advantages_G, shares_G, strict=True))
                ),
                group_counters(returns_G),
            )
            for group, returns_G, advantages_G, shares_G, w in zip(
                groups, returns, advantages, shares, rewards, strict=True
            )
        ]

    def shares(self, advantages_G: Sequence[float]) -> list[float]:
        """Return `[G]`, how much of an attempt each counts as; 0 in groups that do not differ."""
        n_right, n_wrong = sum(a > 0 for a in advantages_G), sum(a < 0 for a in advantages_G)
        if not self.one_of_each:
            n_right, n_wrong = min(n_right, 1), min(n_wrong, 1)
        return [1 / n_right if a > 0 else 1 / n_wrong if a < 0 else 0.0 for a in advantages_G]

    def _scale(
        self,
        groups: Sequence[ScoredGroup],
        advantages: Sequence[Sequence[float]],
        shares: Sequence[Sequence[float]],
    ) -> tuple[float, float]:
        """Return N / N⁺ and η N / N⁻; 0 for a side without tokens."""
        right, wrong, n_all = [0.0], [0.0], 0
        for group, advantages_G, shares_G in zip(groups, advantages, shares, strict=True):
            for t, a, share in zip(group.trajectories, advantages_G, shares_G, strict=True):
                n = t.n_policy_tokens
                (right if a > 0 else wrong).append(share * n)
                n_all += n * any(shares_G)
        n_right, n_wrong = math.fsum(right), math.fsum(wrong)
        return n_all / n_right if n_right else 0.0, self.negative_weight * n_all / n_wrong if n_wrong else 0.0


def _advantages(returns_G: Sequence[float]) -> list[float]:
    """Return a_i `[G]`; exactly 0 where a score equals the mean up to rounding, which would make it count."""
    found = leave_one_out(returns_G)
    least = 1e-9 * max(map(abs, found), default=0.0)
    return [a if abs(a) > least else 0.0 for a in found]


def _of_attempt(
    lengths_N: Sequence[int], advantage: float, scale: float, rewards_NT: Sequence[Sequence[float]] | None
) -> tuple[tuple[float, ...], ...]:
    """Numbers of the tokens of an attempt, generation by generation."""
    weights = [1.0] * sum(lengths_N)
    if rewards_NT is not None:
        weights = token_weights([w for row in rewards_NT for w in row], advantage > 0)
    numbers = iter([advantage * scale * w for w in weights])
    return tuple(tuple(next(numbers) for _ in range(length)) for length in lengths_N)


def token_weights(rewards_T: Sequence[float], is_right: bool) -> list[float]:
    """ω⁺ or ω⁻ `[T]` of the tokens of an attempt by their rewards w: max(± tanh(mean of w up to t / 2), 0).

    2 σ(x) − 1 = tanh(x / 2).
    """
    sign = 1 if is_right else -1
    means = (total / (t + 1) for t, total in enumerate(accumulate(rewards_T)))
    return [max(sign * math.tanh(mean / 2), 0.0) for mean in means]
