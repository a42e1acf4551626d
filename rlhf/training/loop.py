"""The whole pipeline on one screen.

Task -> Trajectory -> ScoredGroup -> Credit -> Sample -> Batch -> update -> PolicyWeights -> engine.load
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from rlhf.batching.samples import make_samples
from rlhf.credit.estimator import credit_of
from rlhf.errors import TrainingError, boundary
from rlhf.spans import span
from rlhf.training.between_steps import between, leave, serve, serve_left
from rlhf.training.hooks.imitate_failed_tasks import imitate_failed_tasks
from rlhf.training.hooks.kl_controller import next_kl_coef, with_kl_coef
from rlhf.training.hooks.reference_reset import take_reference
from rlhf.training.hooks.teacher import with_teacher_coef, with_teacher_logprobs
from rlhf.training.rollout_phase import gather
from rlhf.training.run import Run
from rlhf.training.stage_state import StageComponents
from rlhf.training.stages.base import is_played, other_stage
from rlhf.training.stages.policy_gradient import PolicyGradient
from rlhf.training.update import update


async def train(run: Run, stages: Sequence[Any]) -> None:
    """Run every stage from where `run.state` stands. Whatever stops a run, its last finished step is saved."""
    serve_left(run, stages)
    for index in range(run.state.stage, len(stages)):
        stage = stages[index]
        kind, work = other_stage(stage) or ("policy_gradient", improve)
        if index > run.state.stage or not run.state.stage_kind:
            run.begin_stage(index, kind)
        if not run.state.finished:
            if "before" not in run.state.results and is_played(stage):
                await run.deliver()
                await run.measure("before")
            await work(run, stage)
            run.save()
        if index == len(stages) - 1 and "after" not in run.state.results:
            await run.measure("after")
            run.save()


async def improve(run: Run, stage: PolicyGradient) -> None:
    """The policy-gradient stage."""
    start = run.checkpoints / replace(run.state, step=0).folder_name
    begun = start if run.state.step else None
    parts = StageComponents.of(stage, run.policy, run.collector.environment, run.seed, begun, run.collector.rewards)
    run.take_up(parts)
    serve(run, parts)
    if getattr(stage.loss, "needs_ref", False):
        take_reference(run)
    await run.deliver(again=True)  # so that the engine begins as that of a resumed run does: with nothing cached
    run.progress.stage("policy_gradient", stage.steps, run.state.step)
    with run.saved_if_stopped(parts):
        await between(run, parts)  # where a run was stopped there
        for step in range(run.state.step, stage.steps):
            if run.has_stalled(stage.evaluate_every, stage.patience):
                break
            now = with_teacher_coef(with_kl_coef(stage, run.state.kl_coef), step)
            with run.profiled(step):
                await one_step(run, now, parts, step)
                await between(run, parts)
                is_due = stage.checkpoint_every and run.state.step % stage.checkpoint_every == 0
                if is_due and run.state.step < stage.steps:
                    run.save(parts, in_background=True)
        run.save(parts)  # with all that more steps would need
    parts.trainer.close()
    leave(run, parts)
    run.advance(finished=True, of_steps=stage.steps)


async def one_step(run: Run, stage: PolicyGradient, parts: StageComponents, step: int) -> None:
    """Sample, score, credit, batch, update, deliver."""
    gathered = await gather(run, parts, step)
    groups, collected = gathered.groups, gathered.collected
    await run.rest()
    start = time.perf_counter()
    with span("critic") if parts.critic else nullcontext():
        seen = parts.critic.look(groups) if parts.critic else None
    with span("credit"):
        with boundary(TrainingError, where=f"the advantage of {run.state.label}, step {step + 1}"):
            credits = gathered.weighted(credit_of(stage.advantage, groups, seen.values if seen else None))
        made, counters = make_samples(groups, credits, stage.layout, stage.train_roles)
        samples, dropped = stage.filters([] if parts.is_warming(step) else made, groups)

    run.reseed(step)
    rng = np.random.default_rng([run.seed, run.state.stage, step])
    samples = with_teacher_logprobs(parts.teacher, stage, parts.trainer, samples, groups)
    buffer = None if parts.is_warming(step) else parts.buffer
    values = update(stage, parts.trainer, samples, rng, run.collector.engine.shares_policy, buffer)
    values |= {} if parts.is_warming(step) else await imitate_failed_tasks(run, parts, collected.groups, step)
    with span("critic") if parts.critic else nullcontext():
        values |= parts.critic.learn(seen, made, rng, step) if parts.critic and seen else {}
    train_s = time.perf_counter() - start
    values |= parts.trainer.meter.rates(train_s)
    kl_coef = next_kl_coef(stage, values, samples)
    await run.deliver()

    learnt, cautions = parts.learn(collected.groups, values, step, run.state.label)
    learnt |= await run.remember(collected.groups, step)
    run.say_once(cautions)
    run.record(run.state.label, step + 1, "train", gathered.recorded, gathered.of_all(credits))
    names = dict.fromkeys(name for credit in credits for name in credit.metrics)
    credit_sums = {name: sum(credit.metrics.get(name, 0.0) for credit in credits) for name in names}
    metrics = {**gathered.metrics(), **credit_sums, **counters, **dropped, **values, **learnt}
    metrics |= {"loss/kl_coef": kl_coef} if kl_coef is not None else {}
    metrics |= {"time/train_s": train_s, "time/step_s": train_s + collected.seconds}
    run.log(step + 1, metrics)
    n_episodes = run.state.n_episodes + collected.n_episodes
    n_updates = {"n_updates": parts.trainer.n_updates, "n_critic_updates": parts.n_critic_updates}
    run.advance(step=step + 1, **n_updates, kl_coef=kl_coef, n_episodes=n_episodes)
    run.progress.advance(
        f"success {metrics['rollout/success']:.0%}  return {metrics['rollout/return_mean']:+.2f}  "
        f"{metrics['rollout/tokens_per_s']:.0f} tok/s"
    )
