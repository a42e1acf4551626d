"""`rlhf check reward TARGET --on FILE` of replies with labels: how far a reward agrees with people."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.commands.tables import number, percent

if TYPE_CHECKING:
    from rlhf.data import Message, Task, Trajectory
    from rlhf.data.report import Finding, Report
    from rlhf.evaluation.statistics import Estimate
    from rlhf.training.stages.pair_files import LabelledReply, Written

#: Suffixes of tables, whose rows are never answers with references.
_TABLES = (".json", ".csv", ".tsv", ".parquet")
#: Replies are scored so many prompts at a time; a language model may take long.
_AT_ONCE, _TIMEOUT_S = 8, 600.0
_CONSTANT = "undefined: values or labels do not vary"
_COLUMNS = {"prompt", "completion", "label", "chosen", "rejected"}


@dataclass(frozen=True, slots=True)
class _Reply:
    """A labelled reply, and what the reward says of it; None where it fails."""

    line: int
    prompt: tuple[Message, ...]
    text: str
    label: float
    group: int
    reference: str | None = None
    value: float | None = None
    why: str = ""


def holds_labels(file: Path) -> bool:
    """True if the file's first row is a labelled reply or a pair, as tables always are, and no answer of a suite."""
    if file.suffix.lower() in _TABLES:
        return True
    first = next((line for line in file.read_text("utf-8-sig").split("\n") if line.strip()), "")
    try:
        row = json.loads(first)
    except ValueError:
        return False
    return isinstance(row, dict) and bool(_COLUMNS & row.keys())


def on_labels(part: Any, target: str, file: Path) -> tuple[list[Report], list[dict[str, Any]], str]:
    """Score the replies of a file whose labels are known, and compare.

    Args:
        part: a reward or a verifier.
        target: its name on the command line.
        file: rows of prompt, completion and label, or of prompt, chosen and rejected.

    Returns:
        a report, the rows to read first, and what these are.

    Raises:
        RecipeError: a row cannot be used, or the reward needs what the file does not have.
        ModelError: a model that the reward asks cannot be loaded.
    """
    from rewards.trl_function import as_reward
    from rlhf.data.report import Finding, Report, counted
    from rlhf.training.stages.pair_files import Written, read_labelled

    rows = read_labelled(file, "--on")
    pairs = isinstance(rows[0], Written)
    reward = as_reward(part)
    judged = asyncio.run(_judge(reward, target, list(_replies(rows))))
    failed = [one for one in judged if one.value is None]
    kept = [one for one in judged if one.value is not None]
    told = f"{len(failed)} failed: {failed[0].why}" if failed else ""
    findings = [Finding(not failed, "call: judges every reply", told), *_found(kept, pairs)]
    what = counted(len(rows), "pair" if pairs else "row")
    worst = [_row(one, file) for one in [*failed, *(_worst_pairs(kept) if pairs else _worst(kept))]]
    return [Report(f"reward {target} on {what} of {file}", tuple(findings))], worst, "what the labels contradict most"


def _replies(rows: Sequence[Written | LabelledReply]) -> Iterator[_Reply]:
    """Replies in the order in which a reward of groups is shown them; the better one of a pair comes first in turn."""
    from rlhf.training.stages.pair_files import Written

    groups: dict[Any, int] = {}
    for i, row in enumerate(rows):
        if isinstance(row, Written):
            sides = [(row.chosen, 1.0), (row.rejected, 0.0)]
            yield from (_Reply(row.line, row.prompt, text, label, i) for text, label in sides[:: 1 - 2 * (i % 2)])
        else:
            group = groups.setdefault((row.prompt, row.reference), len(groups))
            yield _Reply(row.line, row.prompt, row.text, row.label, group, row.reference)


async def _judge(reward: Any, target: str, replies: Sequence[_Reply]) -> list[_Reply]:
    from rlhf.rollout.scoring import WeightedReward, score_group

    renderer, weighted = _renderer(reward), {target: WeightedReward(target, 1.0, reward)}
    groups: dict[int, list[_Reply]] = defaultdict(list)
    for one in replies:
        groups[one.group].append(one)
    turns = asyncio.Semaphore(_AT_ONCE)

    async def judged(group: list[_Reply]) -> list[_Reply]:
        task = _task(group[0])
        attempts = [_attempt(task, one, i, renderer) for i, one in enumerate(group)]
        async with turns:
            scored = await score_group(task, attempts, weighted, timeout_s=_TIMEOUT_S)
        verdicts = {t.attempt: s.parts[target] for t, s in zip(scored.trajectories, scored.scores, strict=True)}
        failed = {failure.attempt: failure.message for failure in scored.failures}
        return [
            replace(one, value=verdicts[i].value, why=verdicts[i].why) if i in verdicts else replace(one, why=failed[i])
            for i, one in enumerate(group)
        ]

    return [one for found in await asyncio.gather(*map(judged, groups.values())) for one in found]


def _renderer(reward: Any) -> Any:
    """Renderer with the tokenizer of the reward's model; None for a reward without one."""
    from rewards.combinators.parts import with_parts
    from rewards.models.model_folder import ModelReward, load
    from rlhf.build.pair_data import check_parts
    from rlhf.rollout.renderer import Renderer

    models = [part for _, part in with_parts("", reward) if isinstance(part, ModelReward)]
    tokenizer: Any = None
    with suppress(Exception):  # which the model's own check tells
        tokenizer = load(models[0].path)[1] if models else None
    check_parts([reward], tokenizer)
    return Renderer(tokenizer) if models else None


def _task(one: _Reply) -> Task:
    from rlhf.data import Task

    return Task(f"group {one.group}", messages=one.prompt[:-1], reference=one.reference)


def _attempt(task: Task, one: _Reply, number: int, renderer: Any) -> Trajectory:
    from rlhf.data import Action, Finish, Generation, Outcome, Trajectory, Turn

    said: tuple[Generation, ...] = ()
    if renderer is not None:
        ids = renderer.encode_reply(one.text)
        said = (Generation(renderer.prompt(one.prompt), ids, (0.0,) * len(ids), Finish.STOP, 0),)
    turn = Turn(Action(one.text, said), "")
    return Trajectory(task.id, number, one.prompt[-1].content, (turn,), Outcome.FAILED)


def _found(kept: Sequence[_Reply], pairs: bool) -> Iterator[Finding]:
    """Findings on the agreement, and a caution where it may be chance."""
    from rlhf.data.report import Finding, counted
    from rlhf.evaluation.contrib import agreement

    values, labels = [one.value or 0.0 for one in kept], [one.label for one in kept]
    prompts = [one.prompt for one in kept]
    chances: list[tuple[Estimate, float]] = []
    is_cut = not pairs and agreement.is_binary(labels) and all(0 <= x <= 1 for x in values)
    if is_cut and kept:
        agreed = agreement.accuracy(values, labels, prompts)
        cut = f"{_share(agreed)} of {counted(len(kept), 'row')}; threshold {agreement.CUT}"
        yield Finding(True, "labels: accuracy", cut)
        kappa = agreement.kappa(agreed, values, labels)
        yield Finding(True, "labels: Cohen's kappa", _number(kappa) if kappa else _CONSTANT)
        yield Finding(True, "labels: confusion", _confusion(values, labels))
        chances += [(kappa, 0.0)] if kappa else []
    ordered, n_ties = agreement.order(values, labels, [one.group for one in kept], prompts)
    if ordered.n:
        ties = f", {counted(n_ties, 'tie')} counted half" * bool(n_ties)
        told = f"{_share(ordered)} of {counted(ordered.n, 'pair')}{ties}"
        yield Finding(True, "labels: pairwise accuracy", told)
        chances.append((ordered, 0.5))
    if not pairs and not (is_cut and agreement.is_binary(values)):
        rank = agreement.correlation(values, labels, prompts)
        yield Finding(True, "labels: rank correlation", _number(rank) if rank else _CONSTANT)
        chances += [(rank, 0.0)] if rank else []
    if any(estimate.high < chance for estimate, chance in chances):
        told = "it prefers what the labels call worse: is the label, or the scale, the other way round?"
        yield Finding(True, "labels: agreement", told, is_caution=True)
    elif kept and all(estimate.low <= chance for estimate, chance in chances):
        told = "chance would agree as well, within the intervals: label more replies, or take another reward"
        if len(set(labels)) == 1:
            told = "all labels are the same: label good replies and bad ones"
        elif len(set(values)) == 1:
            told = "all replies are worth the same; a reward that compares the replies to a prompt needs two to each"
        yield Finding(True, "labels: agreement", told, is_caution=True)


def _share(found: Estimate) -> str:
    return f"{percent(found.value)} (95% interval {percent(found.low)} to {percent(found.high)})"


def _number(found: Estimate) -> str:
    return f"{number(found.value)} (95% interval {number(found.low)} to {number(found.high)})"


def _confusion(values: Sequence[float], labels: Sequence[float]) -> str:
    from rlhf.evaluation.contrib.agreement import CUT

    lines = []
    for label, name in ((1, "right"), (0, "wrong")):
        found = [value >= CUT for value, own in zip(values, labels, strict=True) if own == label]
        lines.append(f"labelled {name}: {sum(found)} taken for right, {len(found) - sum(found)} for wrong")
    return "\n".join(lines)


def _worst(kept: Sequence[_Reply]) -> list[_Reply]:
    """Replies sorted by disagreement of value and label, worst first: by numbers from 0 to 1, else by ranks."""
    import numpy as np

    from rlhf.evaluation.contrib.agreement import CUT, is_binary
    from rlhf.evaluation.contrib.rescore import ranks

    values, labels = (np.array([getattr(one, key) for one in kept]) for key in ("value", "label"))
    if is_binary(labels.tolist()) and all(0 <= x <= 1 for x in values):
        gaps = np.where((values >= CUT) == labels, 0, abs(values - labels))
    else:
        gaps = abs(ranks(values) - ranks(labels)) if len(kept) else values
    return [kept[i] for i in np.argsort(-gaps, kind="stable") if gaps[i] > 0]


def _worst_pairs(kept: Sequence[_Reply]) -> list[_Reply]:
    """Entry for each pair that is tied or misordered, with the difference as its value; the worst first."""
    sides: dict[int, dict[float, _Reply]] = defaultdict(dict)
    for one in kept:
        sides[one.group][one.label] = one
    found = []
    for both in sides.values():
        if len(both) == 2:
            better, worse = both[1.0], both[0.0]
            text = f"{better.text!r} is chosen over {worse.text!r}"
            found.append(replace(better, text=text, value=(better.value or 0.0) - (worse.value or 0.0)))
    return sorted((one for one in found if (one.value or 0.0) <= 0), key=lambda one: one.value or 0.0)


def _row(one: _Reply, file: Path) -> dict[str, Any]:
    from rlhf.data.report import shorten

    return {
        "value": one.value,
        "outcome": f"labelled {one.label:g}",
        "action": one.text,
        "why": one.why,
        "line": one.line,
        "look": f"{file}, line {one.line}: {shorten(one.prompt[-1].content, 60)}",
    }
