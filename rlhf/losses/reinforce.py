"""REINFORCE: policy gradient, log-prob times advantage."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import log_ratio
from rlhf.losses.regularized import Regularized
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reinforce(Regularized):
    """REINFORCE loss: l = −w · A · log π, with w = 1, or w = min(π / π_old, max_weight) without gradient.

    With w = 1 the gradient is right for samples of the current policy only: one update per batch. The baseline is in
    the advantage.

    Source: Williams, 1992; verl, `compute_policy_loss_reinforce`.
    """

    ratio_keys: ClassVar[tuple[str, ...]] = ("max_weight",)

    max_weight: Annotated[float, Field(gt=0)] | None = None
    """Correct later updates of the same samples with the importance-sampling ratio, truncated here; null does not
    correct."""

    @property
    def needs_fresh_samples(self) -> bool:
        """True if the gradient is right for the first update of a step alone."""
        return self.max_weight is None

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        loss = -inputs.advantages * inputs.policy_logprobs
        if self.max_weight is not None:
            ratio = log_ratio(inputs.policy_logprobs.detach(), inputs.old_logprobs).exp()
            loss = loss * ratio.clamp(max=self.max_weight)
        return self.output(inputs, loss)
