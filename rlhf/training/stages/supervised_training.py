"""Training of the supervised stage: imitation of demonstrations."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.data import Credit, Score, ScoredGroup, Trajectory
from rlhf.errors import TrainingError
from rlhf.losses.reduction import Reduction
from rlhf.training.backends.changed_share import NoUpdateMonitor
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.cautions import endless_warmup
from rlhf.training.checkpoints import store
from rlhf.training.context import RunContext, is_due
from rlhf.training.stages.demonstrations import render
from rlhf.training.stages.supervised import Supervised

#: Updates of an epoch with a seed of their own.
_MOST = 10_007


async def train_supervised(run: RunContext, stage: Supervised) -> None:
    """Train on the stage's demonstrations. A killed stage starts again from its last checkpoint."""
    found: Any = run.demonstrations[run.state.stage]
    held_out: Sequence[Sample] = ()
    if stage.data is None:
        rendered = await render(found, run.runner.agent, run.runner.renderer)
        rows = _fitting(run, by_demonstration(sft_samples(rendered, stage.observation_weight)))
    else:
        rows, held_out = found.learnt, found.held_out
        if found.n_dropped:
            run.progress.say(
                f"caution: {found.n_dropped:,} rows are longer than the context of {run.policy.max_context:,} tokens "
                "and are not learnt"
            )
    n_batches = -(-len(rows) // stage.batch_size)
    n_updates, first = stage.epochs * n_batches, run.state.step
    await run.release_engine_memory()
    run.warn_once(endless_warmup(stage.optimizer, n_updates, f"stages[{run.state.stage}]"))
    trainer = stage.trainer.start(run.policy, stage.optimizer, n_updates)
    run.note_trainer(trainer)
    _begin(run, trainer)
    run.progress.stage("supervised", n_updates, first)
    updates = updates_of(run, stage, trainer, rows, n_done=first)
    losses = [_loss(trainer, stage, held_out)] if held_out else []
    for step in range(first, n_updates):
        with run.profiled(step):
            begun = time.perf_counter()
            values = next(updates)
            values |= trainer.meter.rates(time.perf_counter() - begun)
            values["supervised/n_demonstrations"] = float(len(rows) if stage.data else len(found))
            if held_out and (step + 1) % n_batches == 0:
                losses.append(_loss(trainer, stage, held_out))
                values["supervised/held_out_loss"] = losses[-1]
            run.log(step + 1, values, delivered=False)
            run.progress.advance(f"loss {values['supervised/loss']:.3f}")
            save = partial(_save, run, trainer, step + 1)
            if is_due(stage.checkpoint_every, step + 1, n_updates):
                save()
            await run.check_stop(save)
    if losses:
        told = " to ".join(f"{loss:.3f}" for loss in (losses[0], losses[-1]))
        run.progress.say(f"the loss on {len(held_out)} rows that were not learnt went from {told}")
    trainer.close()
    run.advance(step=n_updates, n_updates=trainer.n_updates, finished=True)
    await run.publish()


def _begin(run: RunContext, trainer: TorchTrainer) -> None:
    """Write the first checkpoint of the stage, or load the trainer state of the one to resume from."""
    if not run.state.step:
        run.save(optimizer=trainer.optimizer)
        return
    trainer.n_updates = run.state.n_updates
    names = [name for name, p in run.policy.model.named_parameters() if p.requires_grad]
    store.load_trainer(run.folder / "checkpoints" / run.state.folder_name, trainer.optimizer, names=names)


def _save(run: RunContext, trainer: TorchTrainer, step: int) -> Path:
    """Write a checkpoint after this many updates."""
    run.advance(step=step, n_updates=trainer.n_updates)
    return run.save(optimizer=trainer.optimizer)


def _fitting(run: RunContext, rows: Sequence[list[Sample]]) -> list[list[Sample]]:
    """Return the demonstrations that fit into the policy's context. Raises TrainingError where none does."""
    longest = [max(map(len, samples)) for samples in rows]
    kept = [samples for samples, n in zip(rows, longest, strict=True) if n <= run.policy.max_context]
    if rows and not kept:
        raise TrainingError(
            "no demonstration fits into the context",
            where=f"stages[{run.state.stage}]",
            got=f"{len(rows):,} demonstrations, the shortest of {min(longest):,} tokens",
            expected=f"at most {run.policy.max_context:,} tokens, the context of the policy",
            hint="raise policy.max_context, or use shorter demonstrations",
        )
    if n_left := len(rows) - len(kept):
        run.progress.say(
            f"caution: {n_left:,} of {len(rows):,} demonstrations are longer than the context of "
            f"{run.policy.max_context:,} tokens, the longest of {max(longest):,}, and are not imitated: raise "
            "policy.max_context, or use shorter demonstrations"
        )
    return kept


def _loss(trainer: TorchTrainer, stage: Supervised, rows: Sequence[Sample]) -> float:
    """Mean of −log π over the demonstrated tokens of rows, in nats, as of the loss that is logged of an update."""
    budget = stage.max_tokens_per_microbatch
    found = trainer.compute_logprobs(rows, temperature=1.0, max_tokens=budget)
    is_demonstrated = np.concatenate([sample.advantages[sample.mask] == 1 for sample in rows])
    return -float(np.concatenate(found)[is_demonstrated].sum(dtype=np.float64)) / max(int(is_demonstrated.sum()), 1)


def updates_of(
    run: RunContext,
    stage: Supervised,
    trainer: TorchTrainer,
    rows: Sequence[Sequence[Sample]],
    first_epoch: int = 0,
    n_done: int = 0,
) -> Iterator[dict[str, float]]:
    """Make the updates of all epochs over the demonstrations' rows; yields metrics of each.

    Args:
        run: with the policy.
        stage: the recipe keys.
        trainer: of the policy.
        rows: of each demonstration.
        first_epoch: epochs of the stage before these; each has an order and a dropout of its own.
        n_done: updates that are made already.
    """
    reduction, stillness = Reduction(kind="token_mean"), NoUpdateMonitor()
    peak, in_place = stage.optimizer.lr, trainer.rounds_in_place
    n_batches = -(-len(rows) // stage.batch_size)
    for epoch in range(first_epoch + n_done // n_batches, first_epoch + stage.epochs):
        n_skipped = max(n_done - (epoch - first_epoch) * n_batches, 0)
        order = list(range(len(rows)))
        random.Random(f"{run.seed}/supervised/{epoch}").shuffle(order)
        for i in range(n_skipped * stage.batch_size, len(rows), stage.batch_size):
            batch = [sample for j in order[i : i + stage.batch_size] for sample in rows[j]]
            budget, n_least = stage.max_tokens_per_microbatch, trainer.n_processes
            run.reseed(epoch * _MOST + i // stage.batch_size)  # dropout does not depend on where a run went on
            [packed] = pack_minibatches(batch, 1, reduction, budget, None, n_least=n_least)
            values = trainer.sft_update(packed)
            where = f"update {trainer.n_updates} of {run.state.label}"
            run.warn_once(stillness.learn(values, where, peak=peak, in_place=in_place))
            yield values | {"supervised/n_tokens": float(sum(s.mask.sum() for s in batch))}


def sft_samples(trajectories: Sequence[Trajectory], observation_weight: float = 0.0) -> list[Sample]:
    """Rows whose advantages are the weights of their tokens in the loss.

    1 for an action, 0 for one that the environment did not understand, and `observation_weight` for observations. The
    loss divides by the number of these tokens, whatever they weigh: with 3 tokens of actions and 1 of weight 0 each of
    the 3 has 1/4 of it.
    """
    groups = [ScoredGroup(t.task_id, (t,), (Score({}, (0.0,) * len(t.turns), 0.0),)) for t in trajectories if t.turns]
    credits = [Credit((_weights(g.trajectories[0]),)) for g in groups]
    samples, _ = make_samples(groups, credits, "trajectory")
    return [read_too(s, observation_weight) for s in samples] if observation_weight else samples


def _weights(trajectory: Trajectory) -> tuple[tuple[float, ...], ...]:
    return tuple((float(turn.valid),) * g.n_tokens for turn in trajectory.turns for g in turn.generations)


def by_demonstration(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Gather the rows of each demonstration, in order; it has several where the agent rewrites its prompts."""
    rows: dict[int, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.sequence, []).append(sample)
    return list(rows.values())


def read_too(sample: Sample, weight: float) -> Sample:
    """Return the row with a loss of `weight` on every token that is not the policy's."""
    everything = np.arange(len(sample)) > 0
    advantages = np.where(sample.mask, sample.advantages, np.where(everything, weight, 0.0)).astype(np.float32)
    return replace(sample, mask=everything, advantages=advantages)
