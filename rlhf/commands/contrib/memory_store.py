"""`rlhf memory`: what an agent's store holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rlhf.commands.output import AsJson, command, print_json, results
from rlhf.errors import RecipeError, nearest
from rlhf.evaluation.folder import RECIPE, first_of, run_around, where_to_look

if TYPE_CHECKING:
    from agents.stores.entry import Entry
    from agents.stores.store import Store


@command
def memory(
    folder: Annotated[Path, typer.Argument(help="A run, checkpoint or exported model, or a file store.sqlite.")],
    kind: Annotated[str | None, typer.Option(help="Only entries of this kind: case, note, fact, topic, ...")] = None,
    task: Annotated[str | None, typer.Option(metavar="ID", help="Only entries that this task contributed to.")] = None,
    search: Annotated[str | None, typer.Option(metavar="WORDS", help="Only the best matches, best first.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries; the newest are kept.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the entries of an agent's memory store.

    Example: rlhf memory runs/my-run --search "red key"
    """
    from agents.stores.copies import check
    from agents.stores.store import Store

    path = _store_of(folder)
    check(path.parent)
    with Store(path) as store:
        every, tasks = store.entries(), store.tasks()
        found = _chosen(store, every, kind, search)
        _refuse_unknown_task(task, {one for of in tasks.values() for one in of})
        chosen = [entry for entry in found if task is None or task in tasks[entry.id]]
        shown = [_plain(store, entry, tasks[entry.id]) for entry in chosen[:limit]]
    kinds = dict(sorted(Counter(entry.kind for entry in every).items()))
    figures = {"n_entries": len(every), "n_chars": sum(len(entry.text) for entry in every), "kinds": kinds}
    if as_json:
        print_json({**figures, "n_found": len(chosen), "entries": shown})
        return
    of_kinds = ", ".join(f"{n} of kind {name}" for name, n in kinds.items())
    results().print(f"{len(every)} entries, {figures['n_chars']:,} characters{': ' if kinds else ''}{of_kinds}")
    results().print(_table(shown) if shown else "no entry is like this" if every else "nothing is stored yet")
    if len(shown) < len(chosen):
        results().print(f"{len(shown)} of {len(chosen)}; --limit shows more")


def _store_of(folder: Path) -> Path:
    from agents.stores.copies import FILE

    path = folder if folder.name == FILE else folder / FILE
    if path.is_file():
        return path
    got = f"no {FILE}" if folder.is_dir() else "another file" if folder.is_file() else "nothing of this name"
    below = sorted(one.parent for one in folder.glob(f"*/{FILE}")) if folder.is_dir() else []
    kind = _other_agent(folder)
    if below:
        got += f", and {len(below)} folders with one below it"
        hint = f"name one of them: {first_of(below)}"
    elif kind and folder.exists():
        got = f"the agent of this run is `{kind}`, which keeps no store"
        hint = "train one that does: agent={kind: remembering}"
    else:
        hint = where_to_look(folder)
    raise RecipeError(
        "there is no store here",
        where=str(folder),
        got=got,
        expected=f"a run, checkpoint or exported model whose agent is of kind remembering, or its {FILE}",
        hint=hint,
    )


def _other_agent(folder: Path) -> str:
    """Kind of the agent of the run at or around `folder`, where that agent has no memory."""
    from rlhf.recipe.text import parse

    run = folder if (folder / RECIPE).is_file() else run_around(folder)
    if run is None or not (run / RECIPE).is_file():
        return ""
    agent = (parse((run / RECIPE).read_text("utf-8"), str(run / RECIPE)) or {}).get("agent")
    kind = str(agent.get("kind", "")) if isinstance(agent, dict) else ""
    return "" if kind == "remembering" else kind


def _refuse_unknown_task(task: str | None, known: set[str]) -> None:
    if task is None or task in known or not known:
        return
    raise RecipeError(
        "the store has no entry of this task",
        where="--task",
        got=task,
        expected="the id of a task that contributed to an entry",
        hint=nearest(task, sorted(known)) or "the entries of `--json` have ids",
    )


def _chosen(store: Store, every: list[Entry], kind: str | None, search: str | None) -> list[Entry]:
    """Selected entries: those that match `search` best, else the newest first."""
    kinds = sorted({entry.kind for entry in every})
    if kind is not None and kinds and kind not in kinds:
        raise RecipeError(
            "the store has no entry of this kind",
            where="--kind",
            got=kind,
            expected=", ".join(kinds),
            hint=nearest(kind, kinds) or "use one of these",
        )
    entries = [entry for entry in every if kind in (None, entry.kind)]
    if search is None:
        return entries[::-1]
    return [hit.entry for hit in store.search(search, max(len(entries), 1), kind=kind)]


def _plain(store: Store, entry: Entry, tasks: frozenset[str]) -> dict[str, Any]:
    links = [
        {"to": link.target, "relation": link.relation} for link in store.links(entry.id) if link.source == entry.id
    ]
    return {
        "id": entry.id,
        "kind": entry.kind,
        "version": entry.version,
        "tasks": sorted(tasks),
        "text": entry.text,
        "earlier": store.versions(entry.id)[:-1],
        "links": links,
        "fields": dict(entry.fields),
    }


def _table(shown: list[dict[str, Any]]) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("id", "kind", "version", "tasks", "text"):
        table.add_column(name, overflow="fold")
    for row in shown:
        text = "; ".join([row["text"], *(f"{name}: {value}" for name, value in row["fields"].items())])
        if row["links"]:
            text += f" -> {', '.join(str(link['to']) for link in row['links'])}"
        cells = (str(row["id"]), row["kind"], str(row["version"]), ", ".join(row["tasks"]), text)
        table.add_row(*(Text("".join(c if c.isprintable() else " " for c in cell)) for cell in cells))
    return table
