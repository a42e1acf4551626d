"""Reliability chart of a run's reward models on held-out tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import DataError
from rlhf.evaluation.figures import Band, Series, line_chart
from rlhf.evaluation.wording import percent_text

_OF = {"pairs": "held-out pairs", "outcome": "held-out attempts", "steps": "steps of held-out attempts"}


def reliability_charts(run_folder: Path) -> Iterator[str]:
    """Give the chart of each reward model of a run, in the order of its stages.

    Raises:
        DataError: a file is damaged.
    """
    for path in sorted((run_folder / "reward_model").glob("*/held_out.json")):
        try:
            values = json.loads(path.read_text("utf-8"))
            chart = reliability_chart(values, f"Reward model of {path.parent.name}")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError("this file is damaged", where=str(path), got=str(error)[:200]) from error
        yield chart


def reliability_chart(values: Mapping[str, Any], title: str, *, width: int = 400, standalone: bool = False) -> str:
    """Reliability diagram: observed frequency with 95% intervals over predicted probability.

    Args:
        values: `held_out.json` of a reward model.
        title: heading.
        width: in pixels.
        standalone: carry styles along, for a file of its own.
    """
    bins = values["bins"]
    said = [float(b["said"]) for b in bins]
    ends = [0.5 if values["of"] == "pairs" else 0.0, 1.0]
    label = f"{_OF[values['of']]}, {percent_text(float(values['accuracy']))} right"
    return line_chart(
        [Series("as sure as right", ends, ends), Series(label, said, [float(b["share"]) for b in bins], "points")],
        title,
        "probability that the model gives",
        "share that is so",
        [Band(label, said, [float(b["low"]) for b in bins], [float(b["high"]) for b in bins])],
        percent=True,
        y_range=(0.0, 1.0),
        width=width,
        height=260,
        standalone=standalone,
    )
