"""Leaderboards: evaluations ranked per suite over the same tasks and environments."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf.digests import read_listed
from rlhf.errors import DataError
from rlhf.evaluation.compare import Side, read_sides, when
from rlhf.evaluation.judging import differences, settings_of
from rlhf.evaluation.summary import summarize

#: Types of tasks that the title of a run's evaluation names.
_TYPES = 3
#: Settings that a title names, and characters of each.
_SETTINGS, _MOST_CHARS = 2, 40


@dataclass
class _Board:
    """Evaluations that may be ranked together.

    Attributes:
        suite: name of it; of evaluations of runs, what the tasks are and when they were attempted.
        settings: of sampling, environments, rewards and limits; empty where they are not known.
        n_attempts: at each task.
        metric: what they are ranked by first.
        tasks: ids.
        said: task -> hash of what its environment says first, as far as any of the evaluations got there, and the
            environment is deterministic.
        rows: one for each evaluation.
    """

    suite: str
    settings: Mapping[str, Any]
    n_attempts: int
    metric: str
    tasks: frozenset[str]
    said: Mapping[str, set[str]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, other: _Board) -> bool:
        """True if an evaluation, as a board of its own, is on the same suite, tasks and settings."""
        own, theirs = ((b.suite, b.n_attempts, b.metric, b.tasks) for b in (self, other))
        is_known_alike = not differences(self.settings, other.settings) and not differences(self.said, other.said)
        return own == theirs and is_known_alike

    def apart_from(self, boards: Sequence[_Board]) -> dict[str, Any]:
        """Settings, by dotted key, that other boards with as many attempts at as many tasks of the suite have not."""
        size, found = (self.suite, len(self.tasks), self.n_attempts), dict[str, Any]()
        for other in boards:
            if (other.suite, len(other.tasks), other.n_attempts) == size:
                differing = differences(self.settings, other.settings)
                found |= {key: own for key, (own, _) in differing.items()}
        return found


def boards(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the boards of the evaluations in these folders; see `ranked`.

    Raises:
        DataError: a file is damaged.
        RecipeError: one of the folders holds no evaluation.
    """
    return ranked(read_sides(folders))


def ranked(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Return the boards of these evaluations, each with its rows, the best first.

    Policies of one name have their folders behind it.

    Evaluations share a board where suite, tasks, attempts, sampling, rewards and the limits of an attempt are the same,
    and the environments said the same; those of runs where the reward that decides success is the same, whatever else
    the runs were trained with.

    Raises:
        DataError: a file is damaged.
    """
    found: list[_Board] = []
    for side in sides:
        suite, policy, strategy, n_attempts, metric, figures = _named(side)
        tasks = frozenset(a.task_id for a in side.attempts)
        settings = settings_of(side.folder, is_run=bool(side.stage), with_score=not side.stage)
        own = _Board(suite, settings, n_attempts, metric, tasks, side.said)
        board = next((b for b in found if b.takes(own)), None)
        if board is None:
            board = own
            found.append(board)
        board.said, board.settings = {**board.said, **own.said}, _joined(board.settings, own.settings)
        named = {"policy": f"{policy}, {strategy}" if strategy else policy, "strategy": strategy}
        board.rows.append({**_row(side), **figures, **named})
    for board in found:
        same = Counter(row["policy"] for row in board.rows)
        for row in board.rows:
            row["policy"] += f" ({row['name']})" * (same[row["policy"]] > 1)
    return [
        {
            "suite": board.suite,
            "n_tasks": len(board.tasks),
            "attempts": board.n_attempts,
            "metric": board.metric,
            "settings": board.apart_from(found),
            "rows": sorted(board.rows, key=_rank(board.metric)),
        }
        for board in sorted(found, key=lambda board: (board.suite, len(board.tasks)))
    ]


def title_of(board: Mapping[str, Any]) -> str:
    """Suite, number of tasks, and the first settings that tell it from another board, for the reader."""
    each = f", {board['attempts']} attempts at each" if board["attempts"] > 1 else ""
    apart = "".join(
        f", {key} {str(value)[:_MOST_CHARS]}" for key, value in islice(board["settings"].items(), _SETTINGS)
    )
    return f"{board['suite']} ({board['n_tasks']} tasks{each}{apart})"


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Names of the columns of a board, and the texts of each row; a dash where nothing is known.

    Where tasks were attempted several times there is a column of pass@k, for the largest k.
    """
    k = max((int(k) for row in rows for k in row["pass"]), default=1)
    passes = [f"pass@{k}"] if k > 1 else []
    texts = []
    for row in rows:
        low, high = row["interval"]
        of_k = [_share(row["pass"][str(k)]["at"]["value"]) if str(k) in row["pass"] else "-" for _ in passes]
        score = f"{row['score']:.3f}" if _is_known(row["score"]) else "-"
        own = [row["policy"], _share(row["success"]), f"{low:.1%} to {high:.1%}", *of_k, score]
        texts.append([*own, f"{row['turns_mean']:.1f}", str(row["n_errors"])])
    return ["policy", "success", "95% interval", *passes, "score", "turns", "errors"], texts


def _share(value: float) -> str:
    return f"{value:.1%}" if _is_known(value) else "-"


def _is_known(value: float) -> bool:
    return value == value


def _rank(metric: str) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Sort key, best first: the suite's metric, then the other one, then the name."""
    first, then = ("score", "success") if metric == "score" else ("success", "score")
    return lambda row: (*_descending(row[first]), *_descending(row[then]), row["policy"])


def _row(side: Side) -> dict[str, Any]:
    figures = summarize(side.attempts)
    success = figures["success"]
    return {
        "name": side.name,
        "folder": str(side.folder),
        "success": success["value"],
        "interval": [success["low"], success["high"]],
        "score": figures["score"]["value"],
        "turns_mean": figures["turns_mean"],
        "tokens_mean": figures["tokens_mean"],
        "n_errors": figures["n_errors"],
        "n": success["n"],
        "pass": figures["pass"],
    }


def _named(side: Side) -> tuple[str, str, str, int, str, dict[str, Any]]:
    """Suite, policy, strategy, attempts at each task, metric, and the figures that only the summary knows.

    Of a run the suite is its tasks and when it attempted them, and the policy its folder.
    """
    path = side.folder / "summary.json"
    if side.stage or not path.is_file():
        suite = _evaluation_of(side) if side.stage else side.name
        return suite, side.name, "", 1 + max((a.number for a in side.attempts), default=0), "success", {}
    try:
        summary = json.loads(read_listed(path))
        metric = str(summary.get("metric", "success"))
        strategy = summary.get("strategy")
        chosen = f"{strategy['kind']} of {strategy['n']}" if strategy else ""
        figures = {key: summary[key] for key in ("tokens_mean",) if key in summary}  # null where nobody counted them
        return str(summary["suite"]), str(summary["policy"]), chosen, int(summary["attempts"]), metric, figures
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("this file is damaged", where=str(path), got=str(error)[:200]) from error


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Union of two settings that agree."""
    both = {key: _joined(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(one[key], Mapping)}
    return {**other, **one, **both}


def _evaluation_of(run: Side) -> str:
    """Label of a run's evaluation: `babyai/GoToObj/test, after training`."""
    types = list(dict.fromkeys(a.type for a in run.attempts))
    what = ", ".join(types[:_TYPES]) + f" and {len(types) - _TYPES} more" * (len(types) > _TYPES)
    return f"{what}, {when(run.stage)}"


def _descending(value: float) -> tuple[bool, float]:
    """Sort key of a figure, highest first; an unknown one comes last."""
    return (False, -value) if _is_known(value) else (True, 0.0)
