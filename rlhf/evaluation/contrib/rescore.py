"""Rescoring of stored attempts by other rewards, compared with the stored scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf.data import Failure, ScoredGroup, Task
from rlhf.evaluation.rows import TrajectoryRecord
from rlhf.evaluation.statistics import Estimate, mean_interval, usual_range
from rlhf.rollout.scoring import WeightedReward, score_group

#: Name under which the reward is asked.
_NAME = "again"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Attempt with its stored and its new score.

    Attributes:
        record: the stored attempt.
        before: what was stored.
        after: what the other reward says; None where it fails.
        why: its reason, or what went wrong.
    """

    record: TrajectoryRecord
    before: float
    after: float | None
    why: str

    @property
    def group(self) -> tuple[str, str]:
        """Stage and phase of the attempt."""
        return self.record.stage, self.record.phase


def stored_value(record: TrajectoryRecord, against: str) -> float | None:
    """Stored value of an attempt: `score`, `success`, or a reward's name, trained on or monitored."""
    if against == "success":
        return float(record.trajectory.solved)
    if record.score is None:
        return None
    if against == "score":
        return record.score.total
    verdict = {**record.score.parts, **record.score.monitored}.get(against)
    return None if verdict is None else verdict.value


def stored_names(records: Iterable[TrajectoryRecord]) -> list[str]:
    """Names of stored values to compare by."""
    names = dict.fromkeys(n for r in records if r.score for n in (*r.score.parts, *r.score.monitored))
    return ["score", "success", *names]


async def judge_again(
    records: Sequence[TrajectoryRecord],
    reward: Any,
    task_of: Callable[[str], Task],
    against: str,
    *,
    timeout_s: float,
) -> list[Judgement]:
    """Ask `reward` about stored attempts, those of one group together.

    Args:
        records: attempts, those of a group in any order; of two groups at one task in one step, one after the other.
        reward: of a task and a trajectory, or of a group.
        task_of: the task of an id.
        against: what was stored and is compared with; attempts without it are left out.
        timeout_s: limit of each call.
    """
    found: list[Judgement] = []
    for group in _groups(records):
        scored = await score_group(
            task_of(group[0].task_id),
            [record.trajectory for record in group],
            {_NAME: WeightedReward(_NAME, 1.0, reward)},
            timeout_s=timeout_s,
        )
        found += _judgements(group, scored, against)
    return found


def _groups(records: Sequence[TrajectoryRecord]) -> list[list[TrajectoryRecord]]:
    """Attempts at one task in one step; a second group where an attempt's number comes again.

    A step may attempt a task twice: where one order of the tasks ends within it and the next begins, or where there are
    fewer tasks than a step takes. The numbers of the attempts begin anew then, and tell nobody apart.
    """
    groups: dict[tuple[str, str, int, str], list[dict[int, TrajectoryRecord]]] = {}
    for record in records:
        same = groups.setdefault((record.stage, record.phase, record.step, record.task_id), [{}])
        if record.trajectory.attempt in same[-1]:
            same.append({})
        same[-1][record.trajectory.attempt] = record
    return [list(group.values()) for same in groups.values() for group in same]


def _judgements(group: Sequence[TrajectoryRecord], scored: ScoredGroup, against: str) -> Iterable[Judgement]:
    said = {
        t.attempt: (s.parts[_NAME].value, s.parts[_NAME].why)
        for t, s in zip(scored.trajectories, scored.scores, strict=True)
    }
    failed: dict[int, Failure] = {f.attempt: f for f in scored.failures}
    for record in group:
        before, attempt = stored_value(record, against), record.trajectory.attempt
        if before is not None:
            after, why = said[attempt] if attempt in said else (None, failed[attempt].message)
            yield Judgement(record, before, after, why)


def figures(judged: Sequence[Judgement], threshold: float) -> dict[str, Any]:
    """Compare before and after over attempts that the reward could judge.

    Means have the intervals of `mean_interval`, clustered by task, within the `usual_range` of the values. Flipped
    attempts are those of which one value is at least `threshold` and the other is not.
    """
    kept = [(j.record.task_id, j.before, j.after) for j in judged if j.after is not None]
    tasks, before, after = (list(column) for column in zip(*kept, strict=True)) if kept else ([], [], [])
    up = sum(a < threshold <= b for a, b in zip(before, after, strict=True))
    down = sum(b < threshold <= a for a, b in zip(before, after, strict=True))
    return {
        "n": len(kept),
        "n_failed": len(judged) - len(kept),
        "before": _plain(mean_interval(before, tasks, within=usual_range(before))),
        "after": _plain(mean_interval(after, tasks, within=usual_range(after))),
        "rank_correlation": rank_correlation(before, after),
        "n_up": up,
        "n_down": down,
    }


def flipped(judged: Sequence[Judgement], threshold: float) -> list[Judgement]:
    """The attempts whose verdict flipped, those that moved most first."""
    found = [j for j in judged if j.after is not None and (j.before >= threshold) != (j.after >= threshold)]
    return sorted(found, key=lambda j: -abs((j.after or 0.0) - j.before))


def worst(judged: Sequence[Judgement]) -> list[Judgement]:
    """Attempts to read first: failures of a reward, then contradictions of the environment, largest first.

    An attempt that was not solved is contradicted where it is worth more than a solved one, or no less than their mean,
    by how far it lies above that; one that was solved the other way round. Where all ended alike, these are all, the
    lowest values first.
    """
    failed = [j for j in judged if j.after is None]
    values: dict[bool, list[float]] = {True: [], False: []}
    for j in judged:
        if j.after is not None:
            values[j.record.trajectory.solved].append(j.after)
    means = {solved: sum(found) / len(found) if found else math.nan for solved, found in values.items()}

    def gap(j: Judgement) -> float:
        solved, value = j.record.trajectory.solved, j.after or 0.0
        if not (values[True] and values[False]):
            return -value
        return means[False] - value if solved else value - means[True]

    def is_contradicted(j: Judgement) -> bool:
        solved, value = j.record.trajectory.solved, j.after or 0.0
        others = values[not solved]
        return not others or gap(j) >= 0 or (value < max(others) if solved else value > min(others))

    kept = [j for j in judged if j.after is not None and is_contradicted(j)]
    return [*failed, *sorted(kept, key=gap, reverse=True)]


def failure_summary(judged: Sequence[Judgement]) -> tuple[str, int]:
    """Most frequent reason of failure, and the number of failures of any; an empty text where nothing failed."""
    messages = Counter(j.why for j in judged if j.after is None)
    return (messages.most_common(1)[0][0], sum(messages.values())) if messages else ("", 0)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's coefficient: the correlation of ranks, equal values sharing the mean of theirs.

    1, 2, 3 against 1, 3, 2: ½. None where one of the two does not vary.
    """
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    found = [ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    return float(np.corrcoef(found[0], found[1])[0, 1])


def ranks(values: Any) -> Any:
    """Ranks from 1 of an array `[N]`; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _plain(estimate: Estimate) -> Mapping[str, float | None]:
    values = {"mean": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
