"""`rlhf train`: run a recipe, or go on with a run."""

from __future__ import annotations

import os
from asyncio import CancelledError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from rlhf.commands.check_availability import (
    refuse_absent_engine,
    refuse_absent_hub,
    refuse_absent_models,
    refuse_absent_quantization,
    refuse_absent_trackers,
    refuse_unreachable_models,
)
from rlhf.commands.output import (
    STATE,
    AsJson,
    Overrides,
    Stopped,
    caution,
    command,
    errors,
    print_json,
    quiet_libraries,
    results,
)
from rlhf.errors import RecipeError, RlhfError, UsageError
from rlhf.estimate.memory_preflight import refuse_too_large
from rlhf.evaluation.folder import no_run
from rlhf.given_parts import how_to_resume
from rlhf.processes import n_here, n_wanted, take_one_gpu

if TYPE_CHECKING:
    from rlhf.recipe import Recipe


@command
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A YAML file, or a name from `rlhf recipes`. Omit with --resume.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: runs/NAME-seedN).")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Resume the run in this folder from its newest checkpoint.")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Number of trainer processes on this machine.")] = 1,
    memory_check: Annotated[
        bool, typer.Option(help="Fail before training if the estimated memory exceeds what is free.")
    ] = True,
    profile: Annotated[
        int | None,
        typer.Option(metavar="N", help="Profile N steps: a trace in RUN/profile and a table of time per phase."),
    ] = None,
    view: Annotated[bool, typer.Option("--view", help="Open the viewer of the run, as `rlhf view` does.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a policy from a recipe.

    Ctrl-C and SIGTERM write a checkpoint, stop the run and print the command that resumes it.

    Several trainer processes, started by --nproc or a launcher such as torchrun, need trainer: {kind: deepspeed} or
    {kind: fsdp} in every stage. A run can be resumed with another trainer and another number of processes: --resume RUN
    stages.0.trainer.zero_stage=3 --nproc 2. Change numbers such as a learning rate from here on with --resume RUN
    stages.1.optimizer.lr=1e-4, and extend its last stage, finished or not, with --resume RUN steps=60.

    Examples: rlhf train quickstart; rlhf train quickstart seed=2 stages.1.steps=20; rlhf train --resume runs/NAME
    """
    if profile is not None:
        _check_profile(profile)
    if resume is not None:
        loaded = recipe_of_run(resume, recipe, overrides or [], out)
    elif recipe is None:
        raise RecipeError(
            "nothing to train",
            where="rlhf train",
            got="no recipe",
            expected="a YAML file, or a name from `rlhf recipes`",
            hint="rlhf train quickstart",
        )
    else:
        from rlhf.recipe import load

        loaded = load(recipe, overrides or [])
    _refuse_processes_beside_ray(loaded, nproc)
    if nproc > 1 and n_wanted() == 1:
        if memory_check:
            refuse_too_large(loaded, nproc, nproc, launches=True)
        arguments = [a for a in (recipe, *(overrides or [])) if a is not None]
        arguments += [] if profile is None else ["--profile", str(profile)]
        _launch(loaded, nproc, out, resume, arguments, as_json, view)
        return
    refuse_before(loaded, is_resumed=resume is not None, memory_check=memory_check)
    result = _run(loaded, out, resume, profile, view and _is_main())
    if not _is_main():
        return
    if as_json:
        _say_problems(Path(result["run"]))
        print_json(result)
    else:
        _print_result(result)
        _say_problems(Path(result["run"]))


def _refuse_processes_beside_ray(recipe: Recipe, nproc: int) -> None:
    n = max(nproc, n_wanted())
    if n > 1 and recipe.cluster.is_on:
        raise RecipeError(
            "a run on Ray starts its trainer processes itself",
            where="--nproc" if nproc > 1 else "WORLD_SIZE",
            got=f"{n}, with cluster.rollout_workers: {recipe.cluster.rollout_workers}",
            expected=f"1: the processes are cluster.learners, {recipe.cluster.learners} here",
            hint=f"rlhf train without {'--nproc' if nproc > 1 else 'a launcher'}, and cluster.learners={n}",
        )


def refuse_before(recipe: Recipe, *, is_resumed: bool, memory_check: bool = True) -> None:
    """Take this process's GPU, print cautions, and refuse what cannot be trained here, before torch does anything.

    Raises:
        RlhfError: an engine, a model or memory cannot be had, or the parts of the recipe do not train.
    """
    take_one_gpu()
    if not is_resumed:
        _refuse_untrainable(recipe)
    for told in _cautions(recipe) if _is_main() else ():
        caution(told)
    refuse_absent_engine(recipe)
    refuse_absent_models(recipe)
    if _is_main():
        refuse_unreachable_models(recipe)
    refuse_absent_quantization(recipe)
    refuse_absent_trackers(recipe)
    if _is_main():
        refuse_absent_hub(recipe)
    _say_device(recipe)
    if memory_check and not recipe.cluster.is_on:  # of whose machines nothing is known here
        refuse_too_large(recipe, n_wanted(), n_here())


def _say_device(recipe: Recipe) -> None:
    """Refuse what the GPU of this process cannot do; the first process prints what is chosen for the device."""
    from rlhf import device
    from rlhf.estimate.device_choice import choices, refuse_for

    here = device.present()
    refuse_for(recipe, here)
    if _is_main():
        for what, chosen in choices(recipe, here, n_wanted()):
            if not here.is_gpu and what == "device":
                continue
            errors().print(f"{what}: {chosen}", soft_wrap=True, markup=False)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _run(recipe: Recipe, out: Path | None, resume: Path | None, profile: int | None, view: bool) -> dict[str, Any]:
    from rlhf.build.model_folder import pushed
    from rlhf.build.processes import joined
    from rlhf.build.resume import run_folder
    from rlhf.build.train import train as run
    from rlhf.training.run import Interrupted

    quiet_libraries()
    folder = out or Path("runs")
    try:
        if recipe.cluster.is_on:
            if profile is not None:
                raise RecipeError(
                    "a run on Ray is not profiled",
                    where="--profile",
                    got=f"{profile}, with cluster.rollout_workers: {recipe.cluster.rollout_workers}",
                    expected="a run in processes of one machine",
                    hint="leave cluster out for the steps to profile",
                )
            from rlhf.build.cluster import train_on_ray

            with run_folder(recipe, out, resume, lock=False) as folder, _viewer(folder, view):
                found = train_on_ray(recipe, folder.resolve(), is_resumed=resume is not None, console=errors())
                return {**found, "run": str(folder)} | pushed(recipe, folder, errors().print)
        with joined(recipe), run_folder(recipe, out, resume) as folder, _viewer(folder, view):
            result = run(recipe, folder, resume=resume, console=errors(), profile=profile)
            return result | pushed(recipe, folder, errors().print)
    except (Interrupted, CancelledError, KeyboardInterrupt) as error:
        what, where = (error.what, error.where) if isinstance(error, Interrupted) else ("stopped", str(folder))
        hint = "start it again with the same command"
        if (folder / "recipe.yaml").is_file():
            hint = how_to_resume(folder)
        raise Stopped(what, where=where, hint=hint) from error


@contextmanager
def _viewer(folder: Path, is_wanted: bool) -> Iterator[None]:
    """Context in which a viewer shows the run where one is wanted."""
    from rlhf.commands.view import shown_beside

    with shown_beside(folder) if is_wanted else nullcontext():
        yield


def _check_profile(n: int) -> None:
    if n < 1:
        raise UsageError(
            "this number of steps cannot be profiled",
            where="--profile",
            got=str(n),
            expected="a number of steps, 1 or more",
            hint="--profile 3 is enough to see where the time goes",
        )


def _launch(
    recipe: Recipe, n: int, out: Path | None, resume: Path | None, arguments: list[str], as_json: bool, view: bool
) -> None:
    from rlhf.build.resume import run_folder
    from rlhf.commands.launch import launch
    from rlhf.recipe.compatibility import check_processes

    check_processes(recipe, n)
    # All of them fit, or were told to start anyway.
    flags = ["--no-memory-check", *["--json"] * as_json, *["--debug"] * STATE.debug]
    with run_folder(recipe, out, resume, lock=False) as folder, _viewer(folder, view):
        place = ["--resume", str(resume)] if resume else ["--out", str(folder)]
        code = launch(["train", *arguments, *place, *flags], n, folder)
        if code:
            raise typer.Exit(code)


def recipe_of_run(run: Path, recipe: str | None, overrides: list[str], out: Path | None) -> Recipe:
    """Load the run's own recipe. Whatever else the command line says must agree with it, but for what may differ."""
    from rlhf.build.revise import OF_TRAINER, REVISABLE, is_of, revisions
    from rlhf.data.report import shorten
    from rlhf.recipe import find, load
    from rlhf.recipe.model import differing, values_of
    from rlhf.recipe.text import read

    if not (run / "recipe.yaml").is_file():
        raise no_run(run, f"--resume {run}")
    if out is not None:
        raise RecipeError(
            "a run resumes in its own folder",
            where=f"--out {out}",
            got=f"--resume {run}",
            expected="one of the two",
            hint="remove --out",
        )
    own = load(run)
    if recipe is not None and "=" in recipe:  # the recipe was left out, and this is the first override
        overrides, recipe = [recipe, *overrides], None
    overrides = [f"stages.{len(own.stages) - 1}.{o}" if o.startswith("steps=") else o for o in overrides]
    # Before the keys are read: those of another kind are others, and would be taken for the mistake.
    if other := next(_other_kinds(values_of(own), read(find(recipe or run), overrides)), None):
        key, kind, before = other
        raise RecipeError(
            "a run resumes with its own recipe",
            where=key,
            got=kind,
            expected=before,
            hint=f"rlhf train --resume {run}, or start a new run",
        )
    asked = load(recipe or run, overrides)
    mine, theirs = values_of(own), values_of(asked)
    may_differ = revisions(mine, theirs)
    others = [
        f"{key}: {shorten(new)} instead of {shorten(old)}"
        for key, (old, new) in differing(mine, theirs).items()
        if key not in may_differ and not is_of(key, OF_TRAINER)
    ]
    if others:
        raise RecipeError(
            "a run resumes with its own recipe",
            where=f"--resume {run}",
            got=f"another value of {', '.join(others)}",
            expected=f"the recipe in {run / 'recipe.yaml'}; what may differ is {', '.join(OF_TRAINER)}, and numbers of "
            f"what is not finished: {', '.join(REVISABLE)}",
            hint=f"rlhf train --resume {run}, or start a new run",
        )
    return asked


def _other_kinds(mine: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the dotted key of each kind that differs between two recipes, with both names."""
    from rlhf.build.revise import OF_TRAINER, is_of
    from rlhf.renamed import RENAMED_KINDS

    if isinstance(mine, list) and isinstance(theirs, list):
        mine, theirs = dict(enumerate(mine)), dict(enumerate(theirs))
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping) or is_of(path, OF_TRAINER):
        return
    before, kind = str(mine.get("kind")), str(theirs.get("kind"))
    if any(renamed.get(kind) == before for renamed in RENAMED_KINDS.values()):
        kind = before
    if "kind" in mine and "kind" in theirs and kind != before and not (":" in kind and ":" in before):
        yield f"{path}.kind", kind, before  # one class of a file has several names: how it is loaded says whether it is
        return
    for k in (k for k in mine if k in theirs):
        yield from _other_kinds(mine[k], theirs[k], f"{path}.{k}" if path else str(k))


def _refuse_untrainable(recipe: Recipe) -> None:
    """Refuse what may be measured as it is: a caution would only say the same before it."""
    from rlhf.recipe.compatibility import check_seated
    from rlhf.recipe.splits import refuse_judging

    refuse_judging(recipe)
    check_seated(recipe)


def _cautions(recipe: Recipe) -> list[str]:
    from rlhf.recipe.checks import cautions

    return cautions(recipe)


def _say_problems(run: Path) -> None:
    """Print findings of the report because of which the results may mean nothing."""
    from rlhf.evaluation.contrib.findings import findings
    from rlhf.evaluation.run_data import RunData

    with suppress(RlhfError):  # a file that somebody has changed: the report says it
        for found in findings(RunData.read(run), caution):
            if found.level == "problem":
                caution(f"{found.name}: {found.value}. {found.words}{found.hint and f' {found.hint.capitalize()}.'}")


def _print_result(result: dict[str, Any]) -> None:
    console = results()
    for when in ("before", "after"):
        success, interval = result.get(f"success_{when}"), result.get(f"interval_{when}")
        if success is not None:
            within = f"  (95% interval {interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
            console.print(Text.assemble(f"success {when}: ", (f"{success:.1%}", "bold"), within))
    console.print(f"trained in {result['train_s']:.0f} s on {result['n_episodes']} episodes")
    console.print(f"run     {result['run']}", soft_wrap=True)
    console.print(f"report  {result['report']}", soft_wrap=True)
    if result.get("hub"):
        console.print(f"hub     {result['hub']}", soft_wrap=True)
