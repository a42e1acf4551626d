"""`rlhf.compare`: evaluations or runs side by side, from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.api.evaluate import Evaluation
from rlhf.api.frames import Frame, frame_of
from rlhf.api.train import TrainResult
from rlhf.commands.compare import Metric
from rlhf.commands.output import one_of
from rlhf.errors import RecipeError
from rlhf.recipe.describe import given


@dataclass(frozen=True)
class Comparison:
    """Comparison of an evaluation with the first, paired task by task.

    Attributes:
        first, second: their names.
        difference: second minus first.
        interval: its 95% interval.
        p_value: of a paired test.
        p_holm: the same, corrected for the number of comparisons.
        n_tasks: tasks that both attempted.
        n_better, n_worse: those that flipped.
        cautions: warnings about the comparison.
        record: everything, as `rlhf compare --json` prints it.
    """

    first: str
    second: str
    difference: float
    interval: tuple[float, float]
    p_value: float
    p_holm: float
    n_tasks: int
    n_better: int
    n_worse: int
    cautions: tuple[str, ...]
    record: Mapping[str, Any] = field(repr=False)

    @property
    def flipped(self) -> Frame:
        """The flipped tasks, with the result of each side."""
        return frame_of([{key: one[key] for key in ("task", "first", "second")} for one in self.record["flipped"]])


@dataclass(frozen=True)
class Comparisons:
    """The first evaluation against each of the others.

    Attributes:
        metric: that was compared, `success` or `score`.
        rows: a comparison for each of the others, in their order.
    """

    metric: str
    rows: tuple[Comparison, ...]

    @property
    def metrics(self) -> Frame:
        """A row for each comparison."""
        return frame_of([{key: getattr(row, key) for key in _COLUMNS} for row in self.rows])


_COLUMNS = ("first", "second", "difference", "interval", "p_value", "p_holm", "n_tasks", "n_better", "n_worse")


def compare(
    *sides: str | Path | TrainResult | Evaluation, metric: str = "success", difference: float = 0.05
) -> Comparisons:
    """Compare the first evaluation or run with each of the others, or a run's first with its last, paired by task.

    Args:
        sides: at least two, or one run: folders, results of `rlhf.train`, or of `rlhf.evaluate` with `out`.
        metric: `success` or `score`.
        difference: for which the record has the number of tasks needed to detect it.

    Raises:
        DataError: no task in common, or tasks that are the same by name alone.
        RecipeError: one of them holds no evaluation, or there are fewer than two.
    """
    from rlhf.evaluation.compare import compare_all, read_compared

    compared = one_of(Metric, str(metric), "metric", "metric")
    found = compare_all(read_compared([_folder(side) for side in sides]), compared.value, seen=difference)
    return Comparisons(metric, tuple(_comparison(row) for row in found["comparisons"]))


def _folder(side: str | Path | TrainResult | Evaluation) -> Path:
    if isinstance(side, TrainResult):
        return side.run
    if isinstance(side, Evaluation):
        if side.out is None:
            raise RecipeError(
                "this evaluation was not saved",
                where="rlhf.compare",
                got=f"an evaluation of {side.policy} without a folder",
                expected="one that stored its attempts",
                hint="rlhf.evaluate(..., out=FOLDER)",
            )
        return side.out
    if not isinstance(side, str | os.PathLike):
        raise RecipeError(
            "not an evaluation",
            where="rlhf.compare",
            got=given(side),
            expected="the folder of a run or an evaluation, or a result of rlhf.train or rlhf.evaluate",
            hint="rlhf.compare('evaluations/before', 'evaluations/after')",
        )
    return Path(os.path.expanduser(side))


def _comparison(row: Mapping[str, Any]) -> Comparison:
    own = {key: row[key] for key in _COLUMNS if key != "interval"}
    return Comparison(**own, interval=tuple(row["interval"]), cautions=tuple(row["cautions"]), record=row)
