"""The live parts of a policy-gradient stage: what its recipe keys become while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf.rollout.tasks import tasks_of
from rlhf.sampling.sampler import Stateful, TaskSource
from rlhf.trainers.collapse import Monitor
from rlhf.trainers.policy import Policy
from rlhf.trainers.policy_gradient import PolicyGradient
from rlhf.trainers.trainer import TorchTrainer


@dataclass
class Parts:
    """Made anew when a stage begins or goes on.

    Attributes:
        stage: the recipe keys.
        trainer: of the policy.
        source: of the tasks.
        monitor: of signs of collapse.
    """

    stage: PolicyGradient
    trainer: TorchTrainer
    source: TaskSource
    monitor: Monitor = field(default_factory=Monitor)

    @classmethod
    def of(cls, stage: PolicyGradient, policy: Policy, environment: Any, seed: int) -> Parts:
        """Return the parts of a stage before its first step.

        Args:
            stage: the recipe keys.
            policy: to train.
            environment: whose tasks are attempted.
            seed: of the run.
        """
        return cls(
            stage,
            TorchTrainer(policy, stage.optimizer, stage.steps * stage.epochs * stage.minibatches),
            stage.sampler.start(tasks_of(environment, stage.split), seed),
        )

    @property
    def kept(self) -> Mapping[str, Stateful]:
        """What a checkpoint keeps besides policy and optimiser, by name."""
        return {"sampler": self.source, "monitor": self.monitor}
