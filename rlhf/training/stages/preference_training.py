"""Training of the preference stage on pairs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.batching.samples import Sample
from rlhf.data import ScoredGroup, Task, Turn
from rlhf.errors import RecipeError, TrainingError
from rlhf.rollout.group_structure import GroupStructure, Independent
from rlhf.rollout.runner import RolloutBatch
from rlhf.rollout.tasks import tasks_of
from rlhf.tasks.shuffled import walk
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.checkpoints.store import check_model, latest
from rlhf.training.context import RunContext
from rlhf.training.contrib.task_demonstrations import DemonstrationCache
from rlhf.training.policy.model import Policy
from rlhf.training.shield import shielded
from rlhf.training.stages import pair_files
from rlhf.training.stages.pairs import Pair, Pairs, Side
from rlhf.training.stages.preference import Preference
from rlhf.training.stages.rated import Rated, mismatched, of_pairs, shuffled
from rlhf.training.stages.trl_trainers import train_dpo, train_kto, with_callbacks

#: Of what TRL logs, what is kept, by our names.
_LOGGED = {
    "loss": "preference/loss",
    "rewards/accuracies": "preference/accuracy",
    "rewards/margins": "preference/margin",
    "logps/chosen": "preference/chosen_logp",
    "logps/rejected": "preference/rejected_logp",
    "kl": "preference/kl",
    "grad_norm": "optimizer/grad_norm",
}
#: Tokens of one forward pass of the reference.
_REFERENCE_TOKENS = 16384


@dataclass(frozen=True)
class Paired:
    """The pairs of a stage, and what is logged of them.

    Attributes:
        pairs: at least one.
        collected: the attempts that were made for them; None where none were.
        figures: of the attempts and the pairs.
    """

    pairs: Sequence[Pair]
    collected: RolloutBatch | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def n_episodes(self) -> int:
        """Attempts that were made."""
        return self.collected.n_episodes if self.collected else 0


async def train_preference(run: RunContext, stage: Preference) -> None:
    """Make or read pairs, and train on them. An interrupted stage starts again from its first checkpoint."""
    run.save()
    if stage.loss == "kto":
        paired, rated = await rated_for(run, stage)
        rows, learn = rated_rows(run.policy, stage, rated), train_kto
    else:
        paired = await pairs_for(run, stage.pairs, stage.split, stage.rollout)
        rows, learn = _rows(run.policy, stage, paired.pairs), train_dpo
    total = stage.n_updates(len(rows))
    await run.release_engine_memory()
    run.progress.stage("preference", total, 0)

    def on_update(update: int, logs: Mapping[str, float]) -> None:
        values = {ours: float(logs[theirs]) for theirs, ours in _LOGGED.items() if theirs in logs}
        values["optimizer/lr"] = stage.optimizer.lr_at(update - 1, total)
        run.log(update, {**values, **(paired.figures if update == 1 else {})}, delivered=False)
        right = f"  right {values['preference/accuracy']:.0%}" if "preference/accuracy" in values else ""
        run.progress.advance(f"loss {values['preference/loss']:.3f}{right}")

    policy = run.policy
    model = policy.model.get_base_model() if policy.is_lora else policy.model
    await with_callbacks(
        run, lambda tell: learn(model, policy.tokenizer, rows, stage, tell, seed=seed_of(run)), on_update, total
    )
    policy.model.eval()
    run.advance(step=total, n_updates=total, finished=True, n_episodes=run.state.n_episodes + paired.n_episodes)
    try:
        await shielded(run.publish())
    except asyncio.CancelledError:
        run.save()  # of a stage whose updates are all made, none is lost
        raise


def seed_of(run: RunContext) -> int:
    """TRL's seed: a function of the run's seed and the stage."""
    return (run.seed * 1_000_003 + run.state.stage) % 2**32


async def pairs_for(
    run: RunContext,
    source: Pairs,
    split: str,
    grouping: GroupStructure = Independent(),  # noqa: B008  it holds nothing
) -> Paired:
    """Make or read the pairs of a stage, and keep them in the run's folder.

    Raises:
        TrainingError: there are none.
        RecipeError: a file, or a run that is named, cannot be used.
    """
    where, collected = f"the pairs of {run.state.label}", None
    at = f"stages[{run.state.stage}].pairs"
    groups: Sequence[ScoredGroup] = ()
    if source.file is not None:
        path = source.file.expanduser()
        written = pair_files.read(path, f"{at}.file")
        pairs = pair_files.rendered(written, run.runner.renderer, run.policy.max_context, path, f"{at}.file")
    elif source.level == "expert":
        shown, collected = await at_expert_states(run, source, split)
        groups, pairs = collected.groups, source.against(shown, f"{run.seed}/{run.state.stage}/pairs")
    else:
        groups, collected = await groups_for(run, source, split, grouping)
        pairs = source.of(groups, f"{run.seed}/{run.state.stage}/pairs")
    _check_any(pairs, source, groups, where)
    pair_files.save(run.folder / "pairs" / f"{run.state.label}.jsonl", pairs)
    figures = {"rollout/n_groups": float(len(groups))} if collected else {}
    figures |= collected.metrics() | collected.success_interval(run.estimate) if collected else {}
    figures |= {
        "preference/n_pairs": float(len(pairs)),
        "preference/n_tasks": float(len({pair.task_id for pair in pairs})),
        "preference/score_gap_mean": sum(pair.margin for pair in pairs) / len(pairs),
    }
    run.progress.say(f"{len(pairs)} pairs of {len({p.task_id for p in pairs})} tasks in {run.state.label}")
    return Paired(pairs, collected, figures)


async def rated_for(run: RunContext, stage: Preference) -> tuple[Paired, list[Rated]]:
    """Labelled replies, or both sides of pairs, in training order.

    Raises:
        RecipeError: a file, or a run that is named, cannot be used.
        TrainingError: there are no pairs, or all replies are good, or bad.
    """
    source, at = stage.pairs, f"stages[{run.state.stage}].pairs"
    if source.file is None:
        paired = await pairs_for(run, source, stage.split, stage.rollout)
        rated = of_pairs(paired.pairs)
    else:
        path = source.file.expanduser()
        written = pair_files.read_rated(path, f"{at}.file")
        rated = pair_files.rendered_replies(written, run.runner.renderer, run.policy.max_context, path, f"{at}.file")
        pair_files.save(run.folder / "pairs" / f"{run.state.label}.jsonl", rated)
        paired = Paired(())
    n_read = len(rated)
    rated = shuffled(rated, stage.at_once, f"{run.seed}/{run.state.stage}/order")
    n_good = sum(reply.is_good for reply in rated)
    if n_good in (0, len(rated)):
        raise TrainingError(
            f"all replies are {'good' if n_good else 'bad'}",
            where=at,
            got=f"{len(rated)} replies",
            expected="replies of both labels",
            hint="more pairs, or a file with replies of both labels",
        )
    without = ", without one that would be alone in its pass" if len(rated) < n_read else ""
    run.progress.say(f"{n_good} good and {len(rated) - n_good} bad replies in {run.state.label}{without}")
    figures = {"preference/n_desirable": float(n_good), "preference/n_undesirable": float(len(rated) - n_good)}
    paired = replace(paired, figures={**paired.figures, **figures})
    return paired, rated


def rated_rows(policy: Policy, stage: Preference, rated: Sequence[Rated]) -> list[dict[str, Any]]:
    """Rated replies as TRL's collator is given them, with the log-probs of the reference, in nats."""
    others = mismatched(rated, stage.at_once, policy.max_context)
    known = reference_logps(policy, [*(reply.side for reply in rated), *others], stage.reference)
    return [
        {
            "ids": list(reply.side.token_ids),
            "mask": [int(x) for x in reply.side.mask],
            "KL_ids": list(other.token_ids),
            "KL_mask": [int(x) for x in other.mask],
            "label": reply.is_good,
            "ref_logps": known[i],
            "ref_KL_logps": known[len(rated) + i],
        }
        for i, (reply, other) in enumerate(zip(rated, others, strict=True))
    ]


async def groups_for(
    run: RunContext,
    source: Pairs,
    split: str,
    grouping: GroupStructure = Independent(),  # noqa: B008  it holds nothing
) -> tuple[Sequence[ScoredGroup], RolloutBatch | None]:
    """Groups of a stage, attempted now or of the named run; and the rollout batch, if any.

    Raises:
        RecipeError: the run that is named is of other tokens.
    """
    if source.from_run is not None:
        for key in ("from_run", "rejected_from"):
            if (folder := getattr(source, key)) is not None:
                check_tokens(run.policy, folder.expanduser(), f"stages[{run.state.stage}].pairs.{key}")
        return run.demonstrations[run.state.stage], None
    collected = await _attempted(run, source, split, grouping)
    return collected.groups, collected


async def at_expert_states(
    run: RunContext, source: Pairs, split: str
) -> tuple[list[tuple[Turn, ScoredGroup]], RolloutBatch]:
    """Have the policy act in each state of demonstrations of a stage's tasks: (the oracle's turn, its attempts)."""
    tasks = _drawn(run, source, split)
    guide = DemonstrationCache({task.id: task for task in tasks})
    shown = await guide.show(guide.tasks, run)
    starts = {
        start.id: (d.turns[k], start)
        for task_id, d in shown.items()
        for k in range(len(d.turns))
        if (start := guide.tasks[task_id].started_after(d.turns[:k])).prefix or not k
    }
    collected = await _collected(run, source, [start for _, start in starts.values()], Independent(), 1)
    return [(starts[group.task_id][0], group) for group in collected.groups], collected


def _drawn(run: RunContext, source: Pairs, split: str) -> list[Task]:
    tasks = tasks_of(run.runner.environment, split)
    order = walk(len(tasks), f"{run.seed}/{run.state.stage}/pairs")
    return [tasks[i] for _, i in zip(range(min(source.tasks, len(tasks))), order, strict=False)]


async def _attempted(run: RunContext, source: Pairs, split: str, grouping: GroupStructure) -> RolloutBatch:
    return await _collected(run, source, _drawn(run, source, split), grouping)


async def _collected(
    run: RunContext, source: Pairs, tasks: list[Task], grouping: GroupStructure, max_turns: int | None = None
) -> RolloutBatch:
    await run.publish(same_version=True)  # so that the engine begins as that of a resumed run does: with nothing cached
    await run.check_stop()
    limits = run.runner.limits
    limits = replace(limits, max_turns=min(limits.max_turns, max_turns or limits.max_turns))
    collected = await replace(run.runner, limits=limits).collect(
        tasks,
        group_size=source.group_size,
        sampling=run.runner.limits.sampling(source.temperature),
        step=0,
        grouping=grouping,
    )
    run.caution(collected, f"the attempts of {run.state.label}")
    run.record(run.state.label, 1, "train", collected.groups, None)
    return collected


def _check_any(pairs: Sequence[Pair], source: Pairs, groups: Sequence[ScoredGroup], where: str) -> None:
    """Raise TrainingError if there are no pairs."""
    if pairs:
        return
    n = sum(len(group.trajectories) for group in groups)
    n_alike = sum(len({score.total for score in group.scores}) < 2 for group in groups)
    if not groups:
        got = "no trajectories"
    elif n_alike == len(groups):
        got = f"{n} attempts at {len(groups)} tasks; those at one task all score the same"
    else:
        got = f"{n} attempts at {len(groups)} tasks, {n_alike} of which score the same throughout"
    hints = {
        "trajectory": "raise pairs.tasks or group_size, lower margin, or take tasks that are neither sure nor hopeless",
        "state": "states must come again in a group and have a state_key: raise group_size, or use level: parting",
        "expert": "the policy does what the oracle does in all of these states: there is nothing to learn from it",
        "parting": "attempts must part after the same beginning and earn differently: raise pairs.tasks or group_size",
    }
    raise TrainingError(
        "there are no pairs to learn from",
        where=where,
        got=got,
        expected=f"two of one task that differ by more than {source.margin:g}",
        hint=hints[source.level],
    )


def check_tokens(policy: Policy, folder: Path, where: str) -> None:
    """Raise RecipeError where the policy of the run in `folder` reads other tokens."""
    from transformers import AutoTokenizer

    found = latest(folder / "checkpoints")
    if found:
        check_model(found / "policy", weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(found / "policy")) if found else None
    except (OSError, ValueError):
        tokenizer = None
    if tokenizer is None or tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        why = "without a checkpoint to compare" if tokenizer is None else "whose tokenizer differs"
        raise RecipeError(
            "the tokens of this run are not of the policy's tokenizer",
            where=where,
            got=f"{folder}, {why}",
            expected="a run whose policy has the same tokenizer",
            hint="start from a checkpoint of that run: policy: {kind: pretrained, path: RUN/checkpoints/NAME/policy}",
        )


def _rows(policy: Policy, stage: Preference, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The pairs as TRL's collator is given them, with the log-probs of the reference, in nats."""
    sides = [side for p in pairs for side in (p.chosen, p.rejected)]
    known = reference_logps(policy, sides, stage.reference)
    return [
        {
            "chosen_ids": list(pair.chosen.token_ids),
            "chosen_mask": [int(x) for x in pair.chosen.mask],
            "rejected_ids": list(pair.rejected.token_ids),
            "rejected_mask": [int(x) for x in pair.rejected.mask],
            "ref_chosen_logps": known[2 * i],
            "ref_rejected_logps": known[2 * i + 1],
        }
        for i, pair in enumerate(pairs)
    ]


def reference_logps(policy: Policy, sides: Sequence[Side], reference: str) -> list[float]:
    """Summed log π of each side's compared tokens, in nats, under the policy or its base; 0 without a reference."""
    if reference == "none":
        return [0.0] * len(sides)
    samples = [_sample(side, number) for number, side in enumerate(sides)]
    scorer = TorchTrainer(policy, Preference().optimizer, 1)
    with policy.model.disable_adapter() if reference == "base" else nullcontext():
        found = scorer.compute_logprobs(samples, temperature=1.0, max_tokens=_REFERENCE_TOKENS)
    return [float(values.sum(dtype=np.float64)) for values in found]


def _sample(side: Side, number: int) -> Sample:
    zeros = np.zeros(len(side.token_ids), np.float32)
    return Sample(np.array(side.token_ids, np.int64), np.array(side.mask, np.bool_), zeros, zeros, number, number)
