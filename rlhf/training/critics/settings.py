"""Which critic a stage has: what a recipe's keys become, and what the loop asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rlhf.data import ScoredGroup, Task, Values
from rlhf.tasks.sampler import Stateful

if TYPE_CHECKING:
    from rlhf.batching.samples import Sample
    from rlhf.training.policy.model import Policy
    from rlhf.training.stages.policy_gradient import PolicyGradient


class Look(Protocol):
    """What a critic thinks of a step."""

    @property
    def values(self) -> Sequence[Values]:
        """Of each group."""
        ...


class LiveCritic(Stateful, Protocol):
    """A critic at work. What it remembers is part of a checkpoint."""

    @property
    def n_updates(self) -> int:
        """Updates made or tried so far, of the stage; it moves in every step that changes what is remembered."""
        ...

    def is_warming(self, step: int) -> bool:
        """Whether it learns alone in a step, counted from 0."""
        ...

    def look(self, groups: Sequence[ScoredGroup]) -> Look:
        """Return what it expects of the states of a step. An off-policy critic may learn from them first."""
        ...

    def learn(self, seen: Any, samples: Sequence[Sample], rng: np.random.Generator, step: int) -> dict[str, float]:
        """Make what updates are left of a step once it has credit, and return what is logged of all.

        Args:
            seen: what `look` returned in this step.
            samples: all rows of the step, with the returns that the estimator gave.
            rng: draws.
            step: counted from 0.
        """
        ...


@runtime_checkable
class PrivilegedCritic(Protocol):
    """What a critic has that is told more of the tasks than the policy is."""

    def meet(self, tasks: Sequence[Task]) -> None:
        """Take in the tasks that the stage draws from, with their references. Asked once, before the first step."""
        ...


@runtime_checkable
class CriticKind(Protocol):
    """A frozen dataclass whose fields are its recipe keys.

    One that learns beside trainers of several processes has an attribute `spans_processes` that is True.
    """

    @property
    def warmup_steps(self) -> int:
        """Steps at the start of the stage in which the critic learns alone."""
        ...

    def start(self, stage: PolicyGradient, policy: Policy, start: Path | None, seed: int) -> LiveCritic:
        """Return the critic of a stage before its first update.

        Args:
            stage: the recipe keys.
            policy: the live one.
            start: folder of the checkpoint of the stage's begin, where the policy has moved since; None where it
                stands there.
            seed: of the run.
        """
        ...
