"""The clipped surrogate of PPO, with separate bounds and dual clip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.losses.importance_correction import Rejection
from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import MAX_LOG_RATIO, clip_metrics, clipped_surrogate, log_ratio
from rlhf.losses.regularized import Regularized
from rlhf.losses.trajectories import Whole
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PPOClip(Regularized):
    """Clipped PPO: l = max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high)), ρ = exp(log π − log π_old).

    Where A < 0 it is at most c |A| (dual clip).

    The outer max makes the surrogate pessimistic: a token stops pushing once its ratio has moved far enough the way its
    advantage wants. The dual clip bounds the loss of a token that has become much likelier though its advantage is
    negative. At ρ = 1 (one update per batch) the gradient is −A ∇log π: the plain policy gradient.

    The defaults suit agents: clip-higher (ε_high 0.28, DAPO and RAGEN) keeps rare actions alive, without KL and entropy
    terms. `clip_high: 0.2` is PPO's own setting and that of verl-agent, which adds `kl: k3, kl_coef: 0.01`.

    With `ratio: turn` or `trajectory` ρ is the product over a reply, or over all of them. Each of n tokens has 1/n of
    that one loss, and the whole of its gradient in log π: with `reduction: seq_mean_token_sum` a trajectory counts the
    sum over its replies, runs of sampled tokens in a row. The longer a reply, the further its product drifts from 1,
    and the more is clipped.

    Source: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; clip-higher, DAPO, arXiv 2503.14476; ratios of turns and
    trajectories, LOOP, arXiv 2502.01600.
    """

    ratio_keys: ClassVar[tuple[str, ...]] = ("ratio", "clip_low", "clip_high", "dual_clip")

    ratio: Literal["token", "turn", "trajectory"] = "token"
    """Level of the clipped importance-sampling ratio: token, or the product over a reply, or over a trajectory."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """ε_low: lower clipping bound 1 − ε_low of the ratio; 1 is no bound."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """ε_high: upper clipping bound 1 + ε_high of the ratio; .inf is no bound."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual-clip bound c for negative advantages; null is no bound."""

    @property
    def needs_whole(self) -> Whole | None:
        """`trajectory` with a trajectory-level ratio, else None."""
        return "trajectory" if self.ratio == "trajectory" else None

    @property
    def reductions(self) -> tuple[str, ...]:
        """Reductions with which it equals its published formula; empty for any."""
        return () if self.ratio == "token" else ("seq_mean_token_sum", "seq_mean_token_sum_norm")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse masks of single tokens with ratios of whole replies."""
        stage, keys = context.stage, []
        if stage.filters.high_entropy_share is not None:
            keys.append("filters.high_entropy_share")
        if isinstance(stage.correction, Rejection) and any(one.over == "token" for one in stage.correction.criteria):
            keys.append("correction.criteria with over: token")
        if self.ratio == "turn" and keys:
            yield Problem(
                "single tokens are left out, so there is no product over a reply",
                where=context.at("ratio"),
                got=f"turn with {' and '.join(keys)}",
                expected="every token of a reply",
                do=f"use ratio: token, or remove {keys[0].partition(' ')[0]}",
            )

    def _products(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ratio that carries each token's gradient, number of tokens it is the product of), `[N]` each."""
        policy = inputs.policy_logprobs
        if self.ratio == "trajectory":
            whole = inputs.whole_trajectories()
            sums, counts = (whole.spread(x, inputs.trajectory_ids) for x in (whole.log_ratios, whole.n_tokens))
        else:
            reply = inputs.replies()
            moved = (policy - inputs.old_logprobs).detach().double()
            n = int(reply[-1]) + 1 if len(reply) else 0
            sums = moved.new_zeros(n).index_add(0, reply, moved)[reply]
            counts = torch.bincount(reply, minlength=n)[reply]
        sums = sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).to(policy)
        return (sums + policy - policy.detach()).exp(), counts.to(policy)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        advantages = inputs.advantages
        if self.ratio == "token":
            ratio, counts = log_ratio(inputs.policy_logprobs, inputs.old_logprobs).exp(), None
        else:
            ratio, counts = self._products(inputs)
        surrogate = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        metrics = clip_metrics(inputs, ratio, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            negative = advantages < 0
            bounded = torch.minimum(surrogate, -self.dual_clip * advantages)
            surrogate = torch.where(negative, bounded, surrogate)
            metrics["loss/clip_dual_share"] = inputs.mean_share((negative & (ratio > self.dual_clip)).to(ratio))
        if counts is not None:
            surrogate = surrogate - surrogate.detach() * (1 - 1 / counts)
        return self.output(inputs, surrogate, metrics)
