"""`rlhf compare` and `rlhf leaderboard`: evaluations side by side."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rlhf.commands.output import AsJson, command, errors, print_json, results
from rlhf.commands.tables import number, percent
from rlhf.errors import RecipeError


class Metric(StrEnum):
    """What evaluations are compared by."""

    success = "success"
    score = "score"


@command
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FIRST SECOND...", help="Folders of evaluations, or runs; at least two.")
    ],
    metric: Annotated[Metric, typer.Option(help="What is compared.")] = Metric.success,
    difference: Annotated[
        float, typer.Option(min=0.0001, help="Say how many tasks would show a difference of this size.")
    ] = 0.05,
    limit: Annotated[int, typer.Option(min=0, help="At most so many flipped tasks of each kind.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Compare the first evaluation with each of the others, task by task.

    Examples: rlhf compare evaluations/before evaluations/after; rlhf compare runs/a runs/b runs/c --metric score
    """
    if len(folders) < 2:
        raise RecipeError(
            "a comparison takes two",
            where="rlhf compare",
            got=f"{len(folders)} folder",
            expected="at least two folders",
            hint="name the evaluation to compare with first",
        )
    from rlhf.evaluation.compare import compare_all, read_sides

    found = compare_all(read_sides(folders), metric.value, seen=difference)
    _caution_unfinished(folders)
    for row in found["comparisons"]:
        if row["n_unpaired"]:
            errors().print(f"[yellow]caution[/] {row['n_unpaired']} tasks are of one evaluation alone and left out")
        if not as_json:
            _show(row, metric, limit)
    if as_json:
        print_json(found)


@command
def leaderboard(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders of evaluations, or runs, or one that such folders are in."),
    ],
    markdown: Annotated[bool, typer.Option("--markdown", help="Write tables for a page.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of its own too, which fetches nothing.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank evaluations, those of one suite and of the same tasks together.

    Examples: rlhf leaderboard evaluations; rlhf leaderboard evaluations/* --html leaderboard.html
    """
    from rlhf.evaluation.compare import evaluations_below
    from rlhf.evaluation.leaderboard import boards, title_of, write_leaderboard

    folders = [one for folder in folders for one in evaluations_below(folder) or [folder]]
    found = boards(folders)
    _caution_unfinished(folders)
    if html is not None:
        write_leaderboard(html, found)
    if as_json:
        print_json({"boards": found})
        return
    for board in found:
        title = title_of(board)
        if markdown:
            results().print(
                "\n".join([f"**{title}**", "", *_markdown(board["rows"]), ""]), soft_wrap=True, markup=False
            )
        else:
            results().print(f"[bold]{title}[/]", _board(board["rows"]), "")


def _caution_unfinished(folders: list[Path]) -> None:
    """Say which evaluations were begun and not finished: figures of their first tasks alone."""
    for folder in folders:
        if (folder / "evaluation.yaml").is_file() and not (folder / "summary.json").is_file():
            errors().print(
                f"[yellow]caution[/] {folder} is not finished; the command that it was begun with goes on with it",
                soft_wrap=True,
            )


def _board(rows: list[dict[str, Any]]) -> Table:
    from rlhf.evaluation.leaderboard import COLUMNS, cells

    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right", overflow="fold")
    for row in rows:
        table.add_row(*cells(row))
    return table


def _markdown(rows: list[dict[str, Any]]) -> list[str]:
    from rlhf.evaluation.leaderboard import COLUMNS, cells

    head = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return head + [f"| {' | '.join(cells(row))} |" for row in rows]


def _show(row: dict[str, Any], metric: Metric, limit: int) -> None:
    console, write = results(), percent if metric is Metric.success else number
    low, high = row["interval"]
    console.print(
        f"[bold]{row['second']}[/] against {row['first']}: {metric} {_signed(row['difference'], write)} "
        f"(95% interval {_signed(low, write)} to {_signed(high, write)})",
        soft_wrap=True,
    )
    kind = "McNemar, mid-p" if row["test"] == "mcnemar" else "permutation of signs, mid-p"
    console.print(
        f"p {_p(row['p_value'])} ({kind}), corrected {_p(row['p_holm'])} (Holm); {row['n_tasks']} tasks, "
        f"{row['n_better']} better, {row['n_worse']} worse",
        soft_wrap=True,
    )
    needed = ", ".join(f"{n:,} to see {_signed(float(d), write)}" for d, n in row["needed"].items() if n)
    if needed:
        console.print(f"tasks needed, 4 times in 5 at the 5% level: {needed}", soft_wrap=True)
    if any(row["n_errors"]):
        console.print(f"errors, left out: {row['n_errors'][0]} and {row['n_errors'][1]}")
    if limit and row["flipped"]:
        console.print(_flips(row, write, limit))
        console.print(f"look at one with {row['flipped'][0]['look'][1]}", soft_wrap=True)
    console.print()


def _flips(row: dict[str, Any], write: Any, limit: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("task", overflow="fold")
    for name in ("first", "second"):
        table.add_column(row[name], justify="right", overflow="fold")
    better = [flip for flip in row["flipped"] if flip["second"] > flip["first"]]
    worse = [flip for flip in row["flipped"] if flip["second"] < flip["first"]]
    for flip in (*better[:limit], *worse[:limit]):
        table.add_row(flip["task"], write(flip["first"]), write(flip["second"]))
    left = max(0, len(better) - limit) + max(0, len(worse) - limit)
    if left:
        table.add_row(f"and {left} more, see --json", "", "")
    return table


def _signed(value: float | None, write: Any) -> str:
    return ("+" if value is not None and value > 0 else "") + str(write(value))


def _p(value: float) -> str:
    return "below 0.0001" if value < 0.0001 else f"{value:.4f}"
