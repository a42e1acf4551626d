"""CPGD: clipped log-ratio, and a drift penalty towards the sampling policy."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import IgnoredKeys
from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import clip_metrics, log_ratio
from rlhf.losses.regularized import Regularized
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CPGD(Regularized):
    """CPGD loss: l = −min(A d, A clip(d, ln(1 − ε_low), ln(1 + ε_high))) + α · min(ρ − 1, c) · log π, d = log ρ.

    A ratio that is not clipped (A < 0, ρ large) multiplies PPO's gradient without bound; that of A d is A at most. The
    factor of the drift carries no gradient: while c does not bind, the term's gradient (ρ − 1) ∇log π is that of the k3
    estimate of KL(π_old ‖ π). Its value means nothing. At ρ = 1 the gradient is −A ∇log π: the plain policy gradient.

    The paper's constants are not public: ε is PPO's, α and c are choices of this project. Its average, over the tokens
    of a task and then over tasks, is no part of the loss here but a `reduction`; its bounds that widen along the
    sequence are left out.

    Source: Clipped policy gradient optimization with policy drift, arXiv 2505.12504.
    """

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "drift_coef", "max_drift")
    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("drift_coef", 0, ("max_drift",)),)

    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """ε_low: lower clipping bound 1 − ε_low of the ratio."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """ε_high: upper clipping bound 1 + ε_high of the ratio; .inf is no bound."""
    drift_coef: Annotated[float, Field(ge=0)] = 0.1
    """α, the coefficient of the drift term; 0 disables it."""
    max_drift: Annotated[float, Field(gt=0)] = 2.0
    """c, the maximum of ρ − 1 in the drift term."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        d = inputs.policy_logprobs - inputs.old_logprobs
        clipped = d.clamp(math.log1p(-self.clip_low), math.log1p(self.clip_high))
        ratio = log_ratio(inputs.policy_logprobs.detach(), inputs.old_logprobs).exp()
        loss = torch.maximum(-inputs.advantages * d, -inputs.advantages * clipped)
        loss = loss + self.drift_coef * (ratio - 1).clamp(max=self.max_drift) * inputs.policy_logprobs
        return self.output(inputs, loss, clip_metrics(inputs, ratio, self.clip_low, self.clip_high))
