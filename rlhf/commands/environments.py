"""`rlhf environments`: the kinds there are, what they declare, and what chance and their oracles do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.commands.env_summary import COLUMNS, LEGEND, MEASURES, PROMISES, WIDTH, glance, kept, listing
from rlhf.commands.output import AsJson, command, errors, print_json, results
from rlhf.errors import EnvError, MissingPackageError, RlhfError, boundary
from rlhf.terminal import say

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf.commands.contrib.measure import Measured, Played

#: Of a list of kinds only those are measured that take no longer.
_QUICK_S = 60.0


@command
def environments(
    kind: Annotated[str | None, typer.Argument(help="Show the details of this kind.")] = None,
    fields: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Its settings.")] = None,
    measure: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Play N random episodes per kind, and up to N of the oracle, one per task."
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the environment kinds with their properties, tasks, and the success of random play and the oracle.

    The list shows recorded values and starts nothing; a named kind, or --measure, starts the environment.

    Examples: rlhf environments; rlhf environments keyhole rows=5 --measure 100
    """
    from rlhf.catalog import CATALOG

    if kind is None and measure is None:
        _list(list(CATALOG["environment"]), markdown=markdown, as_json=as_json)
        return
    chosen = list(CATALOG["environment"]) if kind is None else [kind]
    rows = []
    from rich.text import Text

    with errors().status("counting tasks") as status:
        for name in chosen:
            status.update(Text(f"looking at {name}"))
            rows.append(described(name, fields or [], measure, is_strict=kind is not None))
    if as_json:
        print_json({"environments": rows})
    elif markdown:
        say(markdown_table(rows, with_measures=measure is not None))
    elif kind is not None:
        for label, text in _lines(rows[0]):
            results().print(f"{label + ':':<15}{text}", soft_wrap=True, markup=False)
    else:
        results().print(_table(rows, with_measures=measure is not None))
        results().print(LEGEND, soft_wrap=True)


def _list(kinds: list[str], *, markdown: bool, as_json: bool) -> None:
    """Print what is kept of these kinds."""
    rows = [glance(name) for name in kinds]
    if as_json:
        print_json({"environments": rows})
        return
    if markdown:
        say(_as_markdown((*COLUMNS, *MEASURES), [list(kept()[name].values()) for name in kinds if name in kept()]))
        return
    say(listing(rows))
    absent = {row["extra"]: row["missing"] for row in rows if row["missing"]}
    needs = [f"{row['kind']} needs {row['needs']}" for row in rows if row["needs"]]
    say("")
    for text in (
        f"promises: {LEGEND}",
        "train, test: tasks of these splits",
        "random: solved of the first test tasks by random actions, with the defaults or as the kind's suite has it",
        "one kind, with its oracle and all there is to say: rlhf environments KIND",
        f"without defaults: {', '.join(needs)}",
    ):
        say(fill(text, WIDTH, subsequent_indent="  "))
    for extra, how in absent.items():  # a command to copy is not broken
        say(f"*{extra} is absent: {how}")


def described(kind: str, fields: list[str], measure: int | None = None, *, is_strict: bool = True) -> dict[str, Any]:
    """All there is to say about a kind, in plain values.

    Args:
        kind: as a recipe writes it.
        fields: KEY=VALUE; without any the defaults, or what the kind's suite has where there are keys without default.
        measure: random episodes, and most of the oracle's; None plays none.
        is_strict: raise what goes wrong while playing or counting; else it is said in the row.

    Raises:
        RlhfError: no such kind, settings that it refuses, or, of a strict call, an environment that fails.
    """
    from rlhf.catalog import CATALOG
    from rlhf.recipe.text import parse_fields

    entry = CATALOG["environment"].get(kind)
    row: dict[str, Any] = {
        "kind": kind,
        "what": entry.doc if entry else "",
        "extra": entry.extra if entry else None,
        "installed": True,
        "missing": None,
        "needs": None,
        "settings": parse_fields(fields),
        "suite": None,
        "properties": None,
        "tasks": {},
        "max_steps": None,
        "known": {name: kept()[kind][name] for name in ("random", "oracle")} if kind in kept() and not fields else None,
        "measured": None,
        "error": None,
    }
    try:
        _look(row)
        if measure is not None and row["properties"]:
            limit_s = 600.0 if is_strict else _QUICK_S
            values = {"kind": kind, **row["settings"]}
            row["measured"] = _measures(values, row["properties"]["splits"], measure, limit_s)
    except MissingPackageError as error:
        row |= {"installed": False, "missing": error.hint or error.expected}
    except RlhfError as error:
        if is_strict:
            raise
        row["error"] = str(error)
    return row


def _look(row: dict[str, Any]) -> None:
    """Fill in what an environment says of itself."""
    from environments.base import Capabilities, properties_of
    from rlhf.recipe.builder import build_environment, build_part
    from rlhf.recipe.keys import keys_of
    from rlhf.registry import resolve

    base, kind = Path.cwd(), row["kind"]
    needed = {key.name for key in keys_of(resolve("environment", kind, base=base)).values() if key.make_default is None}
    if needed and not row["settings"]:
        row["settings"], row["suite"] = _of_suite(kind)
        if not row["settings"]:
            row["needs"] = ", ".join(sorted(needed))
            return
    values = {"kind": kind, **row["settings"]}
    part = build_part("environment", values, "environment", base=base)
    with boundary(EnvError, f"{kind}.properties", "run `rlhf check environment`"):
        row["properties"] = asdict(properties_of(part))
        row["max_steps"] = Capabilities(part).max_steps
    environment = build_environment(values, "environment", base=base)
    try:
        for split in row["properties"]["splits"]:
            with boundary(EnvError, f"{kind}.tasks({split!r})", "run `rlhf check environment`"):
                row["tasks"][split] = sum(1 for _ in environment.tasks(split))
    finally:
        Capabilities(environment).close()


def _of_suite(kind: str) -> tuple[dict[str, Any], str | None]:
    """Settings and name of a suite's first part of this kind; a suite of that name is preferred."""
    from rlhf.recipe.suites import list_suites
    from rlhf.recipe.text import read

    for suite in sorted(list_suites(), key=lambda listed: (listed.name != kind, listed.name)):
        for name, part in read(suite.path, []).get("parts", {}).items():
            found = dict(part.get("environment", {}))
            if found.pop("kind", None) == kind:
                return found, f"{suite.name}, {name}"
    return {}, None


def _measures(values: Mapping[str, Any], splits: tuple[str, ...], n: int, limit_s: float) -> dict[str, Any]:
    from rlhf.commands.contrib.measure import measured

    split = "test" if "test" in splits else splits[-1]
    found: Measured = measured(values, split, n, limit_s=limit_s)
    players = [player for player in (found.random, found.oracle) if player is not None and player.speed > 0]
    return {
        "split": split,
        "random": _share(found.random),
        "oracle": _share(found.oracle),
        "steps_per_s": players[0].speed if players else None,
        "startup_s": found.startup_s,
        "memory_mb": found.memory_mb,
    }


def _share(played: Played | None) -> dict[str, Any] | None:
    from rlhf.evaluation.statistics import success_estimate

    if played is None:
        return None
    found = success_estimate(played.solved, played.tasks)
    return {
        "n": found.n,
        "n_solved": sum(played.solved),
        "low": found.low,
        "high": found.high,
        "score": played.score,
        "steps": played.n_steps / found.n,
    }


# --- how it is shown -----------------------------------------------------------------------------------------------


def cells(row: Mapping[str, Any], *, with_measures: bool = False) -> list[str]:
    """The columns of a row: kind, extra, promises, tasks of each split, steps, random, oracle, and measures."""
    properties, known = row["properties"] or {}, row["known"] or {}
    found = row["measured"] or {}
    promises = "".join(letter for name, letter in PROMISES.items() if properties.get(name))
    tasks = " ".join(f"{split} {n:,}" for split, n in row["tasks"].items())
    if not properties:
        tasks = "fails" if row["error"] else "not installed" if row["missing"] else f"needs {row['needs']}"
    said = [row["kind"], row["extra"] or "-", promises or "-", tasks, str(row["max_steps"] or "-")]
    said += [_solved(found.get(name)) if found else known.get(name, "-") for name in ("random", "oracle")]
    if with_measures:
        speed = found.get("steps_per_s")
        said += [f"{speed:,.0f}" if speed else "-"]
        said += [f"{found['startup_s']:.2f}", f"{found['memory_mb']:.0f}"] if found else ["-", "-"]
    return said


def markdown_table(rows: list[dict[str, Any]], *, with_measures: bool = False) -> str:
    """The table of `docs/environments.md`."""
    columns = COLUMNS + (MEASURES if with_measures else ())
    found = (cells(row, with_measures=with_measures) for row in rows)
    return _as_markdown(columns, [[f"`{name}`", *rest] for name, *rest in found])


def _as_markdown(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("|" + "|".join(line) + "|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines)


def _table(rows: list[dict[str, Any]], *, with_measures: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in COLUMNS + (MEASURES if with_measures else ()):
        table.add_column(column, no_wrap=column == "kind")
    for row in rows:
        table.add_row(*cells(row, with_measures=with_measures))
    return table


def _solved(share: Mapping[str, Any] | None) -> str:
    if share is None:
        return "-"
    return f"{share['n_solved']} of {share['n']} ({share['low']:.0%} to {share['high']:.0%})"


def _lines(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Labelled lines about an environment kind."""
    properties, known, found = row["properties"] or {}, row["known"], row["measured"]
    yield "kind", row["kind"]
    if row["what"]:
        yield "what", row["what"]
    if row["missing"]:
        yield "not installed", row["missing"]
    elif row["extra"]:
        yield "extra", f"{row['extra']}, installed"
    if row["needs"]:
        yield "needs", f"{row['needs']}: rlhf environments {row['kind']} {row['needs'].split(', ')[0]}=..."
    for key, value in row["settings"].items():
        yield key, str(value)
    if row["suite"]:
        yield "settings of", f"the suite {row['suite']}"
    if properties:
        yield "declares", ", ".join(name for name in PROMISES if properties[name]) or "nothing"
        yield "package", properties["package"] or "none"
        yield "tasks", ", ".join(f"{n:,} {split}" for split, n in row["tasks"].items())
        yield "steps at most", str(row["max_steps"] or "its own")
    if known and set(known.values()) != {"-"}:
        yield (
            "known",
            f"random {known['random']}, oracle {known['oracle']}, of the first test tasks (docs/environments.md)",
        )
    if found:
        for player in ("random", "oracle"):
            share = found[player]
            text = f"{_solved(share)}, mean score {share['score']:.2f}, {share['steps']:.1f} steps" if share else "-"
            yield player, text
        yield "steps per s", f"{found['steps_per_s']:,.0f}" if found["steps_per_s"] else "-"
        yield "start-up", f"{found['startup_s']:.2f} s"
        yield "memory", f"{found['memory_mb']:.0f} MB at most"
