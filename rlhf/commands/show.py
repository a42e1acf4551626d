"""`rlhf show`: the resolved recipe, and what it comes to."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rlhf.commands.output import AsJson, Overrides, command, print_json, results


@command
def show(
    recipe: Annotated[str, typer.Argument(help="A YAML file, a name from `rlhf recipes`, or a run folder.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show a recipe with every default, and its batch arithmetic: episodes, tokens, updates, memory.

    Nothing is trained and no weights are read.
    """
    from rlhf.commands.arithmetic import arithmetic
    from rlhf.recipe import dump, load
    from rlhf.recipe.checks import cautions
    from rlhf.recipe.model import values_of

    loaded = load(recipe, overrides or [])
    figures, warnings = arithmetic(loaded), cautions(loaded)
    if as_json:
        print_json({"recipe": values_of(loaded), "arithmetic": figures, "cautions": warnings})
        return
    console = results()
    console.print(dump(loaded), markup=False, soft_wrap=True)
    _print_figures(console, figures)
    for warning in warnings:
        console.print(f"[yellow]caution[/] {warning}", soft_wrap=True)


def _print_figures(console: Console, figures: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for stage in figures["stages"]:
        for row in _stage_rows(stage):
            table.add_row(*row)
    _add_policy(table, figures["policy"], figures["memory_bytes"])
    evaluation = figures["evaluation"]
    table.add_row(
        "evaluation",
        f"{evaluation['n_episodes']:,} episodes of {evaluation['split']}; the 95% interval is at most "
        f"{evaluation['half_width_at_half']:.1%} to each side",
    )
    for i, (setting, what) in enumerate(figures["cuts"].items()):
        table.add_row("cut" if i == 0 else "", f"{setting} ends {what}")
    console.print(table)


def _add_policy(table: Table, policy: dict[str, Any], memory: dict[str, Any] | None) -> None:
    if memory is None:
        table.add_row("policy", f"size and memory unknown until its configuration can be read: {policy['unknown']}")
        return
    table.add_row("policy", f"{policy['n_parameters']:,} parameters, {policy['n_trainable']:,} of them trained")
    names = ("weights", "gradients", "adam", "reference", *(n for n in ("critic", "engine") if memory[n]))
    parts = ", ".join(f"{name} {_size(memory[name])}" for name in names)
    table.add_row("memory", f"{_size(memory['training_total'])}: {parts}")
    cache, logits = _size(memory["max_kv_cache"]), _size(memory["max_logits"])
    table.add_row("", f"and at most {cache} of key/value cache, {logits} of logits; activations come on top")


def _stage_rows(stage: dict[str, Any]) -> list[tuple[str, str]]:
    if stage["kind"] == "supervised":
        updates = _count(stage["n_updates"], "update")
        if stage["n_episodes"]:
            kept = f"at most {_count(stage['n_demonstrations'], 'attempt')} imitated in {updates}"
            return [(stage["stage"], f"{_count(stage['n_episodes'], 'episode')}, {kept}")]
        return [(stage["stage"], f"{_count(stage['n_demonstrations'], 'demonstration')}, {updates}")]
    each = f"{_count(stage['episodes_per_step'], 'episode')} and {_count(stage['updates_per_step'], 'update')}"
    whole = f"{_count(stage['n_episodes'], 'episode')}, {_count(stage['n_updates'], 'update')}"
    branches = f"{stage['branches_per_step']:,} of these episodes branch off others of their task: at most "
    branches += f"{stage['max_shared_turns_per_step']:,} of the turns are replayed, not sampled"
    n_most = stage["max_rounds_per_step"] * stage["episodes_per_step"]
    rounds = f"a step draws up to {stage['max_rounds_per_step']} rounds, {n_most:,} episodes, for groups that differ"
    return [
        (stage["stage"], f"{_count(stage['n_steps'], 'step')} of {each}: {whole}"),
        *[("", rounds)] * (stage["max_rounds_per_step"] > 1),
        *[("", branches)] * bool(stage["branches_per_step"]),
        (
            "",
            f"a step has at most {stage['max_turns_per_step']:,} turns, {stage['max_sampled_tokens_per_step']:,} "
            f"sampled tokens, {stage['max_samples_per_step']:,} samples while contexts only grow",
        ),
    ]


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"
