"""The report of an evaluation: one self-contained HTML page, made from the folder's files alone.

It answers, in this order: how good is the policy and how sure is that, where is it good and where not, what did it do
at the tasks that were hardest for it, and what exactly was evaluated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.digests import read_listed
from rlhf.errors import DataError
from rlhf.evaluation import transcript
from rlhf.evaluation.attempts import Attempt, read_attempts
from rlhf.evaluation.figures import Band, Series, interval_chart, line_chart
from rlhf.evaluation.page import failures, render, write_page
from rlhf.evaluation.store import TrajectoryRecord, read_trajectories
from rlhf.evaluation.wording import number_text, percent_text

#: Tasks in the table of the hardest ones, and of these those of which an attempt is shown.
N_HARDEST, N_SHOWN = 12, 4
#: Rows of the chart by types, and the longest name in it.
_MOST_ROWS, _LONGEST = 40, 60
#: Curves of parts in one chart; with more of them the whole is drawn alone.
_MOST_CURVES = 6


@dataclass(frozen=True)
class EvaluationData:
    """The files of an evaluation's folder.

    Attributes:
        folder: of the evaluation.
        summary: `summary.json`.
        plan: text of `evaluation.yaml`.
        versions: `versions.json`.
        attempts: all of them.
    """

    folder: Path
    summary: dict[str, Any]
    plan: str
    versions: dict[str, Any]
    attempts: list[Attempt]

    @classmethod
    def read(cls, folder: Path) -> EvaluationData:
        """Read the folder of a finished evaluation.

        Raises:
            DataError: a file is missing or damaged.
        """
        return cls(
            folder=folder,
            summary=_parsed(folder / "summary.json"),
            plan=_text(folder / "evaluation.yaml"),
            versions=_parsed(folder / "versions.json"),
            attempts=read_attempts(folder / "trajectories"),
        )


@dataclass(frozen=True, slots=True)
class HardTask:
    """Results of a task, of all its attempts that no part failed in."""

    task_id: str
    type: str
    solved: float
    score: float
    turns: float
    n: int


def write_evaluation_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a finished evaluation; returns its path.

    Raises:
        CheckpointError: the page cannot be written.
        DataError: a file of the evaluation is missing or damaged.
    """
    return write_page(folder, render_evaluation_report(EvaluationData.read(Path(folder))))


def render_evaluation_report(data: EvaluationData) -> str:
    """Return the page's HTML."""
    found, worst = data.summary, hardest(data.attempts, N_HARDEST)
    n_each = f" · {found['attempts']} attempts at each" if found["attempts"] > 1 else ""
    return render(
        "evaluation",
        title=f"{found['policy']} on {found['suite']}",
        subtitle=f"{found['n_tasks']} tasks{n_each} · {found['n_errors']} errors",
        data=data,
        success=found["success"],
        chart=_headline(found),
        figures=_figures(found),
        failures=failures(data.folder / "trajectories"),
        types=_by_type(found),
        plots=_plots(data),
        hardest=[
            (t.task_id, str(t.n), percent_text(t.solved), number_text(t.score), number_text(t.turns)) for t in worst
        ],
        shown=[_attempt(data.folder, task) for task in worst[:N_SHOWN]],
    )


def hardest(attempts: Sequence[Attempt], n: int) -> list[HardTask]:
    """Return the `n` tasks that went worst: by share solved, then score, then most turns.

    Types of tasks take turns, the one with the hardest task first, so that one hard type does not hide the others.
    """
    by_task: dict[str, list[Attempt]] = {}
    for a in attempts:
        if not a.is_error:
            by_task.setdefault(a.task_id, []).append(a)
    tasks = sorted(map(_hard, by_task.values()), key=lambda t: (t.solved, t.score, -t.turns, t.task_id))
    place: Counter[str] = Counter()
    rounds = []
    for order, task in enumerate(tasks):
        rounds.append((place[task.type], order, task))
        place[task.type] += 1
    return [task for _, _, task in sorted(rounds, key=lambda r: r[:2])][:n]


def _hard(found: Sequence[Attempt]) -> HardTask:
    n = len(found)
    return HardTask(
        task_id=found[0].task_id,
        type=found[0].type,
        solved=sum(a.solved for a in found) / n,
        score=sum(a.score or 0.0 for a in found) / n,
        turns=sum(a.n_turns for a in found) / n,
        n=n,
    )


def _headline(found: Mapping[str, Any]) -> str:
    success, n_errors = found["success"], found["n_errors"]
    rows = [_interval(name, part["success"]) for name, part in found["parts"].items() if len(found["parts"]) > 1]
    if n_errors:
        rows.append(_interval("errors as failures", found["if_errors_failed"]))
    rows.append(_interval("success", success))
    return interval_chart(rows, "Success", standalone=False)


def _interval(label: str, found: Mapping[str, Any]) -> tuple[str, float, float, float]:
    value = found["value"]
    return label, value if value is not None else 0.0, found["low"], found["high"]


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    cut = sum(found["truncated"].values())
    return [
        ("solved", str(found["n_solved"])),
        ("ended unsolved by the environment", str(found["n_failed"])),
        *((f"cut off by the limit: {name.replace('_', ' ')}", str(n)) for name, n in found["truncated"].items() if cut),
        *((f"errors: {name.replace('_', ' ')}", str(n)) for name, n in found["errors"].items() if n),
        ("success, errors left out", _share(found["success"])),
        ("success, errors as failures", _share(found["if_errors_failed"])),
        ("mean score", _number(found["score"])),
        *((f"pass@{k}", _share(each["at"])) for k, each in found["pass"].items() if int(k) > 1),
        *((f"pass^{k}", _share(each["all"])) for k, each in found["pass"].items() if int(k) > 1),
        ("mean turns", number_text(found["turns_mean"])),
        ("invalid actions", _percent(found["invalid_share"])),
        *((f"{name.replace('_', ' ')} for each solved", number_text(n)) for name, n in _spent(found)),
    ]


def _spent(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in found["per_solved"].items() if value is not None)


def _by_type(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            str(each["success"]["n"]),
            _share(each["success"]),
            _number(each["score"]),
            number_text(each["turns_mean"]),
            str(each["n_errors"]),
        )
        for name, each in found["types"].items()
    ]


def _plots(data: EvaluationData) -> list[str]:
    drawn = [_types_chart(data.summary), _turns_chart(data.attempts)]
    if len(data.summary["pass"]) > 1:
        drawn.append(_passes_chart(data.summary["pass"]))
    return drawn


def _types_chart(found: Mapping[str, Any]) -> str:
    ranked = sorted(found["types"].items(), key=lambda item: (item[1]["success"]["value"] or 0.0, item[0]))
    rows = [_interval(name[-_LONGEST:], each["success"]) for name, each in ranked[:_MOST_ROWS]]
    chart = interval_chart(rows, "Success by type of task", highlight=None, width=1120, standalone=False)
    left = len(ranked) - len(rows)
    return chart + (f'<p class="soft">and {left} types above these</p>' if left > 0 else "")


def _turns_chart(attempts: Sequence[Attempt]) -> str:
    counted = [a for a in attempts if not a.is_error]
    parts = list(dict.fromkeys(a.part for a in counted))
    curves = [("all", counted)]
    if 1 < len(parts) <= _MOST_CURVES:
        curves += [(part, [a for a in counted if a.part == part]) for part in parts]
    longest = max((a.n_turns for a in counted), default=1)
    steps = list(range(1, max(longest, 1) + 1))
    series = [Series(name, steps, [_solved_within(found, n) for n in steps]) for name, found in curves]
    words = "share of the attempts solved within so many"
    return line_chart(
        series, "Solved within n actions", "actions", words, percent=True, y_range=(0.0, 1.0), standalone=False
    )


def _solved_within(attempts: Sequence[Attempt], n_turns: int) -> float:
    return sum(a.solved and a.n_turns <= n_turns for a in attempts) / max(len(attempts), 1)


def _passes_chart(passes: Mapping[str, Any]) -> str:
    ks = [float(k) for k in passes]
    series, bands = [], []
    for label, name in (("pass@k", "at"), ("pass^k", "all")):
        found = [each[name] for each in passes.values()]
        series.append(Series(label, ks, [each["value"] for each in found]))
        bands.append(Band(label, ks, [each["low"] for each in found], [each["high"] for each in found]))
    words = "share of the tasks, with 95% intervals"
    return line_chart(
        series, "One of k attempts, and each of them", "k", words, bands, percent=True, y_range=(0, 1), standalone=False
    )


def _attempt(folder: Path, task: HardTask) -> tuple[str, str, str]:
    """The attempt at a task that came furthest and was not solved, or the longest one."""
    records = list(read_trajectories(folder / "trajectories", phase="eval", task_id=task.task_id))
    record = max(records, key=_furthest)
    t, total = record.trajectory, record.score.total if record.score else 0.0
    words = f"attempt {t.attempt} of {task.n} · {len(t.turns)} turns · {t.outcome} · score {number_text(total)}"
    return task.task_id, words, transcript.spoken(record)


def _furthest(record: TrajectoryRecord) -> tuple[bool, float, int, int]:
    t = record.trajectory
    return not t.solved, record.score.total if record.score else 0.0, len(t.turns), -t.attempt


def _share(estimate: Mapping[str, Any]) -> str:
    return f"{_percent(estimate['value'])} ({_percent(estimate['low'])} to {_percent(estimate['high'])})"


def _number(estimate: Mapping[str, Any]) -> str:
    if estimate["value"] is None:
        return "-"
    ends = [number_text(end) if end is not None else "-" for end in (estimate["low"], estimate["high"])]
    return f"{number_text(estimate['value'])} ({ends[0]} to {ends[1]})"


def _percent(value: float | None) -> str:
    return "-" if value is None else percent_text(value)


def _text(path: Path) -> str:
    try:
        return read_listed(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("this file is missing or damaged", where=str(path), got=str(error)[:200]) from error


def _parsed(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(_text(path))
        return found
    except ValueError as error:
        raise DataError("this file is damaged", where=str(path), got=str(error)[:200]) from error
