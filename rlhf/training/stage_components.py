"""Live parts of a policy-gradient stage: trainer, task source, critic and hooks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from environments.base import properties_of
from rlhf.data import Task, Values
from rlhf.rollout.opponent_engine import OpponentSampler
from rlhf.rollout.tasks import tasks_of
from rlhf.tasks.sampler import Stateful, TaskSource
from rlhf.training.backends.sharded import device_of
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.contrib.demonstrations_in_groups import DemonstrationHook
from rlhf.training.contrib.imitate_failed_tasks import FailedImitation, FailedTaskQueue
from rlhf.training.contrib.judge_refresh import JudgeRefreshHook
from rlhf.training.contrib.league import League
from rlhf.training.contrib.logged_attempts import OfflineDataHook
from rlhf.training.contrib.memory_store import StoreHook
from rlhf.training.contrib.reference_reset import Reference, ReferenceResetHook
from rlhf.training.contrib.reward_memory import StatefulRewards
from rlhf.training.contrib.reward_refresh import RewardRefreshHook
from rlhf.training.contrib.self_certainty import SelfCertaintyHook
from rlhf.training.contrib.task_demonstrations import DemonstrationCache
from rlhf.training.contrib.teacher import TeacherHook
from rlhf.training.contrib.token_stats import TokenStatsHook
from rlhf.training.critics.settings import CriticHook, LiveCritic, PrivilegedCritic
from rlhf.training.critics.values import CriticTrainer
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.hooks.collapse import CollapseHook
from rlhf.training.hooks.kl_controller import AdaptiveKL
from rlhf.training.hooks.replay import ReplayBuffer
from rlhf.training.hooks.reward_monitor import RewardMonitorHook
from rlhf.training.hooks.stopping import EarlyStop, EmptyStop
from rlhf.training.rollouts_ahead import RolloutsAhead
from rlhf.training.run import Run
from rlhf.training.stages.policy_gradient import PolicyGradient

T = TypeVar("T")
#: Key under which a checkpoint keeps the state of the task source.
_SAMPLER = "sampler"


@dataclass
class StageComponents:
    """Live components of a policy-gradient stage, built when it starts or resumes: trainer, task source and hooks.

    Attributes:
        stage: the recipe keys.
        trainer: of the policy.
        source: of the tasks.
        hooks: everything else that takes part in a step, in the order they are called in.
        is_ending_step: whether samplers and hooks learn of a step that the run's state has not counted yet.
    """

    stage: PolicyGradient
    trainer: TorchTrainer
    source: TaskSource
    hooks: Sequence[StageHook] = ()
    is_ending_step: bool = False

    @classmethod
    def of(cls, run: Run, stage: PolicyGradient, start: Path | None = None) -> StageComponents:
        """Return the parts of a stage before its first step.

        Args:
            run: with the policy to train, and the environment whose tasks are attempted.
            stage: the recipe keys.
            start: checkpoint of the stage's begin, where the policy has moved since.
        """
        tasks = tasks_of(run.runner.environment, stage.split)
        # It may begin as a copy of the policy, whose module the trainer may take to pieces.
        critic = stage.critic.start(stage, run.policy, start, run.seed) if stage.critic else None
        trainer = stage.trainer.start(run.policy, stage.optimizer, stage.n_updates)
        if stage.routing_replay:
            trainer.replay_routing()
        if isinstance(critic, CriticTrainer):
            critic.model.to(device_of(run.policy.model))
        if isinstance(critic, PrivilegedCritic):
            critic.set_references(tasks)
        source = stage.sampler.start(tasks, run.draw_seed)
        hooks: Sequence[StageHook] = hooks_of(run, stage, tasks, critic)
        if run.lookahead is not None:  # the first, as it has to hear at once what the source has learned
            hooks = [RolloutsAhead(run.lookahead, stage, source, run.state.stage), *hooks]
        run.callbacks.check_states([_SAMPLER, *(hook.key for hook in hooks)])
        return cls(stage, trainer, source, hooks)

    @property
    def kept(self) -> Mapping[str, Stateful]:
        """Live parts whose state a checkpoint keeps besides policy and optimiser, by name."""
        return {_SAMPLER: self.source, **{hook.key: hook for hook in self.hooks if hook.key}}

    @property
    def n_critic_updates(self) -> int:
        """Updates of the critic so far; 0 without one."""
        return sum(hook.n_critic_updates for hook in self.hooks)

    @property
    def is_incomplete(self) -> bool:
        """True while the end of a step, or something renewed between steps, is half done, with no state to save."""
        return self.is_ending_step or any(hook.is_incomplete for hook in self.hooks)

    def stage_at(self, run: Run, number: int) -> PolicyGradient:
        """Return the recipe keys with the coefficients of a step, counted from 0."""
        loss = self.stage.loss
        for hook in self.hooks:
            loss = hook.loss_of(run, loss, number)
        return self.stage if loss is self.stage.loss else replace(self.stage, loss=loss)

    def critic_values(self, step: Step) -> Sequence[Values] | None:
        """Expected values of a step's states from the first hook that has them; None without any."""
        return next((found for hook in self.hooks if (found := hook.critic_values(step)) is not None), None)

    @property
    def ahead(self) -> RolloutsAhead | None:
        """Rollouts ahead of training; None where attempts and updates alternate."""
        return next((hook for hook in self.hooks if isinstance(hook, RolloutsAhead)), None)

    async def work(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of `function`, which trains, in parallel with asynchronous rollouts."""
        return function(*args) if self.ahead is None else await self.ahead.work(function, *args)

    @asynccontextmanager
    async def closing_async_rollouts(self) -> AsyncIterator[None]:
        """End what is still played when what happens inside is over."""
        try:
            yield
        finally:
            if self.ahead is not None:
                await self.ahead.close()

    @asynccontextmanager
    async def rollout(self, run: Run) -> AsyncIterator[OpponentSampler | None]:
        """Context of a step's rollouts; yields the opponents that act in the policy's place, or None."""
        async with AsyncExitStack() as stack:
            found = [await stack.enter_async_context(hook.rollout(run)) for hook in self.hooks]
            yield next((opponents for opponents in found if opponents is not None), None)


def hooks_of(run: Run, stage: PolicyGradient, tasks: Sequence[Task], critic: LiveCritic | None) -> list[StageHook]:
    """Return the hooks of a stage before its first step, in the order they are called in."""
    rewards, policy, seed = run.runner.rewards, run.policy, f"{run.seed}/reward_refresh"
    guide = DemonstrationCache(
        {task.id: task for task in tasks} if stage.group_demonstrations or stage.imitate_failed else {}
    )
    monitors, memories = RewardMonitorHook.of(rewards), StatefulRewards.begun(rewards)
    hooks = (
        AdaptiveKL.of(stage.loss),
        TeacherHook.of(stage, policy),
        CollapseHook(),
        EmptyStop.of(stage.selection),
        monitors if monitors.settings else None,
        memories if memories.of_path else None,
        ReplayBuffer(stage.replay, stage.tasks_per_step * stage.group_size) if stage.replay else None,
        TokenStatsHook(stage.token_stats, stage.train_roles) if stage.token_stats else None,
        OfflineDataHook(stage.offline_data) if stage.offline_data else None,
        DemonstrationHook(stage.group_demonstrations, stage.group_size, guide) if stage.group_demonstrations else None,
        SelfCertaintyHook(stage.self_certainty) if stage.self_certainty else None,
        FailedImitation(FailedTaskQueue(stage.imitate_failed), guide) if stage.imitate_failed else None,
        CriticHook(critic) if critic else None,
        ReferenceResetHook(stage.reference_reset) if stage.reference_reset else None,
        EarlyStop(stage.patience),
        RewardRefreshHook.of(stage.reward_refresh, rewards, seed),
        JudgeRefreshHook.of(stage.judge_refresh, rewards, policy),
        League.of(stage.opponents, policy, properties_of(run.runner.environment).seats),
        StoreHook(run.store_keeper) if run.store_keeper else None,
        Reference.of(stage.loss),
        *run.callbacks.hooks,
        run.callbacks if run.callbacks.functions else None,
    )
    return [hook for hook in hooks if hook is not None]
