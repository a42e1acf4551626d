"""`rlhf train`: run a recipe, or go on with a run."""

from __future__ import annotations

import os
import re
from asyncio import CancelledError
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.commands.fits import refuse_too_large
from rlhf.commands.output import (
    STATE,
    AsJson,
    Overrides,
    Stopped,
    command,
    errors,
    print_json,
    quiet_libraries,
    results,
)
from rlhf.commands.ready import refuse_absent_engine, refuse_absent_models, refuse_absent_quantization
from rlhf.errors import RecipeError
from rlhf.evaluation.folder import nearest_beside
from rlhf.processes import n_here, n_wanted, take_one_gpu

if TYPE_CHECKING:
    from rlhf.recipe import Recipe

#: Keys that say where updates are computed, not which.
_OF_TRAINER = re.compile(r"stages\.\d+\.trainer(\.|$)")


@command
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A YAML file, or a name from `rlhf recipes`; left out with --resume.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME-seedN if left out.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder.")] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this machine that share every step.")] = 1,
    memory_check: Annotated[
        bool, typer.Option(help="Refuse a run that cannot fit into the memory that is free.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Train a policy from a recipe.

    Ctrl-C writes a checkpoint and says how to go on; SIGTERM does the same.

    Several processes, by --nproc or a launcher such as torchrun, need stages with trainer: {kind: deepspeed}. A run may
    go on with another trainer and in another number of processes: --resume RUN stages.0.trainer.zero=3 --nproc 2.

    Examples: rlhf train quickstart; rlhf train quickstart seed=2 stages.1.steps=20; rlhf train --resume runs/NAME
    """
    if resume is not None:
        loaded = _recipe_of_run(resume, recipe, overrides or [], out)
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
    if nproc > 1 and n_wanted() == 1:
        if memory_check:
            refuse_too_large(loaded, nproc, nproc, launches=True)
        _launch(loaded, nproc, out, resume, [a for a in (recipe, *(overrides or [])) if a is not None], as_json)
        return
    take_one_gpu()
    is_main = os.environ.get("RANK", "0") == "0"
    for caution in _cautions(loaded) if is_main else ():
        errors().print(f"[yellow]caution[/] {caution}", soft_wrap=True)
    refuse_absent_engine(loaded)
    refuse_absent_models(loaded)
    refuse_absent_quantization(loaded)
    if memory_check:
        refuse_too_large(loaded, n_wanted(), n_here())
    result = _run(loaded, out, resume)
    if not is_main:
        return
    if as_json:
        print_json(result)
    else:
        _print_result(result)


def _run(recipe: Recipe, out: Path | None, resume: Path | None) -> dict[str, Any]:
    from rlhf.build import train as run
    from rlhf.build_processes import joined
    from rlhf.trainers.run import Interrupted

    quiet_libraries()
    folder = out or Path("runs")
    try:
        with joined(recipe) as here:
            folder = resume or here.from_main(_new_folder(recipe, out) if here.is_main else folder, "the folder")
            return run(recipe, folder, resume=resume, console=errors())
    except (Interrupted, CancelledError, KeyboardInterrupt) as error:
        where, got = (error.where, error.got) if isinstance(error, Interrupted) else (str(folder), "interrupted")
        hint = f"rlhf train --resume {folder}" if (folder / "recipe.yaml").is_file() else ""
        raise Stopped("stopped", where=where, got=got, hint=hint) from error


def _launch(recipe: Recipe, n: int, out: Path | None, resume: Path | None, arguments: list[str], as_json: bool) -> None:
    from rlhf.commands.launch import launch
    from rlhf.recipe.trainer_checks import check_processes

    check_processes(recipe, n)
    folder = resume or _new_folder(recipe, out)
    place = ["--resume", str(resume)] if resume else ["--out", str(folder)]
    # All of them fit, or were told to start anyway.
    flags = ["--no-memory-check", *["--json"] * as_json, *["--debug"] * STATE.debug]
    code = launch(["train", *arguments, *place, *flags], n, folder)
    if code:
        raise typer.Exit(code)


def _new_folder(recipe: Recipe, out: Path | None) -> Path:
    from rlhf.build import new_folder

    try:
        return new_folder(recipe, out)
    except OSError as error:
        raise RecipeError(
            "the folder of the run cannot be made",
            where=f"--out {out}" if out else "runs/",
            got=error.strerror or str(error),
            expected="a place to write",
            hint="give another: --out FOLDER",
        ) from error


def _recipe_of_run(run: Path, recipe: str | None, overrides: list[str], out: Path | None) -> Recipe:
    """Load the run's own recipe. Whatever else the command line says must agree with it, but for the trainer."""
    from rlhf.recipe import load
    from rlhf.recipe.model import values_of

    if not (run / "recipe.yaml").is_file():
        raise RecipeError(
            "there is no run in this folder",
            where=f"--resume {run}",
            got="no such folder" if not run.is_dir() else "no recipe.yaml",
            expected="a folder that `rlhf train` made",
            hint=nearest_beside(run) or "look into runs/",
        )
    if out is not None:
        raise RecipeError(
            "a run goes on in its own folder",
            where=f"--out {out}",
            got=f"--resume {run}",
            expected="one of the two",
            hint="remove --out",
        )
    own = load(run)
    if recipe is not None and "=" in recipe:  # the recipe was left out, and this is the first override
        overrides, recipe = [recipe, *overrides], None
    asked = load(recipe or run, overrides)
    differing = [key for key in _differing(values_of(own), values_of(asked)) if not _OF_TRAINER.match(key)]
    if differing:
        raise RecipeError(
            "a run goes on with the recipe it began with",
            where=f"--resume {run}",
            got=f"another value of {', '.join(differing)}",
            expected=f"the recipe in {run / 'recipe.yaml'}; stages.N.trainer alone may differ",
            hint=f"rlhf train --resume {run}, or start a new run",
        )
    return asked


def _differing(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Return the dotted keys, as an override has them, that two recipes give different values."""
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        mine, theirs = dict(enumerate(mine)), dict(enumerate(theirs))
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return [] if mine == theirs else [path]
    keys = [*mine, *(key for key in theirs if key not in mine)]
    return [p for k in keys for p in _differing(mine.get(k), theirs.get(k), f"{path}.{k}" if path else str(k))]


def _cautions(recipe: Recipe) -> list[str]:
    from rlhf.recipe.checks import cautions

    return cautions(recipe)


def _print_result(result: dict[str, Any]) -> None:
    console = results()
    for when in ("before", "after"):
        success, interval = result.get(f"success_{when}"), result.get(f"interval_{when}")
        if success is not None:
            text = f"success {when}: [bold]{success:.1%}[/]"
            console.print(text + (f"  (95% interval {interval[0]:.1%} to {interval[1]:.1%})" if interval else ""))
    console.print(f"trained in {result['train_s']:.0f} s on {result['n_episodes']} episodes")
    console.print(f"run     {result['run']}", soft_wrap=True)
    console.print(f"report  {result['report']}", soft_wrap=True)
