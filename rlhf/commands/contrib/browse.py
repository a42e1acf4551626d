"""`rlhf recipes`, `trajectories`, `report` and `version`: look at what is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table

from rlhf.commands.output import AsJson, command, one_of, print_json, results
from rlhf.errors import RecipeError, meant, nearest
from rlhf.evaluation.folder import no_run
from rlhf.given_parts import how_to_resume

if TYPE_CHECKING:
    from rlhf.evaluation.contrib.index import Index, Query

_WORD = re.compile(r"\w{3,}")
#: Names of another list that a message shows.
_SHOWN = 4


@command
def recipes(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Only recipes that contain all of these words.")
    ] = None,
    kinds: Annotated[
        bool, typer.Option("--kinds", help="List the kinds of parts that recipes can use instead.")
    ] = False,
    suites: Annotated[bool, typer.Option("--suites", help="List the suites of `rlhf evaluate` instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes that ship with the toolkit."""
    noun = "kinds" if kinds else "suites" if suites else "recipes"
    rows = _matching(words or [], noun)
    if as_json:
        print_json({noun: rows})
        return
    console, names = results(), ("section", "kind") if kinds else ("name",)
    widest = max(sum(len(row[name]) + 1 for name in names) for row in rows)
    if console.width < widest + 60:  # what a name means gets lines of its own
        for row in rows:
            console.print(" ".join(row[name] for name in names), soft_wrap=True)
            console.print(Padding(row["what"], (0, 0, 0, 4), expand=False))
        return
    table = Table(box=None, pad_edge=False)
    for column in (*names, "what"):
        table.add_column(column, no_wrap=column != "what")  # a name is there to be copied
    for row in rows:
        table.add_row(*(row[column] for column in (*names, "what")))
    console.print(table)


def _matching(words: Sequence[str], noun: str) -> list[dict[str, str]]:
    """Rows of a list that contain all words. Raises RecipeError where there are none."""
    rows = _LISTS[noun]()
    texts = [_text(row, words) for row in rows]
    found = [row for row, inside in zip(rows, texts, strict=True) if all(word.casefold() in inside for word in words)]
    if not found:
        n_saying = {word: sum(word.casefold() in inside for inside in texts) for word in words}
        hints = (_nearest([word for word, n in n_saying.items() if not n], rows), _elsewhere(words, noun))
        raise RecipeError(
            f"no match among the {noun}",
            where="rlhf recipes",
            got=", ".join(f"{word}: {n} of {len(rows)}" for word, n in n_saying.items()),
            expected="words that all occur in one of them",
            hint="; ".join(filter(None, hints)) or f"`rlhf recipes{_option(noun)}` lists all",
        )
    return found


def _text(row: Mapping[str, str], words: Sequence[str]) -> str:
    """Text in which words are looked for: the cells of a row, and the file whose path it has."""
    inside = Path(row["path"]).read_text("utf-8") if words and "path" in row else ""
    return " ".join([*(value for name, value in row.items() if name != "path"), inside]).casefold()


def _nearest(words: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    """Suggestion of a word of the rows that is much like one of `words`, of which none has one; '' where none is."""
    known = {part for row in rows for name, value in row.items() if name != "path" for part in _WORD.findall(value)}
    near = (get_close_matches(word, known, n=1, cutoff=0.75) for word in words)
    return next((meant(found[0]) for found in near if found), "")


def _elsewhere(words: Sequence[str], noun: str) -> str:
    """Other list that contains all of the words, and what it has of them; '' where none does."""
    for other, listed in _LISTS.items():
        found = [row for row in listed() if all(word.casefold() in _text(row, words) for word in words)]
        if other != noun and found:
            names = [" ".join(row[key] for key in ("section", "kind", "name") if key in row) for row in found]
            told = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
            return f"`rlhf recipes{_option(other)} {' '.join(words)}` finds {len(names)} of the {other}: {told}"
    return ""


def _option(noun: str) -> str:
    return "" if noun == "recipes" else f" --{noun}"


def _recipes() -> list[dict[str, str]]:
    from rlhf.recipe.files import list_recipes

    return [{"name": r.name, "what": r.doc, "path": str(r.path)} for r in list_recipes()]


def _suites() -> list[dict[str, str]]:
    from rlhf.recipe.suites import list_suites

    return [{"name": s.name, "what": s.doc, "path": str(s.path)} for s in list_suites()]


def _kinds() -> list[dict[str, str]]:
    from rlhf.catalog import CATALOG
    from rlhf.plugins import brought

    own = [
        {"section": section, "kind": kind, "what": entry.doc + (f" (extra {entry.extra})" if entry.extra else "")}
        for section, table in CATALOG.items()
        for kind, entry in table.items()
    ]
    return own + [
        {"section": section, "kind": kind, "what": f"{target}, of the package {package}{_hidden(section, kind)}"}
        for section in CATALOG
        for kind, found in brought(section).items()
        for package, target in found
    ]


def _hidden(section: str, kind: str) -> str:
    from rlhf.catalog import CATALOG

    return "; hidden by the kind of this name that comes along" if kind in CATALOG[section] else ""


#: What `rlhf recipes` lists.
_LISTS: Mapping[str, Callable[[], list[dict[str, str]]]] = {"recipes": _recipes, "kinds": _kinds, "suites": _suites}


@command
def trajectories(
    run: Annotated[Path, typer.Argument(help="Run or evaluation folder.")],
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.")] = None,
    task: Annotated[str | None, typer.Option(metavar="ID", help="Only this task.")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Only this attempt of each task.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only this outcome: solved, failed, turn_limit, ...")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of trajectories.")] = 5,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show sampled tokens with log-probs and advantages.")
    ] = False,
    candidates: Annotated[
        bool, typer.Option("--candidates", help="For an evaluation: show the candidates of its test-time strategy.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show stored trajectories of a run or evaluation in the terminal.

    Example: rlhf trajectories runs/quickstart-seed0 --outcome failed --limit 2 --tokens
    """
    folder = _candidates_of(run) if candidates else _trajectories_of(run)
    wanted = None if outcome is None else _outcome(outcome)
    from rlhf.evaluation.contrib.index import Query
    from rlhf.evaluation.store import read_trajectories

    query = Query(step, task, attempt, wanted)
    if wanted is not None and wanted.is_infrastructure_error:
        _show_failures(folder, query, limit, as_json=as_json)
        return

    found = read_trajectories(
        folder,
        steps=None if step is None else [step],
        task_id=task,
        attempt=attempt,
        outcomes=None if wanted is None else [wanted],
        limit=limit,
    )
    records = list(found)
    n_found, nothing = _counted(folder, query, len(records), limit)
    if as_json:
        print_json({"n_found": n_found, "trajectories": [_plain(record, tokens) for record in records]})
        return
    if nothing:
        results().print(nothing, soft_wrap=True, markup=False)
        return
    _print_trajectories(run, records, tokens)
    _say_left(len(records), n_found)


def _print_trajectories(run: Path, records: list[Any], tokens: bool) -> None:
    from rlhf.evaluation.transcript import load_tokenizer, pieces
    from rlhf.viewer.terminal import TrajectoryTable, show_trajectory

    console = results()
    console.print(TrajectoryTable(records), crop=False)
    tokenizer = load_tokenizer(run) if tokens else None
    for record in records:
        show_trajectory(record, console, tokens=tokens, pieces=lambda ids: pieces(tokenizer, ids))


def _show_failures(folder: Path, query: Query, limit: int, *, as_json: bool) -> None:
    """Print attempts that ended with an infrastructure error, with the message in place of turns."""
    from rlhf.evaluation.store import read_failures
    from rlhf.viewer.terminal import failure_table

    records = [
        record
        for record in read_failures(folder)
        if record.failure.outcome is query.outcome
        and all(
            value in (None, stored)
            for value, stored in (
                (query.step, record.step),
                (query.task, record.task_id),
                (query.attempt, record.failure.attempt),
            )
        )
    ][:limit]
    n_found, nothing = _counted(folder, query, len(records), limit)
    if as_json:
        plain = [
            {"step": r.step, "task": r.task_id, "message": r.failure.message, "outcome": r.failure.outcome.value}
            for r in records
        ]
        print_json({"n_found": n_found, "failures": plain})
        return
    if nothing:
        results().print(nothing, soft_wrap=True, markup=False)
        return
    console = results()
    console.print(failure_table(records, console.width), crop=False)
    _say_left(len(records), n_found)


def _counted(folder: Path, query: Query, n_read: int, limit: int) -> tuple[int, str]:
    """Count of matching attempts, and what to say where there are none. Reads no more than it needs for that.

    Raises:
        RecipeError: nothing is stored of the step, the task or the attempt asked for.
    """
    from rlhf.evaluation.contrib.index import Index

    if 0 < n_read < limit:
        return n_read, ""
    if n_read:
        return Index.read(folder, query.step).count(query), ""
    index = Index.read(folder)
    _refuse_unknown(index, query)
    return 0, _nothing(index, query)


def _nothing(index: Index, query: Query) -> str:
    """Say that no attempt is like this, and what there is in its place."""
    if not index.rows:
        return "nothing is stored yet"
    others = index.outcomes(query)
    said = ", ".join(f"{n:,} {name}" for name, n in others.items())
    if not others:
        what = "no attempt is like this: what was asked for is stored, and not of one attempt"
    elif query.outcome is None:
        what = f"a part failed in every attempt like this: {said}; --outcome {next(iter(others))} shows them"
    else:
        what = f"no attempt ended as {query.outcome}; those like this ended as: {said}"
    return f"{what}\nstored are steps {index.said()}"


def _say_left(n_shown: int, n_found: int) -> None:
    if n_shown < n_found:
        results().print(f"{n_shown:,} of {n_found:,}; --limit shows more")


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
        hint=f"resume it: {how_to_resume(run)}",
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
        raise no_run(run, str(run), expected="a folder that `rlhf train` or `rlhf evaluate --out` made")


def _refuse_unknown(index: Index, query: Query) -> None:
    """Raise RecipeError for a step, task or attempt that is not stored."""
    if not index.rows:
        return
    steps, tasks = index.steps, list(dict.fromkeys(row["task_id"] for row in index.rows))
    last = max(row["attempt"] for row in index.rows)
    if query.step is not None and query.step not in steps:
        near = min(steps, key=lambda step: abs(step - (query.step or 0)))
        noun, got, expected, hint = (
            "step",
            str(query.step),
            f"one of steps {index.said()}",
            f"the nearest is --step {near}",
        )
    elif query.task is not None and query.task not in tasks:
        noun, got, expected = "task", query.task, f"the id of one of {len(tasks)} tasks, such as {tasks[0]}"
        hint = nearest(query.task, tasks) or "`rlhf trajectories RUN` lists ids"
    elif query.attempt is not None and query.attempt > last:
        noun, got, hint = "attempt", str(query.attempt), f"the last is --attempt {last}"
        expected = f"the number of an attempt at a task, from 0 to {last}"
    else:
        return
    raise RecipeError(f"nothing is stored for this {noun}", where=f"--{noun}", got=got, expected=expected, hint=hint)


def _outcome(name: str) -> Any:
    from rlhf.data import Outcome

    return one_of(Outcome, name, "--outcome", "outcome")


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
    run: Annotated[Path, typer.Argument(help="Run or evaluation folder.")],
    redact: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Redact matches of this regular expression, besides API keys. Repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rewrite report.html of a run or evaluation: the pages of `rlhf view` in one file."""
    from rlhf.evaluation.folder import is_evaluation, refuse_unfinished
    from rlhf.viewer.redaction import Redaction
    from rlhf.viewer.report import write_report

    _refuse_no_run(run)
    if is_evaluation(run):
        refuse_unfinished(run, str(run))
    path = write_report(run, Redaction(redact or []))
    if as_json:
        print_json({"report": str(path)})
    else:
        results().print(str(path), soft_wrap=True)


@command
def version(as_json: AsJson = False) -> None:
    """Print the versions of this package and its main dependencies."""
    import platform
    from importlib import metadata

    import rlhf

    packages = {name: metadata.version(name) for name in ("torch", "transformers", "pydantic")}
    values = {"rlhf": rlhf.__version__, "python": platform.python_version(), **packages}
    if as_json:
        print_json(values)
    else:
        results().print(", ".join(f"{name} {number}" for name, number in values.items()))
