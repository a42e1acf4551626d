"""`rlhf recipes`, `trajectories`, `report` and `version`: look at what is there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rlhf.commands.output import AsJson, command, print_json, results
from rlhf.errors import RecipeError, nearest
from rlhf.evaluation.folder import nearest_beside


@command
def recipes(
    kinds: Annotated[bool, typer.Option("--kinds", help="List the kinds that a recipe may name instead.")] = False,
    suites: Annotated[bool, typer.Option("--suites", help="List the suites of `rlhf evaluate` instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes that `rlhf train` knows by name."""
    rows = _kinds() if kinds else _suites() if suites else _recipes()
    if as_json:
        print_json({"kinds" if kinds else "suites" if suites else "recipes": rows})
        return
    table = Table(box=None, pad_edge=False)
    columns = ("section", "kind", "what") if kinds else ("name", "what")
    for column in columns:
        table.add_column(column, no_wrap=column != "what")  # a name is there to be copied
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    results().print(table)


def _recipes() -> list[dict[str, str]]:
    from rlhf.recipe.files import list_recipes

    return [{"name": r.name, "what": r.doc, "path": str(r.path)} for r in list_recipes()]


def _suites() -> list[dict[str, str]]:
    from rlhf.recipe.suites import list_suites

    return [{"name": s.name, "what": s.doc, "path": str(s.path)} for s in list_suites()]


def _kinds() -> list[dict[str, str]]:
    from rlhf.catalog import CATALOG

    return [
        {"section": section, "kind": kind, "what": entry.doc + (f" (extra {entry.extra})" if entry.extra else "")}
        for section, table in CATALOG.items()
        for kind, entry in table.items()
    ]


@command
def trajectories(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.")] = None,
    task: Annotated[str | None, typer.Option(metavar="ID", help="Only this task.")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Only this attempt at each task.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only this outcome: solved, failed, turn_limit, ...")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 5,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the sampled tokens with log-prob and advantage.")
    ] = False,
    candidates: Annotated[
        bool, typer.Option("--candidates", help="Of an evaluation: those that its strategy chose from.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read the stored trajectories of a run in the terminal.

    Example: rlhf trajectories runs/quickstart-seed0 --outcome failed --limit 2 --tokens
    """
    folder = _candidates_of(run) if candidates else _trajectories_of(run)
    wanted = None if outcome is None else _outcome(outcome)
    if task is not None:
        _refuse_unknown_task(folder, task)
    if wanted is not None and wanted.is_failure_of_a_part:
        _show_failures(folder, wanted, (step, task, attempt), limit, as_json=as_json)
        return
    from rlhf.evaluation.store import read_trajectories

    records = read_trajectories(
        folder,
        steps=None if step is None else [step],
        task_id=task,
        attempt=attempt,
        outcomes=None if wanted is None else [wanted],
        limit=limit,
    )
    if as_json:
        print_json({"trajectories": [_plain(record, tokens) for record in records]})
        return
    _print_trajectories(run, list(records), tokens)


def _print_trajectories(run: Path, records: list[Any], tokens: bool) -> None:
    from rlhf.evaluation.transcript import load_tokenizer, pieces
    from rlhf.viewer.terminal import show_trajectory, trajectory_table

    console = results()
    console.print(trajectory_table(records) if records else "no trajectory is like this")
    tokenizer = load_tokenizer(run) if tokens else None
    for record in records:
        show_trajectory(record, console, tokens=tokens, pieces=lambda ids: pieces(tokenizer, ids))


def _show_failures(
    folder: Path, outcome: Any, asked: tuple[int | None, str | None, int | None], limit: int, *, as_json: bool
) -> None:
    """Show attempts that ended by the failure of a part: they have a message in place of turns."""
    from rlhf.evaluation.store import read_failures
    from rlhf.viewer.terminal import failure_table

    records = [
        record
        for record in read_failures(folder)
        if record.failure.outcome is outcome
        and all(
            value in (None, stored)
            for value, stored in zip(asked, (record.step, record.task_id, record.failure.attempt), strict=True)
        )
    ][:limit]
    if as_json:
        plain = [{"step": r.step, "task": r.task_id, "message": r.failure.message} for r in records]
        print_json({"failures": [{**values, "outcome": outcome.value} for values in plain]})
        return
    results().print(failure_table(records) if records else "no attempt failed like this")


def _trajectories_of(run: Path) -> Path:
    folder = run / "trajectories"
    if folder.is_dir():
        return folder
    _refuse_no_run(run)
    raise RecipeError(
        "this run has no trajectories yet",
        where=str(run),
        got="no folder trajectories/",
        expected="a run that has reached its first evaluation",
        hint=f"go on with it: rlhf train --resume {run}",
    )


def _candidates_of(run: Path) -> Path:
    from rlhf.evaluation.folder import CANDIDATES

    if not (run / CANDIDATES).is_dir():
        raise RecipeError(
            "this folder holds no candidates",
            where=f"{run} --candidates",
            got=f"no folder {CANDIDATES}/",
            expected="an evaluation that `rlhf evaluate --strategy ... --out` made",
            hint="leave out --candidates",
        )
    return run / CANDIDATES


def _refuse_no_run(run: Path) -> None:
    if not any((run / name).exists() for name in ("recipe.yaml", "trajectories")):
        raise RecipeError(
            "there is no run in this folder",
            where=str(run),
            got="no such folder" if not run.is_dir() else "no recipe.yaml",
            expected="a folder that `rlhf train` made",
            hint=nearest_beside(run) or "look into runs/",
        )


def _refuse_unknown_task(folder: Path, task: str) -> None:
    """Raise RecipeError where nothing is stored of a task, whatever else is asked for."""
    from rlhf.evaluation.store import list_steps, read_columns

    rows = (row for step in list_steps(folder) for row in read_columns(step.path, ["task_id"]))
    stored = dict.fromkeys(row["task_id"] for row in rows)
    if stored and task not in stored:
        raise RecipeError(
            "nothing is stored of this task",
            where="--task",
            got=task,
            expected=f"the id of one of {len(stored)} tasks, such as {next(iter(stored))}",
            hint=nearest(task, stored) or "the last column of `rlhf trajectories RUN` has ids",
        )


def _outcome(name: str) -> Any:
    from rlhf.data import Outcome

    names = [outcome.value for outcome in Outcome]
    if name not in names:
        raise RecipeError(
            "no such outcome",
            where="--outcome",
            got=name,
            expected=", ".join(names),
            hint=nearest(name, names) or "use one of these",
        )
    return Outcome(name)


def _plain(record: Any, tokens: bool) -> dict[str, Any]:
    trajectory, score = record.trajectory, record.score
    return {
        "step": record.step,
        "stage": record.stage,
        "phase": record.phase,
        "task": record.task_id,
        "attempt": trajectory.attempt,
        "outcome": trajectory.outcome.value,
        "score": score and score.total,
        "rewards": {name: verdict.value for name, verdict in score.parts.items()} if score else {},
        "parent": trajectory.parent,
        "n_shared": trajectory.n_shared,
        **({"spent": asdict(record.spent)} if record.spent is not None else {}),
        "opening": trajectory.opening,
        "turns": [_plain_turn(turn, tokens) for turn in trajectory.turns],
        **({"advantages": record.advantages} if tokens else {}),
    }


def _plain_turn(turn: Any, tokens: bool) -> dict[str, Any]:
    plain = {"action": turn.action.text, "reply": turn.reply, "reward": turn.reward, "valid": turn.valid}
    if turn.action.notes:
        plain["notes"] = dict(turn.action.notes)
    if any(g.role for g in turn.generations):
        plain["roles"] = [g.role for g in turn.generations]
    if tokens:
        plain["generations"] = [
            {"role": g.role, "token_ids": g.token_ids, "logprobs": g.logprobs} for g in turn.generations
        ]
    return plain


@command
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of an evaluation.")],
    as_json: AsJson = False,
) -> None:
    """Write the report.html of a run or an evaluation again."""
    from rlhf.evaluation.folder import is_evaluation, refuse_unfinished

    _refuse_no_run(run)
    if is_evaluation(run):
        refuse_unfinished(run, str(run))
        from rlhf.evaluation.evaluation_report import write_evaluation_report

        path = write_evaluation_report(run)
    else:
        from rlhf.evaluation.report import write_report

        path = write_report(run)
    if as_json:
        print_json({"report": str(path)})
    else:
        results().print(str(path), soft_wrap=True)


@command
def version(as_json: AsJson = False) -> None:
    """Print the version of this package and of those it stands on."""
    import platform
    from importlib import metadata

    import rlhf

    packages = {name: metadata.version(name) for name in ("torch", "transformers", "pydantic")}
    values = {"rlhf": rlhf.__version__, "python": platform.python_version(), **packages}
    if as_json:
        print_json(values)
    else:
        results().print(", ".join(f"{name} {number}" for name, number in values.items()))
