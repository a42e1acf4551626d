"""`rlhf score`: ask other rewards about the stored attempts of a run or an evaluation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rlhf.commands.contrib.stored import Stored, look
from rlhf.commands.output import AsJson, caution, command, one_of, print_json, results
from rlhf.commands.tables import number
from rlhf.errors import RecipeError, disk, nearest

if TYPE_CHECKING:
    from rlhf.evaluation.contrib.rescore import Judgement


class PhaseName(StrEnum):
    """Names of the phases of a run."""

    train = "train"
    eval = "eval"


@command
def score(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run or evaluation folder (read-only).")],
    reward: Annotated[
        list[str],
        typer.Option(
            metavar="TARGET",
            help="New reward: a kind, package.module:Name, ./file.py:Name, or {kind: ..., KEY: VALUE}.",
        ),
    ],
    against: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Stored value to compare with: score, success, or the recipe's name of a reward."
        ),
    ] = "score",
    threshold: Annotated[float, typer.Option(help="Pass threshold; a verdict flips when it crosses this value.")] = 0.5,
    phase: Annotated[
        str | None, typer.Option(metavar="|".join(PhaseName), help="Only attempts of training or of evaluation.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of flipped attempts shown.")] = 5,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Timeout of each reward call in seconds.")] = 60.0,
    out: Annotated[
        Path | None, typer.Option(help="Write all attempts with their verdicts to this new JSON file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rescore the stored attempts of a run with other rewards and list the verdicts that flipped.

    Examples: rlhf score runs/a --reward ./strict.py:judge; rlhf score runs/a --reward '{kind: numeric, rel_tol: 0.05}'
    """
    only = one_of(PhaseName, phase, "--phase", "phase") if phase is not None else None
    _refuse_out(out, run)
    parts = [(name, target, _built(target)) for name, target in _named(reward)]
    stored = Stored.read(run, phase=only and only.value, step=step)
    _refuse_against(against, stored)
    stored.make_tasks()
    for _, target, part in parts:
        stored.refuse_without_references(part, f"--reward {target}")
    if stored.problem:
        told = f"tasks are known by their ids alone: {stored.problem}"
        caution(told)
    found = {name: _judged(stored, part, against, timeout_s, target) for name, target, part in parts}
    plain = [_plain(name, target, found[name], threshold, run) for name, target, _ in parts]
    result = {"run": str(run), "against": against, "threshold": threshold, "rewards": plain}
    if out is not None:
        _write(out, result, found)
    if as_json:
        print_json(result)
    else:
        for row in plain:
            _show(row, against, limit)


def _named(targets: Sequence[str]) -> list[tuple[str, str]]:
    """Targets with unique names: the last word of each, numbered where it repeats."""
    names: list[tuple[str, str]] = []
    for target in targets:
        kind = _values(target).get("kind", target)
        base = str(kind).rpartition(":")[2] or str(kind)
        n = sum(name == base or name.startswith(f"{base}-") for name, _ in names)
        names.append((f"{base}-{n + 1}" if n else base, target))
    return names


def _values(target: str) -> dict[str, Any]:
    from rlhf.recipe.text import parse

    values = parse(target, "--reward") if target.lstrip().startswith("{") else {"kind": target}
    return values if isinstance(values, dict) else {"kind": target}


def _built(target: str) -> Any:
    from rewards.trl_function import as_reward
    from rlhf.recipe.builder import build_part

    part = build_part("reward", _values(target), "reward", base=Path.cwd())
    return as_reward(part)


def _refuse_out(out: Path | None, run: Path) -> None:
    if out is None:
        return
    inside = run.resolve() in out.resolve().parents
    if inside or out.exists():
        raise RecipeError(
            "stored trajectories are read-only" if inside else "this file exists",
            where=f"--out {out}",
            got="a file within the run" if inside else "an existing file or folder",
            expected="a new file elsewhere",
            hint="give another --out",
        )


def _refuse_against(against: str, stored: Stored) -> None:
    from rlhf.evaluation.contrib.rescore import stored_names

    names = stored_names(stored.records)
    if against not in names:
        raise RecipeError(
            "no stored value of this name",
            where="--against",
            got=against,
            expected=", ".join(names),
            hint=nearest(against, names) or "name one of these",
        )


def _judged(stored: Stored, reward: Any, against: str, timeout_s: float, target: str) -> list[Judgement]:
    from rlhf.errors import RewardError
    from rlhf.evaluation.contrib.rescore import failure_summary, judge_again

    judged = asyncio.run(judge_again(stored.records, reward, stored.task, against, timeout_s=timeout_s))
    message, n_failed = failure_summary(judged)
    if judged and n_failed == len(judged):
        raise RewardError(
            "this reward failed on every attempt",
            where=f"--reward {target}",
            got=message,
            expected="a verdict",
            hint=f"the tasks cannot be recreated: {stored.problem}" if stored.problem else "fix the reward",
        )
    if n_failed:
        told = f"{target} could not judge {n_failed} of {len(judged)} attempts, which are left out: {message}"
        caution(told)
    return judged


def _plain(name: str, target: str, judged: Sequence[Judgement], threshold: float, run: Path) -> dict[str, Any]:
    from rlhf.evaluation.contrib.rescore import failure_summary, figures, flipped

    groups = dict.fromkeys(j.group for j in judged)
    sets = [
        {"stage": stage, "phase": phase, **figures([j for j in judged if j.group == (stage, phase)], threshold)}
        for stage, phase in groups
    ]
    message, _ = failure_summary(judged)
    return {
        "name": name,
        "target": target,
        "all": figures(judged, threshold),
        "sets": sets,
        "failure": message,
        "flipped": [_attempt(j, run) for j in flipped(judged, threshold)],
    }


def _attempt(judged: Judgement, run: Path) -> dict[str, Any]:
    record = judged.record
    return {
        "stage": record.stage,
        "phase": record.phase,
        "step": record.step,
        "task": record.task_id,
        "attempt": record.trajectory.attempt,
        "before": judged.before,
        "after": judged.after,
        "why": judged.why,
        "look": look(run, record),
    }


def _write(out: Path, result: dict[str, Any], found: dict[str, list[Judgement]]) -> None:
    run = Path(result["run"])
    attempts = {name: [_attempt(j, run) for j in judged] for name, judged in found.items()}
    with disk("the scores", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**result, "attempts": attempts}, indent=1) + "\n", "utf-8")


def _show(row: dict[str, Any], against: str, limit: int) -> None:
    console = results()
    console.print(Text.assemble((row["name"], "bold"), f" beside the stored {against}"))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("attempts", overflow="fold")
    for column in ("n", "before", "95% interval", "after", "95% interval", "rank\ncorr.", "flipped"):
        table.add_column(column, justify="right", no_wrap=True)
    sets = [(f"{s['stage']} {s['phase']}", s) for s in row["sets"]]
    for label, found in [*sets, ("all", row["all"])] if len(sets) > 1 else sets:
        table.add_row(label, *_cells(found))
    console.print(table)
    for one in row["flipped"][:limit]:
        console.print(
            f"{number(one['before'])} -> {number(one['after'])}  {one['look']}"
            + (f"  # {one['why']}" if one["why"] else ""),
            soft_wrap=True,
            markup=False,
        )
    if len(row["flipped"]) > limit:
        console.print(f"and {len(row['flipped']) - limit} more, see --json")
    console.print()


def _cells(found: dict[str, Any]) -> list[str]:
    means = [(found[when]["mean"], found[when]["low"], found[when]["high"]) for when in ("before", "after")]
    cells = [text for mean, low, high in means for text in (number(mean), f"{number(low)} to {number(high)}")]
    rank = found["rank_correlation"]
    flips = f"+{found['n_up']} -{found['n_down']}"
    return [str(found["n"]), *cells, "" if rank is None else f"{rank:+.2f}", flips]
