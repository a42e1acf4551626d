"""GSPO: sequence-level importance ratio."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import clip_metrics, clipped_surrogate
from rlhf.losses.regularized import Regularized
from rlhf.losses.trajectories import Whole
from rlhf.settings import STRICT

#: Bound of log s from above, in nats, as in verl; it binds only where nothing else does, at negative advantages.
MAX_LOG_SEQUENCE_RATIO = 10.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GSPO(Regularized):
    """Sequence-level PPO (GSPO): l = max(−A s, −A clip(s, 1 − ε_low, 1 + ε_high)).

    s = exp(mean of log π − log π_old over the trajectory).

    The reward is for the trajectory, and so is the ratio: the geometric mean of the tokens' ratios. Single ratios of
    long answers, and of mixture-of-experts models whose routing changes with an update, are too noisy to clip by. A
    trajectory is clipped as a whole, and far more tokens are than under PPO. Ratios of e^.1, e^-.05, e^.01 give
    s = e^.02 = 1.020201.

    Each token carries its share of the gradient, s ∇log π_t, which the reduction's 1 / T makes that of s; tokens may
    have advantages of their own (GSPO-token). At s = 1 the gradient is −A ∇log π: the plain policy gradient.

    Only sampled tokens count, and s is over the whole trajectory however it lies in rows; other code has one per row.

    Source: Group sequence policy optimization, arXiv 2507.18071; verl, `compute_policy_loss_gspo`.
    """

    ratio_keys: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    needs_whole: ClassVar[Whole] = "trajectory"
    reductions: ClassVar[tuple[str, ...]] = ("seq_mean_token_mean", "per_trajectory_mean")

    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """ε_low: lower clipping bound 1 − ε_low of s. Token-level bounds are some three orders of magnitude too wide."""
    clip_high: Annotated[float, Field(ge=0)] = 4e-4
    """ε_high: upper clipping bound 1 + ε_high of s; .inf is no bound."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        whole, policy = inputs.whole_trajectories(), inputs.policy_logprobs
        log_s = whole.spread(whole.log_ratios / whole.n_tokens, inputs.trajectory_ids).to(policy)
        s = (log_s + policy - policy.detach()).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        loss = clipped_surrogate(s, inputs.advantages, self.clip_low, self.clip_high)
        return self.output(inputs, loss, clip_metrics(inputs, s, self.clip_low, self.clip_high))
