"""Base of trained critics: optimizer, schedule, warm-up and checkpoints of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch

from rlhf.training.backends.optimizer import Stepper
from rlhf.training.critics.value_model import (
    BackboneModel,
    CriticModelSettings,
    PartialCheckpointModule,
    ValueHeadSettings,
)

S = TypeVar("S", bound=CriticModelSettings)
M = TypeVar("M", bound=PartialCheckpointModule)


class CriticTrainerBase(Generic[S, M]):
    """Base of critic trainers: an optimizer of its own, schedule, warm-up and checkpoint.

    Args:
        settings: the recipe keys.
        model: to update in place.
        optimizer: over what of it is trained.
        total_updates: the schedule's horizon.

    Attributes:
        settings: the recipe keys.
        model: of the critic.
    """

    def __init__(self, settings: S, model: M, optimizer: torch.optim.Optimizer, total_updates: int) -> None:
        self.settings, self.model = settings, model
        self._stepper = Stepper(settings.optimizer, optimizer, total_updates, where="critic.optimizer")

    @property
    def n_updates(self) -> int:
        """Optimiser updates so far, of the stage."""
        return self._stepper.n_updates

    def is_warming(self, step: int) -> bool:
        """True in warm-up steps, counted from 0, in which the critic learns alone."""
        return step < self.settings.warmup_steps

    def state_dict(self) -> dict[str, Any]:
        """State changed by its updates, without the policy's weights, which are saved with the policy."""
        return {
            "model": {name: p.detach() for name, p in self.model.kept()},
            "optimizer": self._stepper.optimizer.state_dict(),
            "n_updates": self._stepper.n_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError for the state of another model."""
        self.model.restore(state["model"])
        self._stepper.optimizer.load_state_dict(state["optimizer"])
        self._stepper.n_updates = int(state["n_updates"])


def optimizer_of(settings: ValueHeadSettings, model: BackboneModel) -> torch.optim.Optimizer:
    """Optimiser of a critic's head, at its own rate, and of its backbone where trained."""
    head, backbone = list(model.head.parameters()), model.trained_backbone()
    optimizer = settings.optimizer.build([*backbone] or head)
    if backbone:
        scale = (settings.head_lr or settings.optimizer.lr) / settings.optimizer.lr
        optimizer.add_param_group({"params": head, "lr_scale": scale})
    return optimizer
