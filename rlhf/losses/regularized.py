"""Base of the policy losses: KL term, entropy bonus, and the reduction to a LossOutput."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, scale_of
from rlhf.errors import DataError
from rlhf.losses.kl import KLKind, is_bounded, kl_estimate
from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.ratios import ratio_metrics
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Regularized:
    """Base of regularized losses Σ w · (l + β · KL(π, π_ref) − c · H(π)).

    The terms are reduced with the same weights as the policy loss l. A subclass computes l `[N]` and calls `output`.
    """

    #: Keys that say what happens where the ratio of new to old probability is not 1.
    ratio_keys: ClassVar[tuple[str, ...]] = ()
    #: What it does with groups whose attempts all score the same, where it learns from them; else empty.
    in_equal_groups: ClassVar[str] = ""
    #: Whether it needs advantages that are scores minus a baseline, in units of reward.
    in_units_of_reward: ClassVar[bool] = False

    kl: KLKind | None = None
    """KL estimator to the reference: k2, k3, k1+ or k3+ (`rlhf.losses.kl`); null needs no reference model. With
    `kl_coef` 0 the KL is only logged."""
    kl_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """KL coefficient β, in units of loss per nat."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """Adaptive KL: target in nats per token; β starts at `kl_coef` and is adapted after each step; null keeps it fixed.
    """
    kl_horizon: Annotated[int, Field(ge=1)] = 10_000
    """Adaptive KL: trajectories over which a KL that is 20% or more off its target changes β by a fifth."""
    entropy_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Coefficient c of the entropy bonus, in units of loss per nat."""

    def __post_init__(self) -> None:
        if self.kl == "k1":
            raise ValueError(
                "kl: k1 cannot be a loss term: the gradient of log π − log π_ref is zero on average. It belongs inside "
                "a reward (which this loss does not see); use k2 (gradient of the reverse KL), k3, or k1+ (value "
                "of k1, gradient of k2)"
            )
        if self.kl is None and self.kl_coef > 0:
            raise ValueError(f"kl_coef: {self.kl_coef} has no effect while kl is null; set kl to k2, k3, k1+ or k3+")

        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(f"kl_target: {self.kl_target} multiplies kl_coef, which is 0; set kl and kl_coef")
        if self.kl_target is None and self.kl_horizon != 10_000:
            raise ValueError(f"kl_horizon: {self.kl_horizon} has no effect while kl_target is null; remove it")

    def cautions(self, context: CheckContext) -> Iterator[str]:
        """Caution on groups it is not shown, advantages in other units, and a KL term without effect."""
        stage, kind = context.stage, context.kind_of("advantage", context.stage.advantage)
        if self.in_equal_groups and stage.filters.drop_zero_advantage:
            yield (
                f"{context.path} {self.in_equal_groups}, and groups whose attempts all score the same are left out: "
                "set filters.drop_zero_advantage to false"
            )
        is_scaled = context.recipe.is_listed("advantage", stage.advantage) and scale_of(stage.advantage) is None
        if self.in_units_of_reward and is_scaled:
            yield f"{context.path} needs advantages that are scores minus a baseline, {kind} gives others: use dr_grpo"
        if self.kl is not None and not self.kl_coef:
            yield f"{context.at('kl')} is measured only: kl_coef is 0, and the reference model costs a forward pass"

    def next_kl_coef(self, divergence: float, n_trajectories: int) -> float:
        """Adapted KL coefficient of the next step, β (1 + clip(divergence / target − 1, ± 0.2) · min(n / horizon, 1)).

        Without `kl_target` β stays, as it does where the divergence is not finite. β = .001, target .1, divergence .2
        and 256 of 10000 trajectories: .00100512.

        Source: Ziegler et al., Fine-tuning language models from human preferences, arXiv 1909.08593; verl,
        `AdaptiveKLController`.
        """
        if self.kl_target is None or not math.isfinite(divergence):
            return self.kl_coef
        error = min(max(divergence / self.kl_target - 1, -0.2), 0.2)
        return self.kl_coef * (1 + error * min(n_trajectories / self.kl_horizon, 1.0))

    @property
    def needs_ref(self) -> bool:
        """True if `LossInputs.ref_logprobs` must be given."""
        return self.kl is not None

    @property
    def needs_entropy(self) -> bool:
        """True if `LossInputs.entropy` must be given."""
        return self.entropy_coef > 0

    def output(
        self, inputs: LossInputs, policy_loss: torch.Tensor, metrics: Mapping[str, torch.Tensor] | None = None
    ) -> LossOutput:
        """Add the terms to `policy_loss` `[N]`, reduce, and add the metrics that every loss logs.

        Raises:
            DataError: the reference's log-probs or the entropy are needed and not given.
        """
        per_token = policy_loss
        means = dict(metrics or {})
        if self.kl is not None:
            policy, reference = inputs.policy_logprobs, given(inputs.ref_logprobs, "ref_logprobs")
            estimate = kl_estimate(self.kl, policy, reference)
            means["loss/kl_ref"] = inputs.mean_share(estimate)
            means["loss/kl_clamped_share"] = inputs.mean_share(is_bounded(self.kl, policy, reference).to(policy))
            if self.kl_coef > 0:
                per_token = per_token + self.kl_coef * estimate
        if self.entropy_coef > 0:
            per_token = per_token - self.entropy_coef * given(inputs.entropy, "entropy")
        loss = (inputs.weights * per_token).sum()
        shared, largest = ratio_metrics(inputs)
        totals = {"loss/total": loss.detach(), "loss/policy": (inputs.weights * policy_loss.detach()).sum()}
        return LossOutput(loss, {**totals, **shared, **means}, largest)


def given(values: torch.Tensor | None, name: str) -> torch.Tensor:
    """Return `values`, an array of `LossInputs` that only some losses need. Raises DataError for None."""
    if values is None:
        raise DataError(
            f"this loss needs {name}",
            where=f"LossInputs.{name}",
            got="None",
            expected="one number per policy token",
            hint="compute what the loss's needs_ref, needs_entropy and the like ask for",
        )
    return values
