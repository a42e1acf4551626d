"""`rlhf show`: the resolved recipe, with its batch sizes, memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rlhf.commands.check_availability import refuse_absent_models, refuse_unreachable_models
from rlhf.commands.output import AsJson, Overrides, command, print_json, results
from rlhf.data.report import counted
from rlhf.errors import RlhfError
from rlhf.estimate.memory_preflight import size_of
from rlhf.evaluation.wording import duration_text
from rlhf.terminal import CleanConsole

if TYPE_CHECKING:
    from rlhf.recipe import Recipe


@command
def show(
    recipe: Annotated[str, typer.Argument(help="A YAML file, a name from `rlhf recipes`, or a run folder.")],
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(min=1, help="Number of trainer processes to plan for.")] = 1,
    trial: Annotated[
        int | None, typer.Option(min=1, help="Run this many steps of each stage and measure time and memory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a recipe with all defaults and its estimates: episodes, tokens, updates, memory per process.

    Nothing is trained and no weights are loaded, unless --trial measures time and memory in a temporary folder.
    Missing data and unreachable models are cautions, as they may lie on another machine: the exit code is 0.
    """
    from rlhf.evaluation.changes import read_changes
    from rlhf.recipe import dump, find, load
    from rlhf.recipe.checks import cautions
    from rlhf.recipe.compatibility import check_processes
    from rlhf.recipe.model import values_of

    loaded = load(recipe, overrides or [])
    refuse_absent_models(loaded)
    nproc = max(nproc, loaded.cluster.learners)
    check_processes(loaded, nproc)
    console = results()
    if not as_json:  # the figures take a model's shapes, whose code takes seconds to load: there is something to read
        console.print(dump(loaded), markup=False, soft_wrap=True)
    from rlhf.estimate.arithmetic import arithmetic

    figures = arithmetic(loaded, nproc)
    warnings = [*cautions(loaded), *_unusable(loaded), *_unprompted(loaded, figures["policy"].get("max_context"))]
    measured, changes = _tried(loaded, trial, nproc) if trial else None, read_changes(find(recipe).parent)
    if as_json:
        shown: dict[str, Any] = {"recipe": values_of(loaded), "arithmetic": figures, "cautions": warnings}
        shown |= {"changes": [asdict(change) for change in changes]} if changes else {}
        print_json(shown | ({"trial": measured} if measured else {}))
        return
    _print_figures(console, figures, measured)
    _print_device(console, loaded, nproc)
    for change in changes:
        console.print(Text.assemble(("changed in mid-run", "bold"), " ", change.text), soft_wrap=True)
    for warning in warnings:
        console.print(Text.assemble(("caution", "yellow"), " ", warning), soft_wrap=True)


def _unusable(recipe: Recipe) -> Iterator[str]:
    """Warnings for errors that `rlhf train` would raise of data and models, which may lie on another machine."""
    from environments.base import properties_of
    from rlhf.build.pair_data import check_sources
    from rlhf.build.supervised_data import check_data
    from rlhf.rollout.tasks import tasks_of

    def tasks() -> None:
        if properties_of(recipe.environment).judged_by_rewards:
            tasks_of(recipe.environment, recipe.evaluation.split, 1)

    models = partial(refuse_unreachable_models, recipe)
    for check in (models, tasks, lambda: check_sources(recipe), lambda: check_data(recipe)):
        try:
            check()
        except RlhfError as error:
            yield f"rlhf train would refuse this: {error}"


def _unprompted(recipe: Recipe, max_context: int | None) -> Iterator[str]:
    """Warnings for limits under which one generation may fill the context of a pretrained model, where it is known."""
    if max_context is None:
        return
    of_stages = [(f"stages[{i}].limits", stage.limits) for i, stage in enumerate(recipe.stages) if stage.limits]
    for path, limits in [("limits", recipe.limits), *of_stages]:
        for problem in limits.unprompted(min(max_context, limits.max_context or max_context), path):
            yield f"{problem.where}: {problem.what}: {problem.got}, and the context has {max_context} tokens; lower it"


def _tried(recipe: Recipe, n_steps: int, n_processes: int) -> dict[str, Any]:
    from rlhf.commands.trial import try_out
    from rlhf.errors import ModelError
    from rlhf.estimate.figures import total
    from rlhf.estimate.memory import estimates

    found = try_out(recipe, n_steps, n_processes)
    try:
        of_each = estimates(recipe, n_processes)
    except ModelError:
        return found
    for figures, estimate in zip(found["stages"], of_each, strict=True):
        figures["estimated_bytes"] = total(estimate.parts_of(host=False) if found["on_gpu"] else estimate.parts)
    return found


def _print_figures(console: CleanConsole, figures: dict[str, Any], measured: dict[str, Any] | None) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for stage in figures["stages"]:
        for row in _stage_rows(stage):
            table.add_row(*row)
    _add_policy(table, figures["policy"], figures["memory_bytes"])
    for row in _trial_rows(measured) if measured else ():
        table.add_row(*row)
    evaluation = figures["evaluation"]
    table.add_row(
        "evaluation",
        f"{evaluation['n_episodes']:,} episodes of {evaluation['split']}; the 95% interval is about "
        f"{evaluation['half_width_at_half']:.1%} to each side",
    )
    for i, (setting, what) in enumerate(figures["cuts"].items()):
        table.add_row("cut" if i == 0 else "", f"{setting} ends {what}")
    console.print(table)


def _print_device(console: CleanConsole, recipe: Recipe, n_processes: int) -> None:
    """Say what is chosen for the device here, and whether the recipe fits."""
    from rlhf import device
    from rlhf.estimate.device_choice import budget_for, choices, refuse_for

    here = device.present()
    for what, chosen in choices(recipe, here, n_processes):
        console.print(Text.assemble((what, "bold"), " ", chosen), soft_wrap=True)
    fits = budget_for(recipe, here, n_processes)
    if fits is not None:
        console.print(Text.assemble(("on this GPU", "bold"), " ", fits), soft_wrap=True)
    refuse_for(recipe, here)


#: What is in memory throughout, and what comes and goes, as a person reads it.
_HELD = {
    "weights": "weights",
    "gradients": "gradients",
    "masters": "weights in float32",
    "moments": "moments",
    "buffers": "buffers of ZeRO",
    "reference": "reference",
    "teacher": "teacher",
    "critic": "critic",
    "rewards": "models of rewards",
    "reward_copy": "reward model that is trained",
    "judges": "judges",
    "background": "checkpoint being written",
    "opponents": "older versions of the policy",
    "engine": "engine's copy",
    "kv_cache": "key/value cache",
    "program": "program",
}
_PASSING = {"activations": "activations", "logits": "logits", "critic_activations": "activations of the critic"}


def _add_policy(table: Table, policy: dict[str, Any], memory: dict[str, Any] | None) -> None:
    if memory is None:
        table.add_row("policy", f"size and memory unknown until its configuration can be read: {policy['unknown']}")
        return
    table.add_row("policy", f"{policy['n_parameters']:,} parameters, {policy['n_trainable']:,} of them trained")
    n, host = memory["n_processes"], memory["on_host"] - memory["program"]
    each = f"in each of {n} processes" if n > 1 else "in one process"
    table.add_row("memory", f"{size_of(memory['peak'])} {each}, at the highest, in {memory['stage']}")
    for names in (_HELD, _PASSING):
        parts = [f"{text} {size_of(memory[name])}" for name, text in names.items() if memory[name]]
        table.add_row("", ("throughout: " if names is _HELD else "for a while: ") + ", ".join(parts))
    if host:
        table.add_row("", f"with a GPU, {size_of(host)} and the program lie in the machine's memory")
    if memory["max_kv_cache"] > memory["kv_cache"]:
        table.add_row("", f"the key/value cache may grow to {size_of(memory['max_kv_cache'])}: see limits.max_context")
    if not memory["is_whole"]:
        table.add_row("", "activations and logits come on top: those of this model cannot be found beforehand")


def _trial_rows(measured: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return time and memory of each stage, measured and estimated."""
    for stage in measured["stages"]:
        name = f"trial of {stage['stage']}"
        if stage["step_s"]:
            each = ", ".join(f"{seconds:.1f}" for seconds in stage["step_s"])
            yield (
                name,
                f"{each} s for its first steps, so {duration_text(stage['stage_s'])} for all, without evaluations and "
                "checkpoints",
            )
            name = ""
        if stage["peak_bytes"] is not None:
            where = "of the GPU " if measured["on_gpu"] else ""
            expected = f", {size_of(stage['estimated_bytes'])} estimated" if "estimated_bytes" in stage else ""
            yield name, f"{size_of(stage['peak_bytes'])} {where}at the highest so far{expected}"


def _stage_rows(stage: dict[str, Any]) -> list[tuple[str, str]]:
    if stage["kind"] == "supervised" and stage["n_updates"] is None:
        return [(stage["stage"], "the rows of a file, or the attempts of a run")]
    if stage["kind"] == "supervised":
        updates = counted(stage["n_updates"], "update")
        if stage["n_episodes"]:
            kept = f"at most {counted(stage['n_demonstrations'], 'attempt')} imitated in {updates}"
            return [(stage["stage"], f"{counted(stage['n_episodes'], 'episode')}, {kept}")]
        return [(stage["stage"], f"{counted(stage['n_demonstrations'], 'demonstration')}, {updates}")]
    if "max_pairs" in stage:
        n, what = stage["max_pairs"], stage["counted"]
        pairs = f"at most {counted(n, what)}" if n else f"the {what}s of a file or a run"
        updates = f", at most {counted(stage['n_updates'], 'update')}" if stage["n_updates"] else ""
        episodes = f"{counted(stage['n_episodes'], 'episode')}, " if stage["n_episodes"] else ""
        return [(stage["stage"], f"{episodes}{pairs}{updates}")]
    each = f"{counted(stage['episodes_per_step'], 'episode')} and {counted(stage['updates_per_step'], 'update')}"
    whole = f"{counted(stage['n_episodes'], 'episode')}, {counted(stage['n_updates'], 'update')}"
    branches = f"{stage['branches_per_step']:,} of these episodes branch off others of their task: at most "
    branches += f"{stage['max_shared_turns_per_step']:,} of the turns are replayed, not sampled"
    n_most = stage["max_rounds_per_step"] * stage["episodes_per_step"]
    rounds = f"a step draws up to {stage['max_rounds_per_step']} rounds, {n_most:,} episodes, for groups that differ"
    return [
        (stage["stage"], f"{counted(stage['n_steps'], 'step')} of {each}: {whole}"),
        *[("", rounds)] * (stage["max_rounds_per_step"] > 1),
        *[("", branches)] * bool(stage["branches_per_step"]),
        (
            "",
            f"a step has at most {stage['max_turns_per_step']:,} turns, {stage['max_sampled_tokens_per_step']:,} "
            f"sampled tokens, {stage['max_samples_per_step']:,} samples while contexts only grow",
        ),
        *([("", _ahead_text(stage["asynchrony"]))] if "asynchrony" in stage else []),
        *([("", _cluster_text(stage["cluster"]))] if "cluster" in stage else []),
    ]


def _ahead_text(ahead: dict[str, Any]) -> str:
    """Text on asynchronous rollouts: lag, groups in flight and correction."""
    repeated = (
        "the run repeats itself to the bit"
        if ahead["weight_update"] == "deterministic"
        else "the clock says by which policy"
    )
    waits = "waits for them" if ahead["checkpoint"] == "drain" else "begins them again"
    return (
        f"attempts are made ahead: trained tokens are at most {counted(ahead['max_age'], 'update')} old, corrected by "
        f"{ahead['correction']}; at most {counted(ahead['max_groups'], 'group')} run or wait, and a checkpoint "
        f"{waits}; {repeated}"
    )


def _cluster_text(cluster: dict[str, Any]) -> str:
    """Summary of the processes on Ray."""
    workers = f"{counted(cluster['n_rollout_workers'], 'rollout worker')} of "
    workers += f"{counted(cluster['groups_of_a_worker'], 'group')} at a time"
    servers = counted(cluster["n_servers"], "server")
    servers += f", {cluster['n_eval_servers']} for evaluations" if cluster["n_eval_servers"] else ""
    return (
        f"on Ray: {counted(cluster['n_learners'], 'learner')}, {workers}, {servers}; "
        f"takes {counted(cluster['n_cpus'], 'CPU')}, and a GPU for each learner and server where there are any"
    )
