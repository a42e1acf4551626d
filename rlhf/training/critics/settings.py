"""Critic of a stage: its recipe keys, and what the loop asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from rlhf.capabilities import Capability, CapabilityView
from rlhf.data import ScoredGroup, Task, Values
from rlhf.spans import span
from rlhf.tasks.sampler import Stateful
from rlhf.training.hooks.base import StageHook, Step

if TYPE_CHECKING:
    from rlhf.batching.samples import Sample
    from rlhf.training.context import LiveStage, RunContext, StageKeys
    from rlhf.training.policy.model import Policy


class Predictions(Protocol):
    """Predictions of a critic for a step."""

    @property
    def values(self) -> Sequence[Values]:
        """Of each group."""


class LiveCritic(Stateful, Protocol):
    """A critic at work. What it remembers is part of a checkpoint."""

    @property
    def n_updates(self) -> int:
        """Updates made or tried so far in the stage; it moves with every change of memory."""

    def is_warming(self, step: int) -> bool:
        """True in warm-up steps, counted from 0, in which the critic learns alone."""

    def predict(self, groups: Sequence[ScoredGroup]) -> Predictions:
        """Return what it expects of the states of a step. An off-policy critic may learn from them first."""

    def learn(self, seen: Any, samples: Sequence[Sample], rng: np.random.Generator, step: int) -> dict[str, float]:
        """Remaining updates of a step once it has credit; returns metrics of all.

        Args:
            seen: what `predict` returned in this step.
            samples: all rows of the step, with the returns that the estimator gave.
            rng: draws.
            step: counted from 0.
        """


@runtime_checkable
class PrivilegedCritic(Protocol):
    """Critic with privileged information about tasks."""

    def set_references(self, tasks: Sequence[Task]) -> None:
        """Take in the tasks that the stage draws from, with their references. Asked once, before the first step."""


@runtime_checkable
class CriticKind(Protocol):
    """Settings of a critic, a frozen dataclass of its recipe keys; `start` gives the critic that is trained.

    One that learns beside trainers of several processes has an attribute `spans_processes` that is True.
    """

    @property
    def warmup_steps(self) -> int:
        """Steps at the start of the stage in which the critic learns alone."""

    def start(self, stage: StageKeys, policy: Policy, start: Path | None, seed: int) -> LiveCritic:
        """Return the critic of a stage before its first update.

        Args:
            stage: the recipe keys.
            policy: the live one.
            start: folder of the checkpoint of the stage's begin, where the policy has moved since; None where it
                stands there.
            seed: of the run.
        """


class CriticCapabilities(CapabilityView):
    """Optional attributes of a critic's settings, with None for each that they leave out."""

    optimizer = Capability[object](None)
    """Optimizer of the critic."""
    trains_backbone = Capability[bool | None](None, bool)
    """True if the gradient reaches its backbone; None where its model is unknown."""
    tau = Capability[object](None)
    """Share by which a copy follows it in each update."""
    frozen = Capability(False, bool)
    """True if it is trained in its warm-up alone."""
    privileged_text = Capability[object](None)
    """Privileged text that it reads first; such a critic is compared with its initial model."""
    privileged_ids = Capability[Callable[..., Sized] | None](None, Callable)
    """Token ids of that text, of `(task, tokenizer)`."""


@dataclass
class CriticHook(StageHook):
    """A critic in the steps of a stage: its warm-up, its values, its updates.

    Attributes:
        critic: at work.
        seen: what it thought of the present step.
    """

    key: ClassVar[str] = "critic"

    critic: LiveCritic
    seen: Predictions | None = None

    @property
    def n_critic_updates(self) -> int:
        """Updates made or tried so far, of the stage."""
        return self.critic.n_updates

    def before_step(self, run: RunContext, step: Step) -> None:
        """While the critic learns alone, the policy does not."""
        step.trains_policy = not self.critic.is_warming(step.number)

    def critic_values(self, step: Step) -> Sequence[Values]:
        """Return what the critic expects of the states of a step."""
        with span("critic"):
            self.seen = self.critic.predict(step.groups)
        return self.seen.values

    async def after_update(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """Make what critic updates are left of the step."""
        with span("critic"):
            step.values |= self.critic.learn(self.seen, step.rows, step.rng, step.number)

    def state_dict(self) -> dict[str, Any]:
        """State of the critic."""
        return self.critic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.critic.load_state_dict(state)
