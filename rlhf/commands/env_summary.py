"""Summary of each environment kind without starting it: the table of `docs/environments.md`, kept here.

`environments.txt` is what `rlhf environments --measure 100 --markdown` printed; the page has the same table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: A letter for each promise, as tables have it.
PROMISES: Mapping[str, str] = {
    "deterministic": "d",
    "replayable": "r",
    "thread_safe": "t",
    "inline": "i",
    "isolated": "w",
    "oracle": "o",
}
LEGEND = "d deterministic, r replayable, t thread-safe, i inline, w in worker processes, o oracle"

COLUMNS = ("kind", "extra", "promises", "tasks", "steps", "random", "oracle")
MEASURES = ("steps per s", "start s", "MB")

#: Columns of the list in a terminal, of which this is the width.
_SPLITS, WIDTH = ("train", "test"), 80

#: Keys by which a kind that has several games is told which one is meant.
_WHICH = ("game", "level", "task", "dataset", "category")


@cache
def kept() -> Mapping[str, Mapping[str, str]]:
    """The kept table: kind -> column -> what stands there, `-` where nothing is known."""
    lines = resources.files("rlhf.commands").joinpath("environments.txt").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {row[0].strip("`"): dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def glance(kind: str) -> dict[str, Any]:
    """Summary of a catalogue kind, in plain values, without importing it.

    Returns:
        kind, what, extra, installed, missing (how to install it), needs (keys without a default), promises, tasks of
        each split, max_steps, what random actions and the oracle solve as `[solved, episodes]`, steps_per_s, startup_s,
        memory_mb.
    """
    from rlhf.catalog import CATALOG, PACKAGES_OF_EXTRA
    from rlhf.extras import how_to_install

    entry, cells = CATALOG["environment"][kind], kept().get(kind, {})
    absent = [name for name in PACKAGES_OF_EXTRA.get(entry.extra or "", ()) if find_spec(name) is None]
    letters = cells.get("promises", "-")
    return {
        "kind": kind,
        "what": entry.doc,
        "extra": entry.extra,
        "installed": not absent,
        "missing": how_to_install(entry.extra or "") if absent else None,
        "needs": cells["tasks"].removeprefix("needs ") if cells.get("tasks", "").startswith("needs ") else None,
        "promises": [name for name, letter in PROMISES.items() if letter in letters],
        "tasks": {name: int(n.replace(",", "")) for name, n in re.findall(r"(\w+) ([\d,]+)", cells.get("tasks", ""))},
        "max_steps": _number(cells.get("steps", "-")),
        "random": _share(cells.get("random", "-")),
        "oracle": _share(cells.get("oracle", "-")),
        "steps_per_s": _number(cells.get("steps per s", "-")),
        "startup_s": _number(cells.get("start s", "-")),
        "memory_mb": _number(cells.get("MB", "-")),
    }


def listing(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned columns of at most 80 characters, whatever the terminal's width.

    What takes more room is left to `--json`, `--markdown` and what is said of one kind: other splits, and the oracle.
    """
    head = ("kind", "extra", "promises", *_SPLITS, "steps", "random")
    lines = [head, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(_padded, line, widths, range(len(head)))) for line in lines)


def _padded(cell: str, width: int, column: int) -> str:
    return f"{cell:<{width}}" if column < 3 else f"{cell:>{width}}"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    promises = "".join(PROMISES[name] for name in row["promises"])
    tasks = [f"{row['tasks'][split]:,}" if split in row["tasks"] else "-" for split in _SPLITS]
    random = f"{row['random'][0]} of {row['random'][1]}" if row["random"] else "-"
    extra = f"{row['extra'] or '-'}{'' if row['installed'] else '*'}"
    return (row["kind"], extra, promises or "-", *tasks, str(row["max_steps"] or "-"), random)


def _number(text: str) -> float | int | None:
    if text == "-":
        return None
    return float(text) if "." in text else int(text.replace(",", ""))


def _share(text: str) -> list[int] | None:
    found = re.match(r"(\d+) of (\d+)", text)
    return [int(found[1]), int(found[2])] if found else None


def variant(kind: str, values: Mapping[str, Any]) -> str:
    """Name of the game variant chosen by these values, and how to choose another; '' if only one."""
    from rlhf.catalog import CATALOG
    from rlhf.recipe.keys import keys_of
    from rlhf.registry import resolve

    if kind not in CATALOG["environment"]:  # what a key of somebody else's means is not known
        return ""
    keys = keys_of(resolve("environment", kind, base=Path.cwd()))
    name = next((name for name in _WHICH if name in keys), "")
    if not name:
        return ""
    make_default = keys[name].make_default
    chosen = values[name] if make_default is None or name in values else f"{make_default()}, the default"
    return f"{name} {chosen}; for another one {name}=NAME, where a wrong name lists all there are"
