"""NFT: negative-aware fine-tuning, likelihood with an implicit negative policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, IgnoredKeys, Problem, scale_of
from rlhf.errors import DataError
from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import log_ratio
from rlhf.losses.regularized import Regularized
from rlhf.settings import STRICT

#: Bound of log ρ in nats, on both sides (the authors bound it from above), and their bounds of the share of right ones.
MAX_LOG_RATIO = 10.0
MIN_SHARE, MAX_SHARE = 0.02, 0.98


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NFT(Regularized):
    """Negative-aware fine-tuning loss (NFT).

    l = −v log ρ for a right attempt, −v n log max((1 − q ρ) / (1 − q), c) for a wrong one.

    q is the share of right attempts in the group. What samples right attempts with π⁺ and wrong ones with π⁻ is
    π_old = q π⁺ + (1 − q) π⁻; so a policy π that stands for π⁺ leaves (1 − q ρ) / (1 − q) for π⁻ / π_old, and to make
    wrong attempts likely under that is to unlearn them. The bound c cuts the value and lets the gradient through; since
    (1 − q ρ) / (1 − q) < 1 where ρ > 1, the loss is 0 there at c = 1, and the gradient is not.

    v is 1 − q or √((1 − q) / q): at ρ = 1 the gradient is then −A ∇log π with the advantage of Dr.GRPO or that of GRPO,
    the plain policy gradient.

    q is read off the advantages, which must be those of Dr.GRPO for scores of 0 and 1: 1 − q for a right attempt and −q
    for a wrong one. A group without both kinds teaches nothing.

    Raises:
        DataError: an advantage is outside [−1, 1]; within it, those of other scores cannot be told from right ones.

    Source: Negative-aware fine-tuning, arXiv 2505.18116; its code, `dp_actor.py` (bounds of q and log ρ).
    """

    needs_unscaled_advantages: ClassVar[bool] = True
    ratio_keys: ClassVar[tuple[str, ...]] = ("min_negative",)
    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("negative_weight", 0, ("min_negative",)),)

    normalize: Literal["mean", "mean_std"] = "mean"
    """v: `mean` is 1 − q, `mean_std` √((1 − q) / q), which weighs rare successes more."""
    min_negative: Annotated[float, Field(gt=0)] = 1.0
    """c, the minimum of π⁻ / π_old, which bounds the gradient of one token."""
    negative_weight: Annotated[float, Field(ge=0)] = 1.0
    """n, the weight of wrong attempts; 0 trains on correct ones only."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse advantages that do not tell the share of right attempts."""
        estimator = context.stage.advantage
        if context.recipe.is_listed("advantage", estimator) and scale_of(estimator) != "group_mean":
            yield Problem(
                "this loss derives the success rate from the advantages, and these do not contain it",
                where=f"{context.stage_path}.advantage.kind",
                got=context.kind_of("advantage", estimator),
                expected="dr_grpo: score minus group mean",
                do="use advantage: {kind: dr_grpo}",
            )

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution about scores that are not those of one reward that is 0 or 1."""
        weights = [weighted.weight for weighted in context.recipe.rewards.values() if weighted.weight]
        if weights != [1]:
            yield f"{context.path} needs scores of 0 or 1, and the recipe adds up rewards of weights {weights}"
        yield from super().cautions(context)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        advantages = inputs.advantages
        if (advantages.abs() > 1 + 1e-4).any():
            raise DataError(
                "these advantages are not of binary scores",
                where="nft",
                got=f"an advantage of {float(advantages[advantages.abs().argmax()]):g}",
                expected="1 − q or −q, with q the share of right attempts in the group",
                hint="use advantage: {kind: dr_grpo} and one reward that is 0 or 1",
            )
        right = advantages > 0
        share = torch.where(right, 1 - advantages, -advantages).clamp(MIN_SHARE, MAX_SHARE)
        d = log_ratio(inputs.policy_logprobs, inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        rest = (1 - share * d.exp()) / (1 - share)
        bounded = rest + (rest.clamp(min=self.min_negative) - rest).detach()
        value = 1 - share if self.normalize == "mean" else ((1 - share) / share).sqrt()
        loss = torch.where(right, -value * d, -value * self.negative_weight * bounded.log())
        return self.output(inputs, torch.where(advantages == 0, 0.0, loss))
