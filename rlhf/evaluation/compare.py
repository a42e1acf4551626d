"""Evaluations side by side: read from their folders, paired task by task."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rlhf.errors import DataError, RecipeError
from rlhf.evaluation.attempts import Attempt, evaluations_in, openings, read_attempts, scores_by_task, solved_by_task
from rlhf.evaluation.folder import SUMMARY, is_evaluation, kept_in, nearest_beside
from rlhf.evaluation.judging import changing_parts, differences, settings_of
from rlhf.evaluation.paired import Paired, compare, holm, n_tasks_needed
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.store import list_steps
from rlhf.given_parts import how_to_resume

Metric = Literal["success", "score"]
#: Differing settings that a caution names.
_MOST_NAMED = 4


@dataclass(frozen=True)
class Side:
    """Side of a comparison: an evaluation.

    Attributes:
        name: of its folder.
        folder: of an evaluation, or of a run.
        attempts: of it; of a run, those of its last evaluation.
        stage: of a run, the name of that evaluation; empty for an evaluation of its own.
        step: of a run, the step of its stage that this evaluation was made after.
        is_finished: whether nothing is left to train and to measure.
    """

    name: str
    folder: Path
    attempts: list[Attempt]
    stage: str = ""
    step: int = 0
    is_finished: bool = True

    @property
    def measured(self) -> dict[str, Any]:
        """Time of measurement within a run, and whether the run has ended; else phase `evaluation`."""
        phase, step = (self.stage, self.step) if self.stage else ("evaluation", None)
        return {"phase": phase, "step": step, "is_finished": self.is_finished}

    @property
    def said(self) -> dict[str, set[str]]:
        """Openings of the tasks, by hash, without those of environments that are not deterministic."""
        changing = changing_parts(self.folder, {a.part for a in self.attempts}, is_run=bool(self.stage))
        return openings(a for a in self.attempts if a.part not in changing)

    def values(self, metric: Metric) -> Mapping[str, Sequence[float]]:
        """Task -> value of each attempt that counts."""
        return solved_by_task(self.attempts) if metric == "success" else scores_by_task(self.attempts)

    def look(self, task: str) -> str:
        """The command that shows the attempts at a task."""
        return shlex.join(["rlhf", "trajectories", str(self.folder), "--task", task])


def read_sides(folders: Sequence[Path]) -> list[Side]:
    """Read several, named by their folders, or by the whole paths where two folders have one name.

    Raises:
        DataError: a file is damaged.
        RecipeError: one of the folders holds no evaluation.
    """
    return named_apart([read_side(folder) for folder in folders])


def named_apart(sides: Sequence[Side]) -> list[Side]:
    """The sides, where two have one name named by their times in one run, or else by the whole paths."""
    if len({side.name for side in sides}) == len(sides):
        return list(sides)
    is_one_run = len({side.folder for side in sides}) == 1 and len({side.stage for side in sides}) == len(sides)
    return [replace(side, name=when(side.stage) if is_one_run else str(side.folder)) for side in sides]


def read_compared(folders: Sequence[Path]) -> list[Side]:
    """Read two or more, or the first evaluation and the last of one run.

    Raises:
        DataError: a file is damaged.
        RecipeError: one of the folders holds no evaluation, or there are fewer than two.
    """
    sides = read_sides(folders)
    if len(sides) == 1 and sides[0].stage:
        first = read_side(folders[0], 0)
        if first.stage != sides[0].stage:
            return named_apart([first, *sides])
    if len(sides) < 2:
        raise RecipeError(
            "a comparison needs two evaluations",
            where="rlhf compare",
            got=", ".join(map(str, folders)) or "nothing",
            expected="at least two, or one run that was evaluated before and after training",
            hint="name the evaluation to compare with first",
        )
    return sides


def read_side(folder: Path, number: int = -1) -> Side:
    """Read the evaluation in a folder, or the one of this number, in order of time, of a run.

    Raises:
        DataError: a file is damaged.
        RecipeError: there is no evaluation.
    """
    stored = folder / "trajectories"
    stages = evaluations_in(stored)
    if not stages:
        raise _no_evaluation(folder)
    return side_of(folder, "" if is_evaluation(folder) else stages[number])


def side_of(folder: Path, stage: str) -> Side:
    """Read an evaluation, or that of a run with this name. Raises DataError where a file is damaged."""
    stored, name = folder / "trajectories", folder.name or str(folder)
    if not stage:
        return Side(name, folder, read_attempts(stored), is_finished=(folder / SUMMARY).is_file())
    step = max((s.step for s in list_steps(stored) if (s.phase, s.stage) == ("eval", stage)), default=0)
    is_finished = stage == "after" or (folder / "result.json").is_file()
    return Side(name, folder, read_attempts(stored, stage=stage), stage, step, is_finished)


def when(stage: str) -> str:
    """Label of the time of a run's evaluation: `after training`; that before it comes after SFT where a run has it."""
    return {"before": "before RL", "after": "after training"}.get(stage, f"during {stage}")


def caution_of(side: Side) -> str:
    """Caution where figures are not from the end of a run, and the remedy; '' where they are.

    Raises:
        DataError: a file of the run is damaged.
    """
    if side.is_finished or not side.stage:
        return unfinished(side.folder)
    stands = _standing(side.folder)
    return (
        f"{side.name} was measured {when(side.stage)}, and its run is not finished{stands and f', it is {stands}'}; "
        f"resume it: {how_to_resume(side.folder)}"
    )


def unfinished(folder: Path) -> str:
    """Hint on how to resume an unfinished evaluation; '' for anything else."""
    if not is_evaluation(folder) or (folder / SUMMARY).is_file():
        return ""
    return f"{folder} is not finished; run its command again to resume it"


def _standing(run: Path) -> str:
    """Progress of a run by its metrics: `at step 33 of 500 of 0-policy_gradient`; '' if unknown."""
    if not (run / "metrics.jsonl").is_file():
        return ""
    data = RunData.read(run)
    if not data.lines:
        return ""
    last, stages = data.lines[-1], data.settings.get("stages")
    number = last.stage.partition("-")[0]
    stages = stages if isinstance(stages, list) else []
    stage = stages[int(number)] if number.isdecimal() and int(number) < len(stages) else None
    n_steps = stage.get("steps") if isinstance(stage, dict) else None
    return f"at step {last.step}{f' of {n_steps}' if isinstance(n_steps, int) else ''} of {last.stage}"


def _cautions(first: Side, second: Side, n_unpaired: int) -> list[str]:
    """Cautions on a comparison: unpaired tasks, figures from before the end, and success that is judged otherwise."""
    one_run = first.folder == second.folder
    sides = [replace(second, name=str(second.folder))] if one_run else [first, second]
    found = [caution for side in sides if (caution := caution_of(side))]
    stages = [side.stage for side in (first, second)]
    if all(stages) and len(set(stages)) > 1 and not one_run:
        times = " and ".join(f"{side.name} {when(side.stage)}" for side in (first, second))
        found.append(f"not measured at the same time of a run: {times}")
    found += [*_judged_otherwise(first, second), *_holding_others(first, second)]
    if n_unpaired:
        found.append(f"{n_unpaired} tasks are left out: only one side has an attempt without an error at them")
    return found


def _judged_otherwise(first: Side, second: Side) -> list[str]:
    """Caution where another verifier, environment, limit or temperature decided what the second solved."""
    mine, theirs = (settings_of(side.folder, is_run=bool(side.stage)) for side in (first, second))
    other = [
        f"{key.removeprefix('parts.').removeprefix('tasks.')} {one} and {two}"
        for key, (one, two) in differences(mine, theirs).items()
        if key != "seed"
    ]
    if not other:
        return []
    told = "; ".join(other[:_MOST_NAMED]) + f"; and {len(other) - _MOST_NAMED} more" * (len(other) > _MOST_NAMED)
    return [f"{first.name} and {second.name} were not judged alike: {told}"]


def _holding_others(first: Side, second: Side) -> list[str]:
    """Caution where evaluations attempted tasks of the same ids, and recorded that these hold something else."""
    if first.stage or second.stage:  # runs record no digest of the tasks that they are evaluated on
        return []
    mine, theirs = (settings_of(side.folder, is_run=False, with_score=True)["parts"] for side in (first, second))
    found = []
    for name in (name for name in mine if name in theirs):
        held = [part[name].get("tasks") for part in (mine, theirs)]
        ids = [list(dict.fromkeys(a.task_id for a in side.attempts if a.part == name)) for side in (first, second)]
        if None not in held and held[0] != held[1] and ids[0] == ids[1]:
            found.append(f"the tasks of {name} in {first.name} and {second.name} have equal ids and other contents")
    return found


def evaluations_below(folder: Path) -> list[Path]:
    """The evaluations and evaluated runs directly below a folder that is none itself, by name."""
    if evaluations_in(folder / "trajectories"):
        return []
    return [path for path in kept_in(folder) if evaluations_in(path / "trajectories")]


def _no_evaluation(folder: Path) -> RecipeError:
    below = [str(path) for path in evaluations_below(folder)]
    got, hint = "no attempts of an evaluation in trajectories/", "rlhf evaluate POLICY --suite SUITE --out FOLDER"
    if not folder.is_dir():
        got, hint = "no such folder", nearest_beside(folder) or hint
    elif below:
        got = f"no trajectories/, and {len(below)} evaluations in folders below it"
        hint = f"name them: {' '.join(below[:4])}{' ...' if len(below) > 4 else ''}"
    return RecipeError(
        "there is no evaluation in this folder",
        where=str(folder),
        got=got,
        expected="a folder that `rlhf evaluate --out` made, or a run that was evaluated",
        hint=hint,
    )


def compare_all(sides: Sequence[Side], metric: Metric = "success", *, seen: float = 0.05) -> dict[str, Any]:
    """Compare the first with each of the others, on the tasks that both attempted.

    Args:
        sides: at least two.
        metric: what is compared.
        seen: a difference for which the number of tasks that would show it is given.

    Raises:
        DataError: no task in common, or tasks that are the same by name alone.
    """
    first, others = sides[0], sides[1:]
    told = [check_alike(first, other) for other in others]
    found = [compare(first.values(metric), other.values(metric)) for other in others]
    adjusted = holm([pair.p_value for pair in found])
    rows = [_row(first, other, pair, p, metric, seen) for other, pair, p in zip(others, found, adjusted, strict=True)]
    for row, cautions in zip(rows, told, strict=True):
        row["cautions"] += cautions
    return {"metric": metric, "first": first.name, "comparisons": rows}


def _row(first: Side, second: Side, pair: Paired, p_holm: float, metric: Metric, seen: float) -> dict[str, Any]:
    values = [side.values(metric) for side in (first, second)]
    difference = pair.difference
    both = [task for task in values[0] if task in values[1]]
    return {
        "first": first.name,
        "second": second.name,
        "means": [fmean(fmean(side[task]) for task in both) for side in values],
        "difference": difference.value,
        "interval": [difference.low, difference.high],
        "p_value": pair.p_value,
        "p_holm": p_holm,
        "test": pair.test,
        "n_tasks": difference.n,
        "n_better": len(pair.better),
        "n_worse": len(pair.worse),
        "n_unpaired": pair.n_unpaired,
        "measured": [first.measured, second.measured],
        "cautions": _cautions(first, second, pair.n_unpaired),
        "n_errors": [sum(a.is_error for a in side.attempts) for side in (first, second)],
        "n_attempts": [sum(len(found) for found in side.values()) for side in values],
        "needed": {
            f"{d:g}": _needed(pair.deviation, d) for d in dict.fromkeys((seen, abs(round(difference.value, 6))))
        },
        "flipped": [
            {
                "task": task,
                "first": sum(values[0][task]) / len(values[0][task]),
                "second": sum(values[1][task]) / len(values[1][task]),
                "look": [first.look(task), second.look(task)],
            }
            for task in (*pair.better, *pair.worse)
        ],
    }


def _needed(deviation: float, difference: float) -> int | None:
    """Tasks that would show a difference; None where nothing is known of how tasks differ."""
    return n_tasks_needed(deviation, difference) if difference and math.isfinite(deviation) and deviation else None


def check_alike(first: Side, second: Side) -> list[str]:
    """Check that the environments of two evaluations began each task of the same id alike.

    Returns:
        A caution where environments that are not deterministic began some otherwise: whether the tasks are the same is
        not known then.

    Raises:
        DataError: a deterministic one did.
    """
    mine, theirs = openings(first.attempts), openings(second.attempts)
    other = {task for task in mine.keys() & theirs.keys() if mine[task] != theirs[task]}
    if fixed := other & first.said.keys() & second.said.keys():
        raise DataError(
            "tasks with equal ids differ in content",
            where=f"{first.name} and {second.name}",
            got=f"{len(fixed)} tasks with other openings, such as {min(fixed)}",
            expected="evaluations on one version and setting of the environment",
            hint="compare evaluation.yaml and versions.json of the two, and evaluate one of them again",
        )
    if not other:
        return []
    return [
        f"{len(other)} tasks of {first.name} and {second.name} began otherwise, such as {min(other)}: the environment "
        "does not declare deterministic=True, so they are taken for the same"
    ]
