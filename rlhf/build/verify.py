"""Reproduction of an evaluation: runs it again and reports the differences."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlhf.build.evaluate import evaluate, flat
from rlhf.data import Trajectory
from rlhf.digests import read_listed
from rlhf.evaluation.folder import PLAN, SUMMARY, TRAJECTORIES, VERSIONS, refuse_unfinished
from rlhf.evaluation.store import read_failures, read_trajectories
from rlhf.recipe.evaluation_request import EvaluationRequest
from rlhf.recipe.suites import renewed
from rlhf.recipe.text import from_text, parse
from rlhf.terminal import CleanConsole

_Key = tuple[str, str, int]
#: Facts that evaluations of earlier versions have not on record.
_KEPT_LATER = ("policy.", "versions.code", "versions.weights", "versions.solved_by")


def verify(folder: Path, *, console: CleanConsole | None = None) -> dict[str, Any]:
    """Evaluate again what `folder` holds, as it was asked for.

    Returns:
        plain values: `same`, whether every attempt and figure came again; `changed`, what else did not (versions, keys
        of the suite, hashes of tasks); `n_attempts`, `n_changed` and the `first` that went another way; `figures` that
        differ, as (before, now). Durations are left out.

    Raises:
        RecipeError: the folder holds no finished evaluation.
        RlhfError: it cannot be made again.
    """
    refuse_unfinished(folder, f"--verify {folder}")
    plan = folder / PLAN
    known = {f.name for f in fields(EvaluationRequest)}
    asked = {key: value for key, value in from_text(read_listed(plan), str(plan))["asked"].items() if key in known}
    asked["overrides"] = tuple(asked.get("overrides", ()))
    with tempfile.TemporaryDirectory(prefix="rlhf-verify-") as name:
        again = Path(name) / "again"
        evaluate(EvaluationRequest(**asked), out=again, console=console)
        return compared(folder, again)


def compared(before: Path, now: Path) -> dict[str, Any]:
    """Differences between two evaluations of one policy on one suite."""
    # Prices and columns were given for one of them alone, and make no figures of the policy that others do not.
    kept, again = (flat({**_json(folder / SUMMARY), "by": None}) for folder in (before, now))
    known = {key: value for key, value in again.items() if key in kept}  # an earlier version measured fewer figures
    figures = _changed(kept, known, but=("per_solved.cost",))
    attempts = [_attempts(f / TRAJECTORIES) for f in (before, now)]
    other = sorted(
        key for key in attempts[0].keys() | attempts[1].keys() if attempts[0].get(key) != attempts[1].get(key)
    )
    return {
        "same": not other and not figures,
        "n_attempts": len(attempts[0]),
        "n_changed": len(other),
        "first": _words(other[0]) if other else None,
        "changed": _changed(*_comparable(_facts(before), _facts(now))),
        "figures": figures,
    }


def _comparable(kept: dict[str, Any], again: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts of two evaluations, less what an earlier version kept none of."""
    unknown = tuple(new for new in _KEPT_LATER if not any(key.startswith(new) for key in kept))
    return kept, {key: value for key, value in again.items() if not key.startswith(unknown)}


def _facts(folder: Path) -> dict[str, Any]:
    """Identity of an evaluation: policy, tasks and versions."""
    plan = parse(read_listed(folder / PLAN), str(folder / PLAN))
    plan |= renewed({key: plan[key] for key in ("suite", "policy") if key in plan}, folder)
    return flat({"versions": _json(folder / VERSIONS), **plan})


def _attempts(folder: Path) -> dict[_Key, Any]:
    """Everything that an attempt did, without its time."""
    found: dict[_Key, Any] = {}
    for record in read_trajectories(folder, phase="eval"):
        t = record.trajectory
        total = record.score.total if record.score else None
        found[record.stage, record.task_id, t.attempt] = (t.opening, t.outcome, total, _turns(t))
    for failed in read_failures(folder, phase="eval"):
        found[failed.stage, failed.task_id, failed.failure.attempt] = failed.failure.outcome
    return found


def _turns(trajectory: Trajectory) -> tuple[Any, ...]:
    # Of a model the sampled ids and log-probs; a server's replies are numbered as they come in.
    return tuple(
        (turn.action.text, turn.action.error, turn.reply, turn.reward, turn.valid, *_sampled(turn.generations))
        for turn in trajectory.turns
    )


def _sampled(generations: Any) -> tuple[Any, ...]:
    return tuple((g.token_ids, g.logprobs) for g in generations if g.prompt.stop_ids)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], but: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    names = sorted((before.keys() | now.keys()) - set(but))
    return {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}


def _json(path: Path) -> Any:
    return json.loads(read_listed(path))


def _words(key: _Key) -> str:
    part, task, attempt = key
    return f"{task}, attempt {attempt} (part {part})"
