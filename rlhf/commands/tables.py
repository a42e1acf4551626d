"""Tables of evaluations in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from rlhf.terminal import CleanConsole

#: Limits that are named otherwise than their keys in a summary.
_LIMITS = {"reply_limit": "reply_limit (limits.max_tokens)"}
#: Rows of a table of groups of tasks; the rest is in the summary.
_MOST_GROUPS = 24


def show_summary(summary: Mapping[str, Any], console: CleanConsole) -> None:
    """Print the figures of one evaluation."""
    found = summary["success"]
    console.print(
        Text.assemble(
            "success ",
            (share(found), "bold"),
            f"  ({found['n']} attempts at {summary['n_tasks']} tasks, {summary['n_errors']} errors)",
        ),
        soft_wrap=True,
    )
    console.print(f"mean score {_mean(summary['score'])}")
    for name, one in summary["rewards"].items() if len(summary["rewards"]) > 1 else ():
        console.print(f"mean of {name} {_mean(one)}", markup=False, soft_wrap=True)
    if summary["n_errors"]:
        kinds = ", ".join(f"{n} {kind}" for kind, n in summary["errors"].items() if n)
        console.print(f"errors {kinds}; counted as failures, success is {share(summary['if_errors_failed'])}")
    cut = ", ".join(f"{n} {_LIMITS.get(kind, kind)}" for kind, n in summary["truncated"].items() if n)
    n_unsolved = summary["n_failed"] + sum(summary["truncated"].values())
    ways = [f"{summary['n_failed']} failed"] * bool(summary["n_failed"]) + [f"cut off {cut}"] * bool(cut)
    console.print(f"not solved {n_unsolved}" + (f": {', '.join(ways)}" if ways else ""), soft_wrap=True)
    for k, passed in summary["pass"].items():
        if int(k) > 1:
            console.print(f"pass@{k} {share(passed['at'])}   pass^{k} {share(passed['all'])}")
    if "any_candidate" in summary:
        console.print(
            f"chosen by {summary['strategy']['kind']} from {summary['candidates_mean']:.3g} candidates; one of them "
            f"solved in {share(summary['any_candidate'])}",
            soft_wrap=True,
        )
    spent = {name.replace("_", " "): value for name, value in summary["per_solved"].items() if value is not None}
    if spent:
        console.print("for each solved: " + ", ".join(f"{amount(value)} {name}" for name, value in spent.items()))
    console.print(f"mean turns {summary['turns_mean']:.1f}, invalid actions {summary['invalid_share']:.1%}")
    if len(summary["types"]) > 1:
        console.print(group_table("tasks of type", summary["types"]))
    for column, groups in summary.get("by", {}).items():
        console.print(group_table(column, groups))
    console.print(f"policy {summary['policy']}", soft_wrap=True)
    packages = dict.fromkeys(part["package"] for part in summary["data"].values() if part["package"])
    if packages:
        console.print(f"environment {', '.join(packages)}", soft_wrap=True)


def group_table(title: str, groups: Mapping[str, Any]) -> Table:
    """Table with a row for each group of tasks; `n` counts attempts, and rewards have columns where there are several.

    Args:
        title: of the column of groups.
        groups: group -> its figures.
    """
    rewards = list(dict.fromkeys(name for one in groups.values() for name in one["rewards"]))
    rewards = rewards if len(rewards) > 1 else []
    table = Table(box=None, pad_edge=False)
    table.add_column(Text(title), overflow="fold")
    for column in ("tasks", "n", "success", "95% interval", "score", *rewards, "turns", "errors"):
        table.add_column(Text(column), no_wrap=True, justify="right")
    rows = list(groups.items())
    for name, found in rows[:_MOST_GROUPS]:
        success = found["success"]
        means = (found["rewards"].get(reward, {}).get("value") for reward in rewards)
        table.add_row(
            Text(name),
            str(found["n_tasks"]),
            str(success["n"]),
            percent(success["value"]),
            f"{percent(success['low'])} to {percent(success['high'])}",
            number(found["score"]["value"]),
            *map(number, means),
            f"{found['turns_mean']:.1f}",
            str(found["n_errors"]),
        )
    if len(rows) > _MOST_GROUPS:
        table.add_row(f"and {len(rows) - _MOST_GROUPS} more, see --json")
    return table


def share(estimate: Mapping[str, Any]) -> str:
    """A share with its interval."""
    low, high = percent(estimate["low"]), percent(estimate["high"])
    return f"{percent(estimate['value'])} (95% interval {low} to {high})"


def _mean(estimate: Mapping[str, Any]) -> str:
    return f"{number(estimate['value'])} ({number(estimate['low'])} to {number(estimate['high'])})"


def percent(value: float | None) -> str:
    """A share as percentage; a dash where nothing is known."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.1%}"


def number(value: float | None) -> str:
    """A number with three decimals; a dash where nothing is known."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def amount(value: float) -> str:
    """Amount as text, with as many digits as it needs."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
