"""`rlhf evaluate`: measure a policy on tasks it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.commands.output import AsJson, Overrides, command, errors, print_json, quiet_libraries, results
from rlhf.commands.ready import refuse_absent_engine
from rlhf.errors import CheckpointError, RecipeError

#: Sections of a recipe that an evaluation looks at; `seed` draws what a checkpoint does not hold.
SECTIONS = ("seed", "name", "environment", "agent", "rewards", "limits", "engine", "evaluation", "policy")

_LIVE_POLICY_KEYS = ("dtype", "chat_template_kwargs")


@command
def evaluate(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe, a run, or a checkpoint of one.")],
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint or model folder; the newest of the run if left out.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Tasks to attempt; evaluation.split if left out.")] = None,
    n: Annotated[int | None, typer.Option(min=1, help="How many tasks; evaluation.n_tasks if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure success with its 95% interval on a fixed set of tasks.

    Examples: rlhf evaluate runs/quickstart-seed0; rlhf evaluate RECIPE policy.path=./my_model --n 500
    """
    from rlhf.recipe import load

    asked = [*(overrides or [])]
    # The split goes through the recipe, so that a name that the environment does not know is found before loading.
    asked += [f"evaluation.split={split}"] if split else []
    recipe, folder = recipe_and_checkpoint(recipe, checkpoint)
    loaded = load(recipe, asked)
    refuse_ignored(asked, folder, "an evaluation", SECTIONS)
    refuse_absent_engine(loaded)
    from rlhf.build import evaluate as measure

    quiet_libraries()
    result = measure(loaded, checkpoint=folder, split=None, n_tasks=n, console=errors())
    n_asked = (n or loaded.evaluation.n_tasks) * loaded.evaluation.attempts
    if result["n"] + result["n_errors"] < n_asked:
        errors().print(f"[yellow]caution[/] the split '{result['split']}' has fewer tasks than were asked for")
    if as_json:
        print_json(result)
    else:
        _print_result(result)


def refuse_ignored(overrides: list[str], checkpoint: Path | None, what: str, sections: Sequence[str]) -> None:
    """Raise RecipeError for an override of a key that `what` would not look at: it looks at those of `sections`."""
    for override in overrides:
        key = override.partition("=")[0]
        section, _, name = key.partition(".")
        # A checkpoint brings its own weights and adapter; how they are loaded and prompted is still the recipe's.
        is_fixed = section == "policy" and checkpoint is not None and name.partition(".")[0] not in _LIVE_POLICY_KEYS
        if section.partition("[")[0] not in sections or is_fixed:
            raise RecipeError(
                f"this key has no effect on {what}",
                where=key,
                got=override,
                expected=f"a key of {', '.join(s for s in sections if s != 'policy' or checkpoint is None)}",
                hint="remove it" + (f"; the policy is the one in {checkpoint}" if is_fixed else ""),
            )


def recipe_and_checkpoint(target: str, checkpoint: Path | None) -> tuple[str, Path | None]:
    """The recipe that `target` names, and the checkpoint asked for, the one it is, or the newest of the run it is.

    Raises:
        CheckpointError: the checkpoint asked for is no folder, or the run has none.
        RecipeError: the target is a model without a run around it.
    """
    if checkpoint is not None and not checkpoint.is_dir():
        raise CheckpointError(
            "there is no such folder",
            where=f"--checkpoint {checkpoint}",
            got="a file" if checkpoint.exists() else "nothing",
            expected="a checkpoint of a run, or a model folder",
            hint="look into checkpoints/ of the run; a model on a hub is policy={kind: pretrained, path: NAME}",
        )
    folder = Path(target)
    if (folder.parent / "state.json").is_file():  # the policy in a checkpoint
        folder = folder.parent
    run = folder.parent.parent
    if (folder / "state.json").is_file() and (run / "recipe.yaml").is_file():
        return str(run), checkpoint if checkpoint is not None else folder
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RecipeError(
            "this is a model, and says nothing of tasks or rewards",
            where=target,
            got="a model folder",
            expected="a recipe, a run, or a checkpoint of one",
            hint=f"name a recipe, and this folder with --checkpoint {target}",
        )
    return target, checkpoint if checkpoint is not None else newest(folder)


def newest(run: Path) -> Path | None:
    """Return the newest checkpoint where `run` is the folder of a run; None for a recipe."""
    if not (run / "recipe.yaml").is_file():
        return None
    from rlhf.trainers.checkpoint import latest

    found = latest(run / "checkpoints")
    if found is None:
        raise CheckpointError(
            "this run has no checkpoint yet",
            where=str(run),
            got="no complete folder in checkpoints/",
            expected="a run that has finished a stage",
            hint=f"go on with it: rlhf train --resume {run}",
        )
    return found


def _print_result(result: dict[str, Any]) -> None:
    console, interval = results(), result["interval"]
    console.print(
        f"success [bold]{result['success']:.1%}[/]  (95% interval {interval[0]:.1%} to {interval[1]:.1%}, "
        f"{result['n']} episodes of {result['split']}, {result['n_errors']} errors)",
        soft_wrap=True,
    )
    console.print(f"mean return {result['return_mean']:.3f}, mean turns {result['n_turns_mean']:.1f}")
    console.print(f"policy {result['checkpoint'] or 'of the recipe'}", soft_wrap=True)
    if result["environment"]:
        console.print(f"environment {result['environment']}", soft_wrap=True)
