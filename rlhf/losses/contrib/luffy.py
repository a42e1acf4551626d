"""LUFFY: off-policy demonstrations with policy shaping, beside PPO clip on own samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import log_ratio
from rlhf.losses.regularized import Regularized
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LUFFY(Regularized):
    """LUFFY loss: −A ρ on the policy's own tokens, −A f(p) on off-policy ones.

    f(p) = p / (p + γ), with p = π of the token.

    Demonstrations of another, whose probabilities are taken as 1, share a group with the policy's attempts. The plain
    ratio p / 1 would hardly move tokens that the policy finds unlikely, and these are what it can learn from: the
    gradient of f in log p is γ p / (p + γ)², at most 1/4, reached at p = γ. p = .2 and γ = .1: f = .666667, slope in p
    1.111111, in log p .222222; with A = .5 the loss is −.333333. Neither part is clipped.

    At ρ = 1 the gradient of own tokens is −A ∇log π: the plain policy gradient. Without off-policy tokens nothing else
    is left of the method. The advantage is the score less the group's mean (`dr_grpo`).

    Source: Learning to reason under off-policy guidance, arXiv 2504.14945; its code, `mix_core_alg.py`.
    """

    takes_off_policy: ClassVar[bool] = True

    shaping: Annotated[float, Field(gt=0)] = 0.1
    """γ: off-policy tokens of about this probability have the largest gradient."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse stages without demonstrations."""
        if context.stage.group_demonstrations is None and not context.is_trained:
            yield Problem(
                "this loss is for demonstrations among the attempts, and the stage adds none",
                where=context.at("kind"),
                got="luffy without group_demonstrations",
                expected="demonstrations: without them the loss is -A ratio",
                do="set group_demonstrations: {per_group: 1}, or use loss: {kind: ppo_clip}",
            )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        policy = inputs.policy_logprobs
        gain = log_ratio(policy, inputs.old_logprobs).exp()
        metrics = {}
        if inputs.off_policy is not None:
            shaped = torch.sigmoid(policy - torch.full_like(policy, self.shaping).log())  # p / (p + γ)
            gain = torch.where(inputs.off_policy, shaped, gain)
            metrics["loss/off_policy_share"] = inputs.mean_share(inputs.off_policy.to(policy))
        return self.output(inputs, -inputs.advantages * gain, metrics)
