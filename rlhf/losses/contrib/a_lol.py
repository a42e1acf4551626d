"""A-LoL: log-likelihood of sequences with a positive advantage, weighted by advantage and importance ratio."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import IgnoredKeys
from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import MAX_LOG_RATIO, log_ratio
from rlhf.losses.regularized import Regularized
from rlhf.losses.trajectories import Whole
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ALoL(Regularized):
    """Advantage-filtered loss (A-LoL): l = −A · w · log π where A > 0, else 0.

    w = clip(ρ, 1 − ε_low, 1 + ε_high) without gradient.

    ρ is the ratio of the whole trajectory, the product over its tokens, or the token's own. What scored below the
    baseline is not pushed down but left out, so the loss stays a weighted likelihood and cannot run away: it is made
    for data that the policy did not sample just now. log π of −2.0, log π_old of −2.3 and A = .3 give
    .3 · e^.3 · 2.0 = .809915.

    Here the data are the step's own trajectories. π_old takes the place of the paper's π_ref, the policy that the data
    come from, and the advantage is the estimator's: with Dr.GRPO, the mean of the group is the value of the task. All
    trajectories with A > 0 are used, where the paper draws them in proportion to A.

    Source: Advantage-leftover-lunch RL, arXiv 2305.14718.
    """

    ratio_keys: ClassVar[tuple[str, ...]] = ("ratio", "clip_low", "clip_high")
    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("ratio", "none", ("clip_low", "clip_high")),)
    reductions: ClassVar[tuple[str, ...]] = ("seq_mean_token_sum", "seq_mean_token_sum_norm")

    ratio: Literal["trajectory", "token", "none"] = "trajectory"
    """Level of the ratio: the trajectory, the token (A-LoL seq.), or none (A-LoL ref. free)."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.9
    """ε_low: weights are at least 1 − ε_low; 1 is no bound."""
    clip_high: Annotated[float, Field(ge=0)] = 0.9
    """ε_high: weights are at most 1 + ε_high; .inf is no bound."""

    @property
    def needs_whole(self) -> Whole | None:
        """Level of `LossInputs.trajectories` that the ratio needs."""
        return "trajectory" if self.ratio == "trajectory" else None

    @property
    def needs_fresh_samples(self) -> bool:
        """True if the gradient is right for the first update of a step alone."""
        return self.ratio == "none"

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        weight = self._log_ratio(inputs).exp().clamp(1 - self.clip_low, 1 + self.clip_high)
        return self.output(inputs, -inputs.advantages.clamp(min=0) * weight * inputs.policy_logprobs)

    def _log_ratio(self, inputs: LossInputs) -> torch.Tensor:
        policy = inputs.policy_logprobs.detach()
        if self.ratio == "none":
            return torch.zeros_like(policy)
        if self.ratio == "token":
            return log_ratio(policy, inputs.old_logprobs)
        whole = inputs.whole_trajectories()
        return whole.spread(whole.log_ratios, inputs.trajectory_ids).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).to(policy)
