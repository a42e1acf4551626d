"""Base of trained critics: optimizer, schedule, warm-up and checkpoints of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from rlhf.batching.samples import Sample
from rlhf.data import Values
from rlhf.losses.value import explained_variance
from rlhf.training.backends.microbatch_stats import over_updates
from rlhf.training.backends.optimizer import Stepper, load_moments
from rlhf.training.critics.value_model import (
    BackboneModel,
    CriticModelSettings,
    PartialCheckpointModule,
    ValueHeadSettings,
)

S = TypeVar("S", bound=CriticModelSettings)
M = TypeVar("M", bound=PartialCheckpointModule)

#: Metrics of updates, each made when it is asked for.
Updates = Iterator[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class StepPredictions:
    """Predictions of a critic for a step before it learnt from it.

    Attributes:
        values: of each group.
        figures: metrics that are known by then.
        time_s: spent on them.
    """

    values: list[Values]
    figures: Mapping[str, float] = field(default_factory=dict)
    time_s: float = 0.0


class CriticTrainerBase(Generic[S, M]):
    """Base of critic trainers: an optimizer of its own, schedule, warm-up, checkpoint, and the metrics of a step.

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

    def learn(self, seen: Any, samples: Sequence[Sample], rng: np.random.Generator, step: int) -> dict[str, float]:
        """Updates of a step, see `LiveCritic.learn`. Raises TrainingError where many gradients are not finite."""
        begun, n_skipped = time.perf_counter(), self._stepper.n_skipped
        return {
            **means(self.updates(seen, samples, rng, step)),
            **self.compare(seen, samples),
            "critic/n_updates": float(self.n_updates),
            "critic/n_skipped": float(self._stepper.n_skipped - n_skipped),
            "time/critic_s": seen.time_s + time.perf_counter() - begun,
        }

    def updates(self, seen: Any, samples: Sequence[Sample], rng: np.random.Generator, step: int) -> Updates:
        """Make the updates of a step one by one; none, where a critic has learnt before it predicted."""
        return iter(())

    def compare(self, seen: Any, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Metrics of the predictions of a step against what it earned."""
        figures: Mapping[str, float] = seen.figures
        return figures

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
        load_moments(self._stepper.optimizer, state["optimizer"])
        self._stepper.n_updates = int(state["n_updates"])


def means(updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the updates of a step, the last learning rate; none without updates.

    >>> means([{"critic/loss": 1.0, "critic/lr": 0.1}, {"critic/loss": 4.0, "critic/lr": 0.2}])
    {'critic/loss': 2.5, 'critic/lr': 0.2}
    """
    logged: dict[str, list[float]] = {}
    for figures in updates:
        for name, value in figures.items():
            logged.setdefault(name, []).append(value)
    return {name: over_updates(name, values) for name, values in logged.items()}


def value_metrics(values: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
    """Metrics of predictions `[N]` against what they predict: means, and explained variance where returns vary."""
    explained = explained_variance(values, returns)
    return {
        **({} if math.isnan(explained) else {"critic/explained_variance": explained}),
        "critic/value_mean": float(values.mean()),
        "critic/return_mean": float(returns.mean()),
    }


def optimizer_of(settings: ValueHeadSettings, model: BackboneModel) -> torch.optim.Optimizer:
    """Optimiser of a critic's head, at its own rate, and of its backbone where trained."""
    head, backbone = list(model.head.parameters()), model.trained_backbone()
    optimizer = settings.optimizer.build([*backbone] or head)
    if backbone:
        scale = (settings.head_lr or settings.optimizer.lr) / settings.optimizer.lr
        optimizer.add_param_group({"params": head, "lr_scale": scale})
    return optimizer
