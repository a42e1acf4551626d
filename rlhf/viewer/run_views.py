"""Data of a run for the pages: header and curves."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rlhf.errors import DataError
from rlhf.evaluation.run_data import RunData
from rlhf.metrics import describe
from rlhf.sinks import LogLine
from rlhf.viewer.run_folder import RunFolder

#: Lines that a page is sent unthinned. Of more, some steps with all their lines, the last lines, and those with a
#: metric that at most `_RARE` lines have.
MAX_LINES, _LAST, _RARE = 4000, 200, 200
#: What multiples of are spread evenly between whole numbers, and in step with no period of a log.
_GOLDEN = (math.sqrt(5) - 1) / 2
#: Steps whose time says how long the rest will take.
_RECENT = 10
#: Losses of the kinds of stages.
LOSSES = ("loss/total", "supervised/loss", "preference/loss", "reward_model/loss")
_SUCCESS = "rollout/success"


def head(run: RunFolder, data: RunData) -> dict[str, Any]:
    """Return the header of a run."""
    last = data.lines[-1] if data.lines else None
    state, total = run.state(), _steps_of(data, last)
    steps = [line for line in data.lines if last and line.stage == last.stage and "time/step_s" in line.values]
    trained = next((line for line in reversed(data.lines) if line.values.get(_SUCCESS) is not None), None)
    evaluations = [line for line in data.lines if line.values.get("eval/success") is not None]
    pace = _pace(data.lines, last)
    left = max(total - last.step, 0) if total and last else None
    return {
        "id": run.id,
        "name": data.name,
        "folder": str(run.folder),
        "state": state,
        "stage": last.stage if last else "",
        "step": last.step if last else 0,
        "n_steps": total,
        "is_last_stage": _is_last_stage(data, last),
        "n_lines": len(data.lines),
        "updated": last.time if last else None,
        "now": time.time(),
        "pace_s": pace,
        "left_s": pace * left if state == "running" and pace and left is not None else None,
        "waits_for": _waits_for(data, last, left) if state == "running" else "",
        "tokens_per_s": steps[-1].values.get("rollout/tokens_per_s") if steps else None,
        "trained_per_s": last.values.get("train/tokens_per_s") if last else None,
        "loss": next((last.values[name] for name in LOSSES if name in last.values), None) if last else None,
        "success": _success(trained),
        "evaluations": [
            {"name": name, **{k: point.get(k) for k in ("success", "low", "high", "n", "n_errors")}}
            for name, point in _points(data, evaluations).items()
        ],
        "environment": data.setting("environment.kind"),
        "policy": data.setting("policy.path") or data.setting("policy.kind"),
        "seed": data.setting("seed"),
        "problems": [{"file": name, "says": says} for name, says in run.problems.items()],
    }


def _success(line: LogLine | None) -> dict[str, Any] | None:
    if line is None:
        return None
    low, high = (line.values.get(f"{_SUCCESS}_{end}") for end in ("low", "high"))  # which older logs lack
    return {"value": line.values[_SUCCESS], "low": low, "high": high, "step": line.step}


def _points(data: RunData, lines: Sequence[LogLine]) -> dict[str, dict[str, Any]]:
    """Evaluations by name: those of the result, and before there is one those of the log."""
    if data.results:
        return data.results
    names = ("success", "low", "high", "n", "n_errors")
    keys = ("eval/success", "eval/success_low", "eval/success_high", "eval/n_episodes", "eval/n_errors")
    of_stage = {line.stage: f"{line.stage}, " for line in lines}
    if len(of_stage) == 1:
        of_stage = dict.fromkeys(of_stage, "")
    return {
        "before" if line.step == 0 else f"{of_stage[line.stage]}step {line.step}": {
            name: line.values.get(key) for name, key in zip(names, keys, strict=True)
        }
        for line in lines
    }


def _steps_of(data: RunData, last: LogLine | None) -> int | None:
    """Return the number of steps of the current stage, from its recipe or its number of demonstrations."""
    number, stages = (last.stage if last else "").partition("-")[0], data.settings.get("stages")
    if last is None or not number.isdecimal() or not isinstance(stages, list) or int(number) >= len(stages):
        return None
    stage = stages[int(number)] if isinstance(stages[int(number)], dict) else {}
    learnt = (
        None
        if (stage.get("rejection_sampling") or stage.get("attempts"))
        else last.values.get("supervised/n_demonstrations")
    )
    epochs, size, steps = (_count(stage.get(name)) for name in ("epochs", "batch_size", "steps"))
    return int(epochs * -(-learnt // size)) if steps is None and learnt and epochs and size else steps


def _is_last_stage(data: RunData, last: LogLine | None) -> bool:
    number, stages = (last.stage if last else "").partition("-")[0], data.settings.get("stages")
    return not number.isdecimal() or not isinstance(stages, list) or int(number) + 1 >= len(stages)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _pace(lines: Sequence[LogLine], last: LogLine | None) -> float | None:
    """Seconds that a step took lately, with its share of evaluations; a pause of the run counts as a usual step."""
    recent = [line for line in lines[-3 * _RECENT :] if last and line.stage == last.stage]
    steps = [b.time - a.time for a, b in pairwise(recent) if b.step > a.step]
    others = [
        min(b.time - a.time, b.values.get("time/eval_s") or b.time - a.time)
        for a, b in pairwise(recent)
        if b.step <= a.step
    ]
    return (statistics.median(steps) + sum(others) / len(steps) or None) if steps else None


def _waits_for(data: RunData, last: LogLine | None, left: int | None) -> str:
    if last is None:
        return "the first step: models, tasks and demonstrations are being prepared, the policy is evaluated"
    if left == 0:
        return "the next stage, or the last evaluation and the report"
    names = {"time/rollout_s": "rollouts", "time/train_s": "the update", "time/eval_s": "evaluations"}
    recent = {
        words: [line.values[n] or 0.0 for line in data.lines[-_RECENT:] if n in line.values]
        for n, words in names.items()
    }
    longest = max(recent, key=lambda words: statistics.fmean(recent[words]) if recent[words] else 0.0)
    return f"step {last.step + 1}" + (f", mostly {longest}" if recent[longest] else "")


def curves(data: RunData, names: Sequence[str], since: int = 0) -> dict[str, Any]:
    """Values of some metrics, or of all, by line of the log; thinned where there are very many.

    Args:
        data: of the run.
        names: of metrics; empty for all.
        since: how many lines are known already.
    """
    lines = data.lines[since:]
    every = -(-len(lines) // MAX_LINES) or 1
    lines = lines if every == 1 else _thinned(lines, every)
    there = {name for line in lines for name in line.values}
    wanted = [name for name in names if name in there] if names else sorted(there)
    stages = list(dict.fromkeys(line.stage for line in lines))
    values = {name: [_short(line.values.get(name)) for line in lines] for name in wanted}
    return {
        "n_lines": len(data.lines),
        "thinned": every,
        "stages": stages,
        "stage": [stages.index(line.stage) for line in lines],
        "step": [line.step for line in lines],
        "time": [line.time for line in lines],
        "values": values,
    }


def _thinned(lines: Sequence[LogLine], every: int) -> list[LogLine]:
    """About one step in `every` with all its lines, and whatever is rare or last."""
    n_of = Counter(name for line in lines for name in line.values)
    rare = {name for name, n in n_of.items() if n <= _RARE}
    steps = dict.fromkeys((line.stage, line.step) for line in lines)
    kept = {step for i, step in enumerate(steps) if i * _GOLDEN % 1 < 1 / every}
    return [line for line in lines[:-_LAST] if (line.stage, line.step) in kept or not rare.isdisjoint(line.values)] + [
        *lines[-_LAST:]
    ]


def meanings(data: RunData) -> dict[str, dict[str, str]]:
    """Unit and meaning of every metric that a run logged, or another version knew."""
    found = {}
    for name in sorted({name for line in data.lines for name in line.values}):
        try:
            metric = describe(name)
            found[name] = {"unit": metric.unit, "meaning": metric.meaning}
        except DataError:
            found[name] = {"unit": "", "meaning": "of another version of the toolkit"}
    return found


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
