"""Expert iteration at work: rounds of attempts, of which the policy imitates the best."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rlhf.data import Task, Trajectory
from rlhf.errors import TrainingError
from rlhf.rollout.runner import RolloutBatch
from rlhf.rollout.tasks import tasks_of
from rlhf.training.backends.microbatch_stats import over_updates
from rlhf.training.cautions import endless_warmup
from rlhf.training.context import RunContext
from rlhf.training.contrib.calibrated_trajectories import calibrated
from rlhf.training.contrib.expert_iteration import Attempts
from rlhf.training.contrib.task_demonstrations import fitting
from rlhf.training.stages.demonstrations import needs_of, render
from rlhf.training.stages.supervised import Supervised
from rlhf.training.stages.supervised_training import by_demonstration, sft_samples, updates_of


async def train_expert_iteration(run: RunContext, stage: Supervised) -> None:
    """Attempt, keep and imitate, in rounds. An interrupted stage continues with its current round."""
    source = stage.rejection_sampling
    assert source is not None
    tasks = tasks_of(run.runner.environment, stage.split)
    if not run.state.step:
        run.save()
    await run.publish(same_version=True)  # so that the engine begins as that of a resumed run does: with nothing cached
    run.progress.stage("supervised", source.rounds, run.state.step)
    for number in range(run.state.step, source.rounds):
        with run.profiled(number):
            collected, where = await attempted(run, source, tasks, number)
            kept = source.kept(collected.groups)
            if source.calibrate:
                kept += await _corrections(run, source, tasks, collected, kept, number)
            run.record(run.state.label, number + 1, "train", collected.groups, None)
            check_kept(kept, source, collected, where)
            await _imitated(run, stage, collected, kept, number)
            if number + 1 < source.rounds:
                run.save()
    run.advance(finished=True)


async def _corrections(
    run: RunContext,
    source: Attempts,
    tasks: Sequence[Task],
    collected: RolloutBatch,
    kept: Sequence[Trajectory],
    number: int,
) -> list[Trajectory]:
    """Correct attempts of round `number` that are not solved."""
    run.progress.note("correcting attempts")
    agent = run.runner.agent
    found = await calibrated(
        run.runner.environment,
        {task.id: task for task in source.tasks(tasks, number, f"{run.seed}/{run.state.stage}/attempts")},
        collected.groups,
        kept,
        run.runner.limits,
        max_per_task=source.max_per_task,
        needs=needs_of(agent),
    )
    return fitting(run, await render(found, agent, run.runner.renderer))


async def _imitated(
    run: RunContext, stage: Supervised, collected: RolloutBatch, kept: Sequence[Trajectory], number: int
) -> None:
    """Train on what round `number` keeps, deliver, log, and move the run's state on."""
    await run.release_engine_memory()
    start, before = time.perf_counter(), run.state
    rows = by_demonstration(sft_samples(kept, stage.observation_weight))
    n_planned = stage.epochs * -(-len(rows) // stage.batch_size)
    run.warn_once(endless_warmup(stage.optimizer, n_planned, f"a round of stages[{run.state.stage}]"))
    trainer = stage.trainer.start(run.policy, stage.optimizer, n_planned)
    run.note_trainer(trainer)
    updates = []
    for values in updates_of(run, stage, trainer, rows, number * stage.epochs):
        updates.append(values)
        run.progress.note(f"imitating {len(kept)} attempts, loss {values['supervised/loss']:.3f}")
        await run.check_stop()
    trainer.close()
    rates = trainer.meter.rates(time.perf_counter() - start)
    await run.publish()
    figures = collected.metrics() | collected.success_interval(run.estimate) | rates
    n_updates = before.n_updates + trainer.n_updates
    figures |= {
        **_over_round(updates),
        "rollout/n_groups": float(len(collected.groups)),
        "supervised/n_demonstrations": float(len(kept)),
        "supervised/n_calibrated": float(sum(t.is_demonstration for t in kept)),
        "supervised/kept_tasks_share": len({t.task_id for t in kept}) / len(collected.groups),
        "optimizer/n_updates": float(n_updates),
        "optimizer/n_skipped": float(trainer.n_skipped),
        "time/train_s": time.perf_counter() - start,
    }
    run.log(number + 1, figures)
    run.advance(step=number + 1, n_updates=n_updates, n_episodes=before.n_episodes + collected.n_episodes)
    run.progress.advance(f"success {figures['rollout/success']:.0%}, {len(kept)} attempts imitated")


async def attempted(
    run: RunContext, source: Attempts, split_tasks: Sequence[Task], number: int
) -> tuple[RolloutBatch, str]:
    """Attempt the tasks of round `number`; returns the groups, and the round's name for messages."""
    where = f"round {number + 1} of {run.state.label}"
    run.progress.note(f"attempting the tasks of {where}")
    await run.check_stop()
    collected = await run.runner.collect(
        source.tasks(split_tasks, number, f"{run.seed}/{run.state.stage}/attempts"),
        group_size=source.group_size,
        grouping=source.rollout,
        sampling=run.runner.limits.sampling(source.temperature),
        step=number,
    )
    run.caution(collected, where)
    return collected, where


def check_kept(kept: Sequence[Trajectory], source: Attempts, collected: RolloutBatch, where: str) -> None:
    """Raise TrainingError where no attempt qualifies for imitation."""
    if kept:
        return
    n_solved = sum(t.solved for group in collected.groups for t in group.trajectories)
    wanted = "an attempt that is solved" if source.keep == "solved" else "attempts at one task that score differently"
    raise TrainingError(
        "no attempt qualifies for imitation",
        where=where,
        got=f"{n_solved} of {collected.n_episodes} attempts solved, at {len(collected.groups)} tasks",
        expected=wanted,
        hint="raise attempts.group_size or tasks_per_round, begin with easier tasks, or put a supervised stage on "
        "demonstrations first"
        + ("; keep: best also learns from attempts that are not solved" if source.keep == "solved" else ""),
    )


def _over_round(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over a round's updates; its total tokens, and the last learning rate."""
    merged = {name: over_updates(name, [values[name] for values in updates]) for name in updates[0]}
    return merged | {"supervised/n_tokens": sum(values["supervised/n_tokens"] for values in updates)}
