"""`rlhf compare` and `rlhf leaderboard`: evaluations side by side."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from enum import StrEnum
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rlhf.commands.output import AsJson, caution, command, one_of, print_json, results
from rlhf.commands.tables import number, percent
from rlhf.terminal import CleanConsole

#: Differing keys of two recipes that are printed, and characters of a value.
_MOST_KEYS, _MOST_TEXT = 8, 60


class Metric(StrEnum):
    """Metrics that evaluations are compared by."""

    success = "success"
    score = "score"


@command
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FIRST SECOND...", help="Two or more evaluation or run folders, or one run.")
    ],
    metric: Annotated[str, typer.Option(metavar="|".join(Metric), help="Metric to compare.")] = Metric.success.value,
    difference: Annotated[
        float, typer.Option(min=0.0001, help="Report how many tasks are needed to detect a difference of this size.")
    ] = 0.05,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of tasks shown per kind of flip.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Compare the first evaluation with each of the others, or a run's first with its last, paired by task.

    Examples: rlhf compare evaluations/before evaluations/after; rlhf compare runs/a runs/b runs/c; rlhf compare runs/a
    """
    compared = one_of(Metric, metric, "--metric", "metric")
    from rlhf.evaluation.compare import compare_all, read_compared

    found = compare_all(read_compared(folders), compared.value, seen=difference)
    for row, folder in zip(found["comparisons"], folders[1:] or folders, strict=True):
        row["recipe_differences"] = _recipe_differences(folders[0], folder)
    _caution(caution for row in found["comparisons"] for caution in row["cautions"])
    if as_json:
        print_json(found)
        return
    for i, row in enumerate(found["comparisons"]):
        if i:
            results().print()
        _show(row, compared, limit)


@command
def leaderboard(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Evaluation or run folders, or a parent folder of such."),
    ],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write one HTML page with ranks, pairwise comparisons and attempts."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank evaluations, one table for each suite and set of tasks.

    Examples: rlhf leaderboard evaluations; rlhf leaderboard evaluations/* --html leaderboard.html
    """
    from rlhf.evaluation.compare import evaluations_below
    from rlhf.evaluation.contrib.leaderboard import boards, title_of

    folders = [one for folder in folders for one in evaluations_below(folder) or [folder]]
    found = boards(folders)
    _caution_unfinished(folders)
    if html is not None:
        from rlhf.viewer.report import write_leaderboard

        write_leaderboard(html, folders)
    if as_json:
        print_json({"boards": found})
        return
    console = results()
    for i, board in enumerate(found):
        title = title_of(board)
        if i:
            console.print()
        if markdown:
            console.print("\n".join([f"**{title}**", "", *_markdown(board["rows"])]), soft_wrap=True, markup=False)
        else:
            _show_board(title, board["rows"], console)


def _caution_unfinished(folders: list[Path]) -> None:
    """Say which evaluations were begun and not finished: figures of their first tasks alone."""
    from rlhf.evaluation.compare import unfinished

    _caution(filter(None, map(unfinished, folders)))


def _caution(said: Iterable[str]) -> None:
    """Print each of these once."""
    for text in dict.fromkeys(said):
        caution(text)


def _show_board(title: str, rows: list[dict[str, Any]], console: CleanConsole) -> None:
    """Print a leaderboard; folders are added where the policies' names do not fit."""
    from rlhf.evaluation.contrib.leaderboard import table_of
    from rlhf.viewer.terminal import whole_table

    console.print(Text(title, "bold"))
    columns, texts = table_of(rows)
    table, n_cells = whole_table(columns, texts)
    if n_cells > console.width:
        short = [[name, *found[1:]] for name, found in zip(_names(rows), texts, strict=True)]
        table, _ = whole_table(("evaluation", *columns[1:]), short)
    console.print(table, crop=False)


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """Labels of evaluations with their strategies; paths without their common folders."""
    names = [row["name"] for row in rows]
    if any("/" in name for name in names):
        paths = [os.path.abspath(name) for name in names]
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.relpath(path, common) for path in paths]
    return [", ".join(filter(None, (name, row["strategy"]))) for name, row in zip(names, rows, strict=True)]


def _markdown(rows: list[dict[str, Any]]) -> list[str]:
    from rlhf.evaluation.contrib.leaderboard import table_of

    columns, texts = table_of(rows)
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(found)} |" for found in texts]


def _show(row: dict[str, Any], metric: Metric, limit: int) -> None:
    console, write = results(), percent if metric is Metric.success else number
    low, high = row["interval"]
    console.print(
        Text.assemble(
            (row["second"], "bold"),
            f" against {row['first']}: {metric} {' → '.join(map(write, row['means']))}, "
            f"difference {_signed(row['difference'], write)} (95% interval {_signed(low, write)} to "
            f"{_signed(high, write)})",
        ),
        soft_wrap=True,
    )
    if any(found["phase"] != "evaluation" for found in row["measured"]):
        sides = starmap(_measured, zip((row["first"], row["second"]), row["measured"], strict=True))
        console.print(f"measured: {'; '.join(sides)}", soft_wrap=True, markup=False)
    if changed := row["recipe_differences"]:
        told = [
            f"{key} {_value(mine)} and {_value(theirs)}" for key, (mine, theirs) in list(changed.items())[:_MOST_KEYS]
        ]
        told += [f"{len(changed) - _MOST_KEYS} more in --json"] * (len(changed) > _MOST_KEYS)
        console.print(f"recipes: {'; '.join(told)}", soft_wrap=True, markup=False)
    kind = "McNemar, mid-p" if row["test"] == "mcnemar" else "permutation of signs, mid-p"
    console.print(
        f"p {_p(row['p_value'])} ({kind}), corrected {_p(row['p_holm'])} (Holm); {row['n_tasks']} tasks, "
        f"{row['n_better']} better, {row['n_worse']} worse",
        soft_wrap=True,
    )
    if (row["p_value"] < 0.05) == (low <= 0 <= high):
        console.print(
            "p and the interval disagree: they are of two methods, the test above and Student's t for the mean "
            "difference (with pseudo-values); the difference is borderline",
            soft_wrap=True,
        )
    needed = ", ".join(f"{n:,} to see {_signed(float(d), write)}" for d, n in row["needed"].items() if n)
    if needed:
        console.print(f"tasks needed, 4 times in 5 at the 5% level: {needed}", soft_wrap=True)
    if any(row["n_errors"]):
        console.print(f"errors, left out: {row['n_errors'][0]} and {row['n_errors'][1]}")
    if limit and row["flipped"]:
        console.print(_flips(row, write, limit, console.width), crop=False)
        console.print(f"look at one with {row['flipped'][0]['look'][1]}", soft_wrap=True)


def _recipe_differences(first: Path, second: Path) -> dict[str, tuple[Any, Any]]:
    """Dotted keys that the recipes of two runs give different values, with both; none for an evaluation of its own."""
    from rlhf.evaluation.judging import recipe_of_run
    from rlhf.recipe.model import differing

    mine, theirs = recipe_of_run(first), recipe_of_run(second)
    if not mine or not theirs:
        return {}
    # A plain key that one of them lacks was renamed, or added, between the two runs.
    return {
        key: (one, other)
        for key, (one, other) in differing(mine, theirs).items()
        if key != "name" and (isinstance(one or other, dict) or _has(mine, key) == _has(theirs, key))
    }


def _has(values: Any, key: str) -> bool:
    """True if nested values have a dotted key, of names that may have dots themselves."""
    held = values if isinstance(values, dict) else dict(enumerate(values)) if isinstance(values, list) else {}
    return any(
        key == str(name) or (key.startswith(f"{name}.") and _has(value, key.removeprefix(f"{name}.")))
        for name, value in held.items()
    )


def _value(value: Any) -> str:
    """Value of a recipe's key as text, cut where it is long."""
    text = "none" if value is None else json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."


def _measured(name: str, found: dict[str, Any]) -> str:
    """Label of one side of a comparison: `a after training, step 30`."""
    from rlhf.evaluation.compare import when

    if found["phase"] == "evaluation":
        return f"{name} by `rlhf evaluate`"
    time = when(found["phase"])
    return f"{name if name == time else f'{name} {time}'}, step {found['step']}"


def _flips(row: dict[str, Any], write: Any, limit: int, width: int) -> Table:
    from rlhf.viewer.terminal import flip_table

    better = [flip for flip in row["flipped"] if flip["second"] > flip["first"]]
    worse = [flip for flip in row["flipped"] if flip["second"] < flip["first"]]
    shown = [(flip["task"], write(flip["first"]), write(flip["second"])) for flip in (*better[:limit], *worse[:limit])]
    left = max(0, len(better) - limit) + max(0, len(worse) - limit)
    more = [(f"and {left} more, see --json", "", "")] * bool(left)
    return flip_table(shown + more, (row["first"], row["second"]), width)


def _signed(value: float | None, write: Any) -> str:
    if value is None or not math.isfinite(value):
        return "unbounded"
    return ("+" if value > 0 else "") + str(write(value))


def _p(value: float) -> str:
    return "below 0.0001" if value < 0.0001 else f"{value:.4f}"
