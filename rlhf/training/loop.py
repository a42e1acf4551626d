"""The training loop: the stages of a run, and the steps of a policy-gradient stage.

Task -> Trajectory -> ScoredGroup -> Credit -> Sample -> Batch -> update -> PolicyWeights -> engine.load
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agents.roles import roles_of
from environments.base import properties_of
from rlhf.batching.samples import check_roles, make_samples
from rlhf.credit.estimator import compute_advantages
from rlhf.errors import TrainingError, boundary
from rlhf.inference.seeds import stable_seed
from rlhf.spans import span
from rlhf.training.between_steps import after_step, draining_background_evaluation, restore_refreshed_rewards
from rlhf.training.context import is_due
from rlhf.training.hooks.base import Step
from rlhf.training.out_of_memory import explain_engine_out_of_memory, explain_out_of_memory
from rlhf.training.rollout_phase import TrainingGroups, sample_groups
from rlhf.training.run import Run
from rlhf.training.shield import shielded
from rlhf.training.stage_components import StageComponents
from rlhf.training.stage_rewards import StageRewards
from rlhf.training.stages.base import is_played, other_stage
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.step_line import step_line
from rlhf.training.update import update


async def train(run: Run, stages: Sequence[Any]) -> None:
    """Run every stage from where `run.state` stands. Whatever stops a run, its last finished step is saved."""
    rewards = StageRewards(run)
    restore_refreshed_rewards(run, stages)
    for index in range(run.state.stage, len(stages)):
        stage = stages[index]
        kind, work = other_stage(stage) or ("policy_gradient", train_policy)
        is_first = not any(isinstance(earlier, PolicyGradient) for earlier in stages[:index])
        run.draw_seed = run.seed if is_first else stable_seed(run.seed, index)
        if index > run.state.stage or not run.state.stage_kind:
            run.begin_stage(index, kind)
        rewards.begin(stage, stages)
        if not run.state.finished:
            if run.evaluates_before and "before" not in run.state.results and is_played(stage):
                await run.publish()
                await run.measure("before")
            with explain_out_of_memory(stage, index, run.folder):
                await work(run, stage)
            run.save()
        if index == len(stages) - 1 and "after" not in run.state.results:
            await run.publish(same_version=True)  # a process that resumes here has delivered nothing yet
            await run.measure("after")
            run.save()


async def train_policy(run: Run, stage: PolicyGradient) -> None:
    """The policy-gradient stage."""
    start = run.checkpoints / replace(run.state, step=0).folder_name
    parts = StageComponents.of(run, stage, start if run.state.step else None)
    run.restore_stage(parts)
    for hook in parts.hooks:
        hook.open(run, parts)
    await run.publish(same_version=True)  # so that the engine begins as that of a resumed run does: with nothing cached
    run.progress.stage("policy_gradient", stage.steps, run.state.step)
    async with parts.closing_async_rollouts():
        with run.saved_if_stopped(parts):
            async with draining_background_evaluation(run):
                await make_steps(run, parts)
        run.save(parts)  # with all that more steps would need
    parts.trainer.close()
    for hook in parts.hooks:
        hook.on_stage_end(run)
    run.advance(finished=True, of_steps=stage.steps)


async def make_steps(run: Run, parts: StageComponents) -> None:
    """The steps of a stage that are left, with what is due between them."""
    stage = parts.stage
    await after_step(run, parts)  # where a run was stopped there
    for number in range(run.state.step, stage.steps):
        if any(hook.ends_stage(run, parts) for hook in parts.hooks):
            break
        with run.profiled(number):
            await one_step(run, parts, number)
            is_checkpoint_due = is_due(stage.checkpoint_every, run.state.step, stage.steps)
            if parts.ahead is not None:
                saves = is_checkpoint_due or any(hook.is_saving for hook in parts.hooks)
                await parts.ahead.before_snapshot(run, is_checkpoint=saves)
            await after_step(run, parts)
            if is_checkpoint_due:
                run.save(parts, in_background=True)


async def one_step(run: Run, parts: StageComponents, number: int) -> None:
    """Sample and score, then train. A cancellation that comes while rollouts wait for the update lets it end."""
    rng = np.random.default_rng([run.seed, run.state.stage, number])
    stage = parts.stage_at(run, number)
    step = Step(number, f"step {number + 1} of {run.state.label}", stage, rng)
    with explain_engine_out_of_memory(run.folder, step.where):
        gathered = await sample_groups(run, parts, step)
    if parts.ahead is None:
        await run.release_engine_memory()
    await asyncio.sleep(0)  # a cancellation until here is heard before anything is trained
    return await shielded(train_on(run, parts, stage, step, gathered))


async def train_on(
    run: Run, parts: StageComponents, stage: PolicyGradient, step: Step, gathered: TrainingGroups
) -> None:
    """Credit, batch, update, deliver, log."""
    number, label = step.number, run.state.label
    step.all_groups, step.groups = gathered.collected.groups, gathered.groups
    start = time.perf_counter()
    values = parts.critic_values(step)
    with span("credit"):
        with boundary(TrainingError, where=f"the advantage of {label}, step {number + 1}"):
            credits = gathered.weighted(compute_advantages(stage.advantage, step.groups, values))
            if stage.train_roles and not roles_of(run.runner.agent, properties_of(run.runner.environment).seats):
                check_roles(step.groups, stage.train_roles)
            step.rows, counters = make_samples(step.groups, credits, stage.layout, stage.train_roles)
        step.samples, dropped = stage.filters(step.rows if step.trains_policy else [], step.groups)

    run.reseed(number)
    for hook in parts.hooks:
        step.samples = await parts.work(hook.transform_samples, parts, step, step.samples)
    shares, hooks = run.runner.engine.shares_policy, parts.hooks if step.trains_policy else ()
    step.values = await parts.work(update, stage, parts.trainer, step.samples, step.rng, shares, hooks)
    for hook in parts.hooks:
        await run.callbacks.after_training(hook, hook.after_update, run, parts, step)
    train_s = time.perf_counter() - start
    step.values |= parts.trainer.meter.rates(train_s)
    trainer_updates, critic_moved = parts.trainer.n_updates, parts.n_critic_updates != run.state.n_critic_updates
    # Where there was nothing to train on, the critic may still have trained the policy's backbone.
    is_same = trainer_updates == run.state.n_updates and not (step.trains_policy and critic_moved)
    await (run.publish(same_version=is_same) if parts.ahead is None else parts.ahead.publish(run))

    parts.is_ending_step = True  # what learns now is ahead of the run's state, also where nothing was trained on
    step.metrics |= parts.source.learn(step.all_groups)
    for hook in parts.hooks:
        await run.callbacks.after_training(hook, hook.on_step_end, run, parts, step)
    run.warn_once(step.cautions)
    figures = None if step.figures is None else gathered.align_to_all_groups(step.figures)
    run.record(label, number + 1, "train", gathered.recorded, gathered.align_to_all_groups(credits), figures)
    names = dict.fromkeys(name for credit in credits for name in credit.metrics)
    credit_sums = {name: sum(credit.metrics.get(name, 0.0) for credit in credits) for name in names}
    metrics = {**gathered.metrics(run.estimate), **credit_sums, **counters, **dropped, **step.values, **step.metrics}
    metrics |= {"time/train_s": train_s, "time/step_s": train_s + gathered.collected.waited_s}
    run.log(number + 1, metrics)
    n_updates = {"n_updates": trainer_updates, "n_critic_updates": parts.n_critic_updates}
    n_episodes = run.state.n_episodes + gathered.collected.n_episodes
    run.advance(step=number + 1, n_episodes=n_episodes, **n_updates, **step.state)
    parts.is_ending_step = False
    run.progress.advance(step_line(metrics))
