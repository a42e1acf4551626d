"""The live parts of a policy-gradient stage: what its recipe keys become while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.base import properties_of
from rlhf.data import ScoredGroup
from rlhf.rollout.scoring import Weighted
from rlhf.rollout.tasks import tasks_of
from rlhf.tasks.empty_steps import EmptySteps
from rlhf.tasks.sampler import Stateful, TaskSource
from rlhf.training.backends.sharded import device_of
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.contrib.judge_refresh import PolicyJudge
from rlhf.training.contrib.reward_refresh import Refresher
from rlhf.training.critics.settings import LiveCritic, PrivilegedCritic
from rlhf.training.critics.values import CriticTrainer
from rlhf.training.hooks.collapse import Monitor
from rlhf.training.hooks.imitate_failed_tasks import FailedTaskQueue
from rlhf.training.hooks.league import League
from rlhf.training.hooks.reference_reset import ResetClock
from rlhf.training.hooks.replay import ReplayBuffer
from rlhf.training.hooks.reward_memory import StatefulRewards
from rlhf.training.hooks.reward_watch import Watches
from rlhf.training.hooks.task_demonstrations import Guide
from rlhf.training.hooks.teacher import Teacher, teacher_of
from rlhf.training.policy.model import Policy
from rlhf.training.stages.policy_gradient import PolicyGradient


@dataclass
class StageComponents:
    """Made anew when a stage begins or goes on.

    Attributes:
        stage: the recipe keys.
        trainer: of the policy.
        source: of the tasks.
        monitor: of signs of collapse.
        teacher: that the loss names, or None.
        critic: of the stage, or None.
        empty: counts steps that trained on nothing.
        buffer: of trajectories to replay, or None.
        reference: says when the reference is renewed, or None where it never is.
        guide: plays demonstrations, or None where none are asked for.
        hard: tasks that wait to be imitated, or None where none are.
        watches: compare rewards that are watched with those that are trained on.
        refresher: trains a reward model further, or None where none is.
        judge_keeper: of a judge that is the policy of some steps ago, or None where none is renewed.
        memories: of rewards that remember.
        league: older versions that play along, or None where none do.
    """

    stage: PolicyGradient
    trainer: TorchTrainer
    source: TaskSource
    monitor: Monitor = field(default_factory=Monitor)
    teacher: Teacher | None = None
    critic: LiveCritic | None = None
    empty: EmptySteps = field(default_factory=EmptySteps)
    buffer: ReplayBuffer | None = None
    reference: ResetClock | None = None
    guide: Guide | None = None
    hard: FailedTaskQueue | None = None
    watches: Watches = field(default_factory=lambda: Watches({}))
    refresher: Refresher | None = None
    judge_keeper: PolicyJudge | None = None
    memories: StatefulRewards = field(default_factory=StatefulRewards)
    league: League | None = None

    @classmethod
    def of(
        cls,
        stage: PolicyGradient,
        policy: Policy,
        environment: Any,
        seed: int,
        start: Path | None = None,
        rewards: Mapping[str, Weighted] | None = None,
    ) -> StageComponents:
        """Return the parts of a stage before its first step.

        Args:
            stage: the recipe keys.
            policy: to train.
            environment: whose tasks are attempted.
            seed: of the run.
            start: checkpoint of the stage's begin, where the policy has moved since.
            rewards: of the recipe, of which some may be watched.
        """
        tasks = tasks_of(environment, stage.split)
        n_steps = stage.steps - (stage.critic.warmup_steps if stage.critic else 0)
        # It may begin as a copy of the policy, whose module the trainer may take to pieces.
        critic = stage.critic.start(stage, policy, start, seed) if stage.critic else None
        trainer = stage.trainer.start(policy, stage.optimizer, n_steps * stage.epochs * stage.minibatches)
        if isinstance(critic, CriticTrainer):
            critic.model.to(device_of(policy.model))
        if isinstance(critic, PrivilegedCritic):
            critic.meet(tasks)
        return cls(
            stage,
            trainer,
            stage.sampler.start(tasks, seed),
            teacher=teacher_of(stage, policy),
            critic=critic,
            buffer=ReplayBuffer(stage.replay, stage.tasks_per_step * stage.group_size) if stage.replay else None,
            reference=ResetClock(stage.reference_reset) if stage.reference_reset else None,
            guide=Guide({task.id: task for task in tasks}) if stage.expert or stage.imitate_failed else None,
            hard=FailedTaskQueue(stage.imitate_failed) if stage.imitate_failed else None,
            watches=Watches.of(rewards or {}),
            refresher=Refresher.of(stage.reward_refresh, rewards or {}, f"{seed}/reward_refresh"),
            judge_keeper=PolicyJudge.of(stage.judge_refresh, rewards or {}, policy),
            memories=StatefulRewards.begun(rewards or {}),
            league=League.of(stage.opponents, policy, properties_of(environment).seats),
        )

    @property
    def kept(self) -> Mapping[str, Stateful]:
        """What a checkpoint keeps besides policy and optimiser, by name."""
        parts: dict[str, Stateful | None] = {"sampler": self.source, "monitor": self.monitor, "empty": self.empty}
        parts |= {"memories": self.memories if self.memories.of_path else None}
        parts |= {"critic": self.critic, "buffer": self.buffer, "reference": self.reference, "hard": self.hard}
        parts |= {"watches": self.watches if self.watches.settings else None, "refresher": self.refresher}
        parts |= {"keeper": self.judge_keeper, "league": self.league}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def n_critic_updates(self) -> int:
        """Updates of the critic so far; 0 without one."""
        return self.critic.n_updates if self.critic else 0

    @property
    def is_torn(self) -> bool:
        """Whether something that is renewed between steps is half done, and no state to save."""
        return self.refresher is not None and self.refresher.is_torn

    def is_warming(self, step: int) -> bool:
        """Whether the critic learns alone in a step, counted from 0."""
        return self.critic is not None and self.critic.is_warming(step)

    def learn(
        self, groups: Sequence[ScoredGroup], values: Mapping[str, float], step: int, label: str
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Take in a finished step, once. Returns what is logged of it, and cautions by name.

        Args:
            groups: all that were drawn in it.
            values: what its updates logged.
            step: counted from 0.
            label: of the stage, for the reader.
        """
        where = f"step {step + 1} of {label}"
        figures, cautions = self.monitor.learn(groups, values, where)
        peak, in_place = self.stage.optimizer.lr, self.trainer.rounds_in_place
        cautions |= self.monitor.stillness.learn(values, where, peak=peak, in_place=in_place)
        figures |= self.source.learn(groups)
        watched, alarms = self.watches.learn(groups, where)
        figures, cautions = figures | watched | self.memories.learn(groups), cautions | alarms
        if not self.is_warming(step):
            n_trained = values["batch/n_trained_trajectories"] + values.get("relift/n_imitated", 0.0)
            count, caution = self.empty.learn(n_trained, where)
            figures, cautions = figures | count, cautions | caution
        if self.buffer is not None:
            self.buffer.learn()
        if self.hard is not None:
            self.hard.learn(self.trainer.n_beside)
        if self.refresher is not None:
            self.refresher.learn(groups, step + 1)
        if self.judge_keeper is not None:
            self.judge_keeper.learn(step + 1)
        if self.league is not None:
            figures |= self.league.learn(groups, step + 1)
        if self.reference is not None:
            figures |= self.reference.learn(values)
        return figures, cautions
