"""Data of evaluations for the pages: figures, hardest tasks, pairs, ranks, and how far judges can be believed."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.errors import DataError, RlhfError
from rlhf.evaluation.attempts import Attempt, read_attempts
from rlhf.evaluation.compare import Side, compare_all, named_apart, read_side, side_of
from rlhf.evaluation.contrib.findings import compared
from rlhf.evaluation.contrib.leaderboard import ranked, title_of
from rlhf.evaluation.folder import is_evaluation
from rlhf.evaluation.paired import Paired
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.summary import summarize
from rlhf.evaluation.wording import number_text, percent_text
from rlhf.finite import finite
from rlhf.viewer.attempts import Attempts
from rlhf.viewer.library import ShownRun

#: Tasks in the table of the hardest ones, flipped tasks that are sent, and curves of parts in one chart.
N_HARDEST, N_FLIPPED, N_CURVES = 12, 200, 6
#: Metrics that say how far a judge or a reward model can be believed, with the words for what is counted.
_JUDGED = {
    "judge_refresh/audit_accuracy": "judge, audited pairs",
    "reward_model/accuracy": "reward model, held-out pairs",
    "reward_refresh/accuracy_after": "reward model trained further, held-out pairs",
}


@dataclass(frozen=True, slots=True)
class HardTask:
    """Results of a task, of all its attempts that no part failed in."""

    task_id: str
    type: str
    solved: float
    score: float
    turns: float
    n: int


def names(attempts: Attempts) -> list[str]:
    """Names of the evaluations whose attempts are stored, in the order they were made; '' is a whole evaluation."""
    if is_evaluation(attempts.folder.parent):
        return [""] if any(stored.phase == "eval" for stored in attempts.steps()) else []
    return list(dict.fromkeys(stored.stage for stored in attempts.steps() if stored.phase == "eval"))


def paired(first: tuple[Attempts, str], second: tuple[Attempts, str]) -> dict[str, Any]:
    """Two evaluations, of one run or of two, task by task, with cautions; `problem` says why not."""
    try:
        sides = named_apart([side_of(attempts.folder.parent, stage) for attempts, stage in (first, second)])
        [found] = compare_all(sides)["comparisons"]
    except (RlhfError, OSError, ValueError) as error:
        return {"problem": str(error)}
    kept = {key: found[key] for key in ("difference", "p_value", "test", "n_better", "n_worse")}
    low, high = found["interval"]
    cautions = [_on_page(text, sides) for text in found["cautions"]]
    flipped = [{key: flip[key] for key in ("task", "first", "second")} for flip in found["flipped"][:N_FLIPPED]]
    return {**kept, "low": low, "high": high, "n": found["n_tasks"], "cautions": cautions, "flipped": flipped}


def _on_page(caution: str, sides: Sequence[Side]) -> str:
    """A caution without the command that resumes a run, and with the name of a folder where that tells it apart."""
    caution = caution.partition("; resume it: ")[0]
    for side in sides:
        if side.name != str(side.folder) and caution.startswith(f"{side.folder} "):
            return side.folder.name + caution.removeprefix(str(side.folder))
    return caution


def learned(run: ShownRun, data: RunData) -> dict[str, Any] | None:
    """First and last evaluation of a run on the same tasks; None where fewer than two are stored."""
    try:
        found = compared(data)
    except (RlhfError, OSError, ValueError) as error:
        run.problems["trajectories"] = str(error)
        return None
    return None if found is None else _difference(found)


def _difference(found: Paired) -> dict[str, Any]:
    return {
        "difference": found.difference.value,
        "low": found.difference.low,
        "high": found.difference.high,
        "n": found.difference.n,
        "p_value": found.p_value,
        "test": found.test,
        "n_better": len(found.better),
        "n_worse": len(found.worse),
    }


def evaluation(run: ShownRun, name: str = "") -> dict[str, Any]:
    """One evaluation in figures: by type, by actions, by attempts, and the hardest tasks.

    Args:
        run: a run, or an evaluation.
        name: of the run's evaluations; the last one if empty.

    Raises:
        DataError: a file cannot be read.
    """
    known = names(run.attempts)
    if not known:
        return {"name": "", "problem": "no attempts of an evaluation are stored yet"}
    stage = name if name in known else known[-1]
    attempts = read_attempts(run.attempts.folder, stage=stage or None)
    found = summarize(attempts)
    if is_evaluation(run.folder):
        found |= run.summary
    places = _furthest(run.attempts, stage)
    shown = {
        "name": stage,
        "policy": found.get("policy", ""),
        "suite": found.get("suite", ""),
        **{key: found[key] for key in ("success", "n_tasks", "n_attempts", "n_errors", "parts", "types")},
        "by": found.get("by", {}),
        "figures": _figures(found),
        "passes": [{"k": int(k), **each} for k, each in found["pass"].items()],
        "within": _within(attempts),
        "hardest": [{**asdict(task), "place": places.get(task.task_id)} for task in hardest(attempts, N_HARDEST)],
    }
    plain: dict[str, Any] = finite(shown)
    return plain


def _furthest(attempts: Attempts, stage: str) -> dict[str, dict[str, Any]]:
    """Of each task, where the attempt stands that came furthest and was not solved, or the longest one."""
    found: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    for stored in attempts.steps():
        if stored.phase != "eval" or stage not in ("", stored.stage):
            continue
        for row in attempts.rows(stored):
            key = (row["outcome"] != "solved", row["score"] or 0.0, row["n_turns"], -row["attempt"])
            known = found.get(row["task_id"])
            if not row["is_failure"] and (known is None or key > known[0]):
                place = {"stage": stored.stage, "phase": stored.phase, "step": stored.step, "row": row["row"]}
                found[row["task_id"]] = (key, place)
    return {task: place for task, (_, place) in found.items()}


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


#: Replies that are worth a look, where there are any.
_REPLIES = {"replies cut before they ended": "n_cut_replies", "empty replies": "n_empty_replies"}


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    cut, rewards = sum(found["truncated"].values()), found["rewards"]
    return [
        ("solved", str(found["n_solved"])),
        ("ended unsolved by the environment", str(found["n_failed"])),
        *((f"cut off by the limit: {name.replace('_', ' ')}", str(n)) for name, n in found["truncated"].items() if cut),
        *((name, str(found[key])) for name, key in _REPLIES.items() if found[key]),
        *((f"errors: {name.replace('_', ' ')}", str(n)) for name, n in found["errors"].items() if n),
        ("success, errors left out", _estimate(found["success"], percent_text)),
        ("success, errors as failures", _estimate(found["if_errors_failed"], percent_text)),
        ("mean score", _estimate(found["score"], number_text)),
        *((f"mean of {name}", _estimate(one, number_text)) for name, one in rewards.items() if len(rewards) > 1),
        *((f"pass@{k}", _estimate(each["at"], percent_text)) for k, each in found["pass"].items() if int(k) > 1),
        *((f"pass^{k}", _estimate(each["all"], percent_text)) for k, each in found["pass"].items() if int(k) > 1),
        ("mean turns", number_text(found["turns_mean"])),
        ("invalid actions", percent_text(found["invalid_share"] or 0.0)),
        *((f"{name.replace('_', ' ')} for each solved", number_text(n)) for name, n in _spent(found)),
    ]


def _spent(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in found["per_solved"].items() if value is not None)


def _estimate(found: Mapping[str, Any], write: Any) -> str:
    value, low, high = ("–" if _unknown(found[key]) else write(found[key]) for key in ("value", "low", "high"))
    return "–" if value == "–" else f"{value} ({low} to {high})"


def _within(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Share of the attempts that was solved within n actions, of all and of each part of the suite."""
    counted = [a for a in attempts if not a.is_error]
    parts = list(dict.fromkeys(a.part for a in counted))
    curves = [("all", counted)]
    if 1 < len(parts) <= N_CURVES:
        curves += [(part, [a for a in counted if a.part == part]) for part in parts]
    longest = max((a.n_turns for a in counted), default=0)
    steps = range(1, longest + 1)
    return [
        {"label": name, "share": [sum(a.solved and a.n_turns <= n for a in found) / len(found) for n in steps]}
        for name, found in curves
        if found
    ]


def leaderboard(runs: Sequence[ShownRun]) -> dict[str, Any]:
    """Boards of what has been evaluated; what cannot be ranked is among the `problems`."""
    sides, problems = [], []
    for run in runs:
        if not names(run.attempts):
            continue
        try:
            side = replace(read_side(run.folder), name=run.id)
            ranked([side])
        except (RlhfError, OSError) as error:
            problems.append(str(error))
            continue
        sides.append(side)
    boards = ranked(sides)
    for board in boards:
        board["title"] = title_of(board)
        for row in board["rows"]:
            row["run"] = row.pop("name")
            del row["folder"]
    plain: dict[str, Any] = finite({"boards": boards, "problems": problems})
    return plain


def judges(folder: Path, data: RunData) -> dict[str, Any]:
    """Calibration of a run's reward models, and audits of its judges by step."""
    models, problems = [], []
    for path in sorted((folder / "reward_model").glob("*/held_out.json")):
        try:
            values = json.loads(path.read_text("utf-8"))
            kept = {key: values[key] for key in ("of", "accuracy", "bins")}
            models.append({"title": f"Reward model of {path.parent.name}", **kept})
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(str(DataError("this file is damaged", where=path.name, got=str(error)[:200])))
    audits = [
        {
            "title": title,
            "stage": curve.stage,
            "steps": curve.steps,
            "values": curve.values,
            **{end: _column(data, f"{name}_{end}", curve.stage) for end in ("low", "high")},
        }
        for name, title in _JUDGED.items()
        for curve in data.curves(name)
    ]
    plain: dict[str, Any] = finite({"models": models, "audits": audits, "problems": problems})
    return plain


def _column(data: RunData, name: str, stage: str) -> list[float | None]:
    return next((curve.values for curve in data.curves(name) if curve.stage == stage), [])


def _unknown(value: Any) -> bool:
    return value is None or not math.isfinite(value)
