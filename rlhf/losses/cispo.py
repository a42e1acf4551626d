"""CISPO: clipped importance weight of a REINFORCE loss."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import log_ratio
from rlhf.losses.regularized import Regularized
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CISPO(Regularized):
    """CISPO loss: l = −w · A · log π, w = clip(ρ, 1 − ε_low, 1 + ε_high) without gradient.

    PPO silences a token whose ratio has left the range; here it goes on pulling, with a bounded weight, so that rare
    tokens on which a long chain of thought turns are not lost. With ε_low 1 it is `reinforce` with a `max_weight` of
    1 + ε_high. At ρ = 1 the gradient is −A ∇log π: the plain policy gradient.

    Source: MiniMax-M1, arXiv 2506.13585.
    """

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    """ε_low: weights are at least 1 − ε_low; 1 is no bound, as in the paper."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """ε_high: weights are at most 1 + ε_high; .inf is no bound. The paper tunes it and gives no number."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        ratio = log_ratio(inputs.policy_logprobs.detach(), inputs.old_logprobs).exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {
            "loss/clip_high_share": inputs.mean_share((ratio > 1 + self.clip_high).to(ratio)),
            "loss/clip_low_share": inputs.mean_share((ratio < 1 - self.clip_low).to(ratio)),
        }
        return self.output(inputs, -weight * inputs.advantages * inputs.policy_logprobs, metrics)
