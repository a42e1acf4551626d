"""Reward-model training on single attempts: P(right) of the whole or of each turn."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rewards.models.model_folder import NODES, logits, logits_at
from rlhf.data import ScoredGroup
from rlhf.errors import TrainingError
from rlhf.stats import sigmoid
from rlhf.training.backends.optimizer import Stepper
from rlhf.training.context import RunContext
from rlhf.training.contrib.calibration import bins_of, tell_held_out
from rlhf.training.contrib.node_labels import labelled_nodes
from rlhf.training.contrib.step_labels import Labelled, labelled
from rlhf.training.reward_model_training import adapted, save_in, scoring_model, split_by_task
from rlhf.training.stages.preference_training import groups_for, seed_of
from rlhf.training.stages.reward_model import RewardModel


async def train_pointwise(run: RunContext, stage: RewardModel) -> None:
    """Train a reward model on most attempts, measure it on the others. An interrupted stage starts again."""
    run.save()
    groups, collected = await groups_for(run, stage.pairs, stage.split, stage.rollout)
    rows = _rows(run, stage, groups)
    _check_any(rows, groups, stage, f"the attempts of {run.state.label}")
    seen, unseen = split_by_task(rows, stage.held_out, f"{run.seed}/{run.state.stage}/held_out")
    _check_any(seen, groups, stage, f"the attempts of {run.state.label} that are trained on")
    _check_held_out(unseen, f"the attempts of {run.state.label} that are kept for judging")
    total = stage.n_updates(len(seen))
    await run.release_engine_memory()
    run.progress.stage("reward model", total, 0)
    figures = {"rollout/n_groups": float(len(groups))} if collected else {}
    figures |= collected.metrics() | collected.success_interval(run.estimate) if collected else {}
    figures |= figures_of(rows)
    run.reseed(0)
    model, merged = adapted(scoring_model(run.policy, stage.objective), stage.lora)
    if stage.merge:
        setattr(model.config, NODES, {"mark": run.policy.tokenizer.pad_token_id, "longest": stage.merge.max_turns})
    for update, values in enumerate(updates(model, seen, stage, seed_of(run)), start=1):
        run.log(update, values | (figures if update == 1 else {}), delivered=False)
        run.progress.advance(f"loss {values['reward_model/loss']:.3f}")
        await asyncio.sleep(0)  # hears a cancellation; callbacks hear of the updates once the model is saved
    model = merged()
    save_in(run.folder, f"reward_model/{run.state.label}", model, run.policy.tokenizer)
    _judge(run, stage, model, unseen, total)
    n_episodes = collected.n_episodes if collected else 0
    run.advance(step=total, n_updates=total, finished=True, n_episodes=run.state.n_episodes + n_episodes)


def _rows(run: RunContext, stage: RewardModel, groups: Sequence[ScoredGroup]) -> list[Labelled]:
    """Everything there is to learn from: attempts, each with all of its labels, or one row of each node."""
    if stage.merge is None:
        return list(
            labelled(
                groups, steps=stage.objective == "process", success_threshold=stage.success_threshold, eta=stage.eta
            )
        )
    draw = random.Random(f"{run.seed}/{run.state.stage}/merge")
    mark = run.policy.tokenizer.pad_token_id
    return list(
        labelled_nodes(
            groups, stage.merge, success_threshold=stage.success_threshold, eta=stage.eta, mark=mark, draw=draw
        )
    )


def figures_of(rows: Sequence[Labelled]) -> dict[str, float]:
    """Metrics of labelled rows."""
    labels = [y for row in rows for y in row.labels]
    return {
        "reward_model/n_attempts": float(sum(row.is_last for row in rows)),
        "reward_model/n_labels": float(len(labels)),
        "reward_model/label_mean": math.fsum(labels) / len(labels),
    }


def updates(model: Any, rows: Sequence[Labelled], stage: RewardModel, seed: int) -> Iterator[dict[str, float]]:
    """Train `model` in place, in an order of its own in each epoch; gives what is logged after each update.

    Raises:
        TrainingError: too many gradients in a row were not finite.
    """
    optimizer = stage.optimizer.build(model.parameters())
    stepper = Stepper(stage.optimizer, optimizer, stage.n_updates(len(rows)))
    if stage.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for epoch in range(stage.epochs):
        order = random.Random(f"{seed}/{epoch}").sample(range(len(rows)), len(rows))
        for i in range(0, len(order), stage.batch_size):
            model.train()
            optimizer.zero_grad(set_to_none=True)
            loss = backward(model, [rows[k] for k in order[i : i + stage.batch_size]], stage.at_once)
            norm = stepper.step()
            yield {"reward_model/loss": loss, "optimizer/grad_norm": norm, "optimizer/lr": stepper.lr}
    optimizer.zero_grad(set_to_none=True)
    if stage.gradient_checkpointing:
        model.gradient_checkpointing_disable()
    model.eval()


def backward(model: Any, rows: Sequence[Labelled], at_once: int) -> float:
    """Add the gradient of the mean cross-entropy over all labels of `rows`; returns that mean.

    Labels (1, 1, 0) where (.9, .8, .3) is said are .228393. `at_once` changes memory alone.
    """
    n, total = sum(len(row.labels) for row in rows), 0.0
    for i in range(0, len(rows), at_once):
        some = rows[i : i + at_once]
        said = logits_at(model, [(row.token_ids, row.ends) for row in some])
        labels = torch.tensor([y for row in some for y in row.labels], device=said.device)
        loss = binary_cross_entropy_with_logits(said, labels, reduction="sum") / n
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _judge(run: RunContext, stage: RewardModel, model: Any, rows: Sequence[Labelled], step: int) -> None:
    """Log pairwise accuracy and calibration on held-out attempts."""
    said = logits(model, [(row.token_ids, row.ends) for row in rows], stage.at_once)
    values = [(p, row.right, row.task_id) for row, xs in zip(rows, said, strict=True) for p in map(sigmoid, xs)]
    bins = bins_of([p for p, _, _ in values], [r for _, r, _ in values], [t for _, _, t in values], run.estimate)
    compared = list(right_before_wrong(rows, [xs[-1] for xs in said]))
    counts = {"of": stage.objective, "n": len(values), "n_tasks": len({row.task_id for row in rows})}
    ahead, tasks = [x for x, _ in compared], [task for _, task in compared]
    tell_held_out(run, ahead, tasks, bins, counts, step, pairs="pairs of right and wrong")


def right_before_wrong(rows: Sequence[Labelled], said: Sequence[float]) -> Iterator[tuple[bool, str]]:
    """Pairwise accuracy: is the right attempt scored above the wrong one of its task, at the end."""
    ends: dict[str, list[tuple[float, bool]]] = {}
    for row, x in zip(rows, said, strict=True):
        if row.is_last:
            ends.setdefault(row.task_id, []).append((x, row.right))
    for task, found in ends.items():
        for better in (x for x, right in found if right):
            yield from ((better > worse, task) for worse, right in found if not right)


def _check_any(rows: Sequence[Labelled], groups: Sequence[ScoredGroup], stage: RewardModel, where: str) -> None:
    """Raise TrainingError unless some attempts are right and some are wrong."""
    n_right = sum(row.right for row in rows if row.is_last)
    n = sum(row.is_last for row in rows)
    if 0 < n_right < n:
        return
    raise TrainingError(
        "all attempts have the same label: all are correct, or all wrong",
        where=where,
        got=f"{n} attempts at {len(groups)} tasks, {n_right} with a score of at least {stage.success_threshold:g}",
        expected="attempts that are right and attempts that are wrong",
        hint="look at `success_threshold` and the scores; raise pairs.tasks, or choose tasks of medium difficulty",
    )


def _check_held_out(rows: Sequence[Labelled], where: str) -> None:
    """Raise TrainingError unless a right and a wrong attempt at one task can be compared."""
    if next(right_before_wrong(rows, [0.0] * len(rows)), None) is not None:
        return
    raise TrainingError(
        "the model could not be evaluated: no task has both a correct and a wrong attempt",
        where=where,
        got=f"{len({row.task_id for row in rows})} tasks",
        expected="one that some attempts solve and others do not",
        hint="raise pairs.tasks, pairs.group_size or held_out",
    )
