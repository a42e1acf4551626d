"""The loss of StableReinforce: PPO's surrogate with a log-ratio that is bounded before it is exponentiated."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import MAX_LOG_RATIO, clip_metrics, clipped_surrogate, log_ratio
from rlhf.losses.regularized import Regularized
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StableReinforce(Regularized):
    """StableReinforce: PPO with a clipped log-ratio: l = max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high)).

    ρ = exp(clip(log π − log π_old, ± b)).

    PPO's clipping does not bound a token that became much likelier though its advantage is negative. Here its ratio is
    at most e^b, and beyond it the token pushes no longer. (`ppo_clip` has the dual clip for that, which binds at 3.)
    The method's second part, leaving out advantages that are outliers of their step, is `filters.max_advantage_z: 3`.
    At ρ = 1 the gradient is −A ∇log π: the plain policy gradient. Its reward, .5 · form + right · (1 + .5 ·
    consistent), needs a judge of its own task: rewards `form`, `right` and both right and consistent, of weights .5, 1
    and .5.

    Source: R1-Reward, arXiv 2505.02835.
    """

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "max_log_ratio")

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """ε_low: lower clipping bound 1 − ε_low of the ratio; 1 is no bound."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """ε_high: upper clipping bound 1 + ε_high of the ratio; .inf is no bound."""
    max_log_ratio: Annotated[float, Field(gt=0, le=MAX_LOG_RATIO)] = 6.907755
    """b in nats; the default is ln 1000."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        d = log_ratio(inputs.policy_logprobs, inputs.old_logprobs)
        ratio = d.clamp(-self.max_log_ratio, self.max_log_ratio).exp()
        loss = clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        return self.output(inputs, loss, clip_metrics(inputs, ratio, self.clip_low, self.clip_high))
