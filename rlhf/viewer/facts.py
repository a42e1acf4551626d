"""Facts of a run for the pages: what was asked and run, where the time went, and what failed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import DataError
from rlhf.evaluation.folder import PLAN, RECIPE, VERSIONS, is_evaluation
from rlhf.evaluation.run_data import RunData
from rlhf.evaluation.wording import number_text
from rlhf.metrics import describe
from rlhf.viewer.library import ShownRun

_TIMES = ("time/rollout_s", "time/train_s", "time/eval_s", "time/publish_s")
#: Messages of failed attempts that are sent, and seconds in which they are looked for.
_MOST, _BUDGET_S = 12, 2.0
#: Characters of a recipe that are sent.
_LONGEST = 100_000


def facts(run: ShownRun, data: RunData) -> dict[str, Any]:
    """Facts of a run or evaluation besides its curves and attempts."""
    return {
        "recipe": _text(run.folder / (PLAN if is_evaluation(run.folder) else RECIPE)),
        "versions": flat(_mapping(run.folder / VERSIONS)),
        "data": flat(run.summary.get("data") or {}),
        "times": _times(data),
        "result": flat(data.facts),
        "metrics": _metrics(data),
        **_failures(run),
    }


def _failures(run: ShownRun) -> dict[str, Any]:
    """Attempts that ended with an infrastructure error, by message; from the newest file as far as the budget goes."""
    counted: Counter[tuple[str, str]] = Counter()
    until, files = time.monotonic() + _BUDGET_S, run.attempts.steps()[::-1]
    looked = 0
    for stored in files:
        if looked and time.monotonic() > until:
            break
        looked += 1
        try:
            rows = run.attempts.rows(stored)
        except DataError:
            continue  # the page of its step says what is wrong with it
        counted.update((row["outcome"], row["detail"]) for row in rows if row["is_failure"])
    found = [{"n": n, "outcome": outcome, "message": text} for (outcome, text), n in counted.most_common(_MOST)]
    return {"failures": found, "n_files": len(files), "n_looked": looked}


def _times(data: RunData) -> list[tuple[str, str]]:
    rows = [(describe(name).meaning, f"{sum(values):.1f} s") for name in _TIMES if (values := data.values(name))]
    if peak := data.values("memory/rss_gb"):
        rows.append(("resident memory, most at any step", f"{max(peak):.2f} GB"))
    return rows


def _metrics(data: RunData) -> list[tuple[str, str, str]]:
    """First and last value of every metric."""
    found: dict[str, list[float]] = {}
    for line in data.lines:
        for name, value in line.values.items():
            if value is not None:
                found.setdefault(name, [value, value])[1] = value
    return [(name, number_text(first), number_text(last)) for name, (first, last) in sorted(found.items())]


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Write nested values as rows of (dotted name, text)."""
    rows = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")[:_LONGEST]
    except (OSError, UnicodeDecodeError):
        return ""


def _mapping(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
