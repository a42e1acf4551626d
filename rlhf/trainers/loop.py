"""The whole pipeline on one screen.

Task -> Trajectory -> ScoredGroup -> Credit -> Sample -> Batch -> update -> PolicyWeights -> engine.load
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.data import SamplingParams
from rlhf.sampling.shuffled import ShuffledTasks
from rlhf.trainers import checkpoint
from rlhf.trainers.imitation import imitate
from rlhf.trainers.policy_gradient import PolicyGradient
from rlhf.trainers.run import Interrupted, Run
from rlhf.trainers.supervised import Supervised
from rlhf.trainers.trainer import TorchTrainer


async def train(run: Run, stages: Sequence[Supervised | PolicyGradient]) -> None:
    """Run every stage from where `run.state` stands. A stopped run keeps its last finished step."""
    for index in range(run.state.stage, len(stages)):
        stage = stages[index]
        kind = "supervised" if isinstance(stage, Supervised) else "policy_gradient"
        if index > run.state.stage or not run.state.stage_kind:
            run.state = replace(run.state, stage=index, stage_kind=kind, step=0, n_updates=0, finished=False)
        if not run.state.finished:
            if isinstance(stage, Supervised):
                await imitate(run, stage)
            else:
                if "before" not in run.state.results:
                    await run.deliver()
                    await run.measure("before")
                await improve(run, stage)
            run.save(None)
        if index == len(stages) - 1 and "after" not in run.state.results:
            await run.measure("after")
            run.save(None)


async def improve(run: Run, stage: PolicyGradient) -> None:
    """The policy-gradient stage."""
    trainer = TorchTrainer(run.policy, stage.optimizer, stage.steps * stage.epochs * stage.minibatches)
    tasks = ShuffledTasks(list(run.collector.environment.tasks(stage.split)), run.seed)
    resume(run, trainer)
    if stage_needs_reference(stage):
        run.policy.keep_reference(run.checkpoints / replace(run.state, step=0).folder_name)
    await run.deliver()
    run.progress.stage("policy_gradient", stage.steps, run.state.step)
    try:
        for step in range(run.state.step, stage.steps):
            await one_step(run, stage, trainer, tasks, step)
            last = step + 1 == stage.steps
            if stage.evaluate_every and (step + 1) % stage.evaluate_every == 0 and not last:
                await run.measure(f"step {step + 1}", full=False)
            if stage.checkpoint_every and (step + 1) % stage.checkpoint_every == 0 and not last:
                run.save(trainer.optimizer)
    except asyncio.CancelledError as error:
        folder = run.save(trainer.optimizer)
        raise Interrupted("stopped", where=f"step {run.state.step}", got=f"saved {folder}") from error
    run.advance(finished=True)


async def one_step(run: Run, stage: PolicyGradient, trainer: TorchTrainer, tasks: ShuffledTasks, step: int) -> None:
    """Sample, score, credit, batch, update, deliver."""
    run.reseed(step)
    sampling = SamplingParams(max_tokens=run.collector.limits.max_tokens, temperature=stage.temperature)
    collected = await run.collector.collect(
        tasks.draw(step, stage.tasks_per_step), group_size=stage.group_size, sampling=sampling, step=step
    )
    credits = [stage.advantage(group) for group in collected.groups]
    samples, counters = make_samples(collected.groups, credits, stage.layout)
    samples, dropped = stage.filters(samples, collected.groups)

    start = time.perf_counter()
    values = update(stage, trainer, samples, np.random.default_rng([run.seed, run.state.stage, step]))
    train_s = time.perf_counter() - start
    run.advance(step=step + 1, n_updates=trainer.n_updates, n_episodes=run.state.n_episodes + collected.n_episodes)
    await run.deliver()

    run.record(run.state.label, step + 1, "train", collected.groups, credits)
    credit_sums: dict[str, float] = {}
    for credit in credits:
        for name, value in credit.metrics.items():
            credit_sums[name] = credit_sums.get(name, 0.0) + value
    metrics = {**collected.metrics(), **credit_sums, **counters, **dropped, **values}
    metrics |= {"time/train_s": train_s, "time/step_s": train_s + collected.seconds}
    run.log(step + 1, metrics)
    run.progress.advance(
        f"success {metrics['rollout/success']:.0%}  return {metrics['rollout/return_mean']:+.2f}  "
        f"{metrics['rollout/tokens_per_s']:.0f} tok/s"
    )


def update(
    stage: PolicyGradient, trainer: TorchTrainer, samples: Sequence[Sample], rng: np.random.Generator
) -> dict[str, float]:
    """`epochs` passes over the samples, each in `minibatches` updates; a step left with nothing trains nothing."""
    totals: dict[str, list[float]] = {}
    for _ in range(stage.epochs if samples else 0):
        for batches in pack_minibatches(
            samples, stage.minibatches, stage.reduction, stage.max_tokens_per_microbatch, rng
        ):
            for name, value in trainer.update(batches, stage.loss, temperature=stage.temperature).items():
                # Only before the first update do trainer and engine hold the same weights.
                if not (name.startswith("loss/sampler_gap") and name in totals):
                    totals.setdefault(name, []).append(value)
    n_updates = {"optimizer/n_updates": float(trainer.n_updates), "optimizer/n_skipped": float(trainer.n_skipped)}
    merge = {True: max, False: np.mean}
    return {name: float(merge[name.endswith("_max")](values)) for name, values in totals.items()} | n_updates


def stage_needs_reference(stage: PolicyGradient) -> bool:
    """Whether the loss compares the policy with a frozen one."""
    return bool(getattr(stage.loss, "needs_ref", False))


def resume(run: Run, trainer: TorchTrainer) -> None:
    """Take optimiser state from the checkpoint of `run.state`; at the start of a stage, write that checkpoint."""
    if run.state.step == 0:
        run.save(trainer.optimizer)
    else:
        trainer.n_updates = run.state.n_updates
        checkpoint.load_trainer(run.checkpoints / run.state.folder_name, trainer.optimizer)
