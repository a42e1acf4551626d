"""Adaptive KL coefficient for losses with `kl_target`, carried from step to step.

It is part of the run's state, so that a resumed run goes on with the very same one.
"""

from __future__ import annotations

from dataclasses import replace

from rlhf.losses.policy_loss import PolicyLoss
from rlhf.losses.regularized import Regularized
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step


class AdaptiveKL(StageHook):
    """KL control: the coefficient follows the divergence that each step finds."""

    @classmethod
    def of(cls, loss: PolicyLoss) -> AdaptiveKL | None:
        """Return the control of a loss, or None where it adapts nothing."""
        return cls() if isinstance(loss, Regularized) and loss.kl_target is not None else None

    def loss_of(self, run: RunContext, loss: PolicyLoss, number: int) -> PolicyLoss:
        """Return the loss with the coefficient of the present step; that of the first is the recipe's."""
        if run.state.kl_coef is None or not isinstance(loss, Regularized):
            return loss
        return replace(loss, kl_coef=run.state.kl_coef)

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """Find the coefficient of the step after this one; without any update it stays."""
        loss, divergence = step.stage.loss, step.values.get("loss/kl_ref")
        if not isinstance(loss, Regularized):
            return
        n_trained = int(step.values.get("batch/n_trained_trajectories", 0.0))
        coef = loss.kl_coef if divergence is None else loss.next_kl_coef(divergence, n_trained)
        step.metrics["loss/kl_coef"] = step.state["kl_coef"] = coef
