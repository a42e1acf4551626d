"""ROVER: log-ratios as Q-values of the uniformly random policy, by regression."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.regularized import Regularized, given
from rlhf.losses.trajectories import Whole, next_in
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ROVER(Regularized):
    """ROVER: l = (Q − A − λ q̄')², Q = log π − log π_old of the token.

    q̄' is its mean over the vocabulary at the next token.

    Where episodes are trees and only the end is scored, acting greedily on the value of the policy that picks uniformly
    is optimal, and that value needs no policy to evaluate it. Here the log-ratio stands for it; the target, advantage
    and next value, carries no gradient. No clipping, no product of ratios, and much diversity is kept. Advantages .5,
    log-ratios .1 and −.1, q̄' of −.1 and, behind the end, 0: targets .4 and .5, loss (.3² + .6²) / 2 = .225.

    The next token is the next one that the policy sampled, in whichever turn; what the environment says between is
    taken as given. The advantage is the attempt's score less the group's mean (`dr_grpo`). At π = π_old both Q and q̄'
    are 0 and the gradient is −2 A ∇log π: with one update per step the policy gradient at another rate, and λ has no
    effect. With several, the means of π_old are computed before the first, in one forward pass without gradient.

    λ is the authors' `next_q_scale_factor`. Their `rover_t` t multiplies Q and q̄' alike and has no key here: it makes
    t² of this loss with advantages A / t, so scaled rewards and another learning rate do the same. All are 1 by
    default; in the example t = .5 gives .23125, λ = .5 gives .24125.

    Source: Random policy valuation is enough for LLM reasoning with verifiable rewards, arXiv 2509.24981; its code,
    `dp_actor.py`.
    """

    in_units_of_reward: ClassVar[bool] = True
    ratio_keys: ClassVar[tuple[str, ...]] = ("next_weight", "clip")
    needs_mean_logprobs: ClassVar[bool] = True
    needs_whole: ClassVar[Whole] = "tokens"

    next_weight: Annotated[float, Field(ge=0)] = 1.0
    """λ, the weight of the next state's value; 0 regresses the log-ratio on the advantage alone."""
    clip: Annotated[float, Field(gt=0, lt=1)] | None = None
    """ε: Q stops at ln(1 − ε) and ln(1 + ε) where its target lies further out, and the token has no gradient there; one
    that is beyond while its target is not comes back. null is no bound."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        q = inputs.policy_logprobs - inputs.old_logprobs
        target = inputs.advantages + self.next_weight * self._next_values(inputs).to(q)
        if self.clip is not None:
            bounded = q.clamp(math.log1p(-self.clip), math.log1p(self.clip))
            leaves = (target - q) * (q - bounded) > 0  # beyond the bound, and pushed further
            q = torch.where(leaves, bounded, q)
        return self.output(inputs, (q - target).square())

    def _next_values(self, inputs: LossInputs) -> torch.Tensor:
        whole, at = inputs.whole_tokens()
        means = given(whole.mean_logprobs, "mean_logprobs")
        old = means if whole.old_mean_logprobs is None else whole.old_mean_logprobs
        return next_in(means - old, whole.trajectory_ids)[at]
