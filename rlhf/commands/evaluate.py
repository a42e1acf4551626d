"""`rlhf evaluate`: measure a policy on tasks it was not trained on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.commands.check_availability import refuse_absent_engine
from rlhf.commands.output import (
    EXIT_USER_ERROR,
    AsJson,
    Overrides,
    caution_without_digests,
    command,
    errors,
    print_json,
    quiet_libraries,
    results,
)
from rlhf.commands.tables import show_summary
from rlhf.errors import CheckpointError, RecipeError, nearest
from rlhf.given_parts import PREFIX, how_to_resume
from rlhf.terminal import CleanConsole

if TYPE_CHECKING:
    from rlhf.recipe.evaluation_request import EvaluationRequest

#: Sections of a recipe that an evaluation looks at; `seed` draws what a checkpoint does not hold.
SECTIONS = ("seed", "name", "environment", "agent", "rewards", "limits", "engine", "evaluation", "policy")

#: Keys of `evaluation` that an evaluation reads; the others are of training.
_EVALUATION_KEYS = ("split", "n_tasks", "attempts", "temperature", "seed")
_LIVE_POLICY_KEYS = ("dtype", "chat_template_kwargs")

Target = Annotated[
    str,
    typer.Argument(
        metavar="POLICY",
        help="A recipe, run or checkpoint. With --suite also a model folder, an adapter, a hub name, random, "
        "oracle, or an agent as ./file.py:Name. None with --endpoint.",
    ),
]
SuiteName = Annotated[str, typer.Option(help="Evaluation suite, by name or file (default: the recipe's evaluation).")]
Out = Annotated[
    Path | None, typer.Option(help="Output folder. Attempts it already holds are reused, also for more --attempts.")
]
By = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN", help="Also break results down by a column of the data: category, meta.subject; repeatable."
    ),
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="A checkpoint or model folder (default: the run's newest checkpoint).")
]
StrategyName = Annotated[
    str,
    typer.Option(help="Test-time strategy per attempt: best_of_n, or with settings '{kind: best_of_n, n: 8}'."),
]
AllowOverlap = Annotated[
    bool,
    typer.Option("--allow-overlap", help="Allow tasks that the policy was trained on, which are an error otherwise."),
]
ProgramCommand = Annotated[
    str,
    typer.Option(
        "--command", metavar="COMMAND", help="Command that starts an external agent, which samples through the gateway."
    ),
]
NPrograms = Annotated[
    int | None,
    typer.Option(
        min=1, help="Long-lived agent processes that play attempts in turn (default: one process per attempt)."
    ),
]


@command
def evaluate(
    target: Target = "",
    overrides: Overrides = None,
    suite: SuiteName = "",
    out: Out = None,
    checkpoint: Checkpoint = None,
    split: Annotated[str | None, typer.Option(help="Task split (default: the suite's).")] = None,
    n: Annotated[
        int | None, typer.Option("--n", "-n", "--limit", min=1, help="Number of tasks of each environment.")
    ] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="Attempts per task, for pass@k and pass^k.")] = None,
    strategy: StrategyName = "",
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="OpenAI-compatible server of the model to evaluate.")
    ] = "",
    model: Annotated[str, typer.Option(help="Name of the model on --endpoint.")] = "",
    tries: Annotated[
        int | None, typer.Option(min=1, help="Maximum tries of a request to --endpoint before it counts as an error.")
    ] = None,
    allow_overlap: AllowOverlap = False,
    program: ProgramCommand = "",
    programs: NPrograms = None,
    verify: Annotated[
        Path | None, typer.Option(help="Repeat the evaluation in this folder and report differences.")
    ] = None,
    price_in: Annotated[float | None, typer.Option(min=0, help="Price of a million prompt tokens.")] = None,
    price_out: Annotated[float | None, typer.Option(min=0, help="Price of a million sampled tokens.")] = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a policy on fixed tasks, with 95% confidence intervals and infrastructure errors counted separately.

    Examples: rlhf evaluate runs/quickstart-seed0; rlhf evaluate random --suite quick; rlhf evaluate Qwen/Qwen3-0.6B
    --suite babyai --attempts 4 --out evaluations/qwen; rlhf evaluate --endpoint URL --model NAME --suite tools
    --command "venv/bin/python agent.py"
    """
    from rlhf.recipe.evaluation_request import EvaluationRequest

    words = list(overrides or ())
    if "=" in target and not Path(target).exists():  # the first override, where no policy is named
        target, words = "", [target, *words]
    asked = EvaluationRequest(
        target=target,
        overrides=tuple(words),
        suite=suite,
        split=split,
        n=n,
        attempts=attempts,
        strategy=strategy,
        also_trained=allow_overlap,
        endpoint=endpoint,
        model=model,
        tries=tries,
        command=program,
        programs=programs,
    )
    priced = price_in is not None or price_out is not None
    if verify is not None:
        _refuse_beside_verify(asked, checkpoint, out, priced, by or ())
        _verify(verify, as_json)
        return
    asked, summary = measured(asked, checkpoint, out, price_in, price_out, by or ())
    _report(summary, asked, out, as_json)


def measured(
    asked: EvaluationRequest,
    checkpoint: Path | None,
    out: Path | None,
    price_in: float | None = None,
    price_out: float | None = None,
    by: Sequence[str] = (),
    console: CleanConsole | None = None,
) -> tuple[EvaluationRequest, dict[str, Any]]:
    """Check and run an evaluation; returns the resolved request and the figures."""
    _refuse_half(asked)
    _refuse_idle(asked, checkpoint, price_in is not None or price_out is not None)
    asked = _resolved(asked, checkpoint)
    from rlhf.recipe.evaluation_target import contender

    found = contender(asked)
    from rlhf.build.evaluate import evaluate as measure  # loads torch: after what may be wrong is told

    quiet_libraries()
    console = console or errors()
    prices = {"price_in": price_in, "price_out": price_out}
    return asked, measure(asked, found=found, out=out, **prices, by=by, console=console)


def _report(summary: dict[str, Any], asked: EvaluationRequest, out: Path | None, as_json: bool) -> None:
    if as_json:
        print_json({**_short(summary, asked.checkpoint), "out": out and str(out), "summary": summary})
    else:
        show_summary(summary, results())
        if out is not None:
            results().print(f"kept in {out}, with report.html", soft_wrap=True)


def _verify(folder: Path, as_json: bool) -> None:
    """Evaluate again and print what changed; exit code 2 where an attempt or a figure did."""
    from rlhf.evaluation.folder import refuse_unfinished

    refuse_unfinished(folder, f"--verify {folder}")  # before anything loads
    from rlhf.build.verify import verify

    quiet_libraries()
    found = verify(folder, console=errors())
    if as_json:
        print_json(found)
    else:
        console = results()
        for name, (before, now) in found["changed"].items():
            console.print(f"changed: {name} was {before}, is {now}", soft_wrap=True, markup=False)
        for name, (before, now) in found["figures"].items():
            console.print(f"figure: {name} was {before}, is {now}", soft_wrap=True, markup=False)
        if found["n_changed"]:
            n, of = found["n_changed"], found["n_attempts"]
            console.print(f"{n} of {of} attempts went another way, the first: {found['first']}", soft_wrap=True)
        else:
            console.print(f"all {found['n_attempts']} attempts came again, to the last token")
    if not found["same"]:
        raise typer.Exit(EXIT_USER_ERROR)


def _resolved(asked: EvaluationRequest, checkpoint: Path | None) -> EvaluationRequest:
    """Request with recipe and checkpoint resolved; impossible ones are refused before anything loads."""
    from rlhf.recipe.evaluation_request import is_model, is_program

    if asked.endpoint or is_program(asked.target) or (asked.suite and is_model(asked.target)):
        return asked
    _refuse_misspelt(asked)
    name, folder = recipe_and_checkpoint(asked.target, checkpoint)
    # The split goes through the recipe, so that a name that the environment does not know is found before loading.
    given = [*asked.overrides, *([f"evaluation.split={asked.split}"] if asked.split and not asked.suite else [])]
    from rlhf.recipe import load

    loaded = load(name, given, is_trained=folder is not None)
    refuse_ignored(given, folder, "an evaluation", SECTIONS)
    _refuse_of_training(given)
    if asked.suite:
        _refuse_of_suite(given)
    refuse_absent_engine(loaded)
    return replace(asked, target=name, checkpoint=None if folder is None else str(folder))


def _refuse_half(asked: EvaluationRequest) -> None:
    """Raise RecipeError where no policy is named, or half of one."""
    from rlhf.recipe.evaluation_request import is_program

    if bool(asked.endpoint) != bool(asked.model) or not (asked.target or asked.endpoint):
        raise RecipeError(
            "no policy is named" if not asked.endpoint and not asked.model else "an endpoint and its model go together",
            where="rlhf evaluate",
            got=f"--endpoint {asked.endpoint or 'nothing'}, --model {asked.model or 'nothing'}",
            expected="POLICY, or --endpoint URL --model NAME",
            hint="name a run, or a server and a model that it serves",
        )
    if asked.endpoint and asked.target and (not is_program(asked.target) or ":" not in asked.target):
        raise RecipeError(
            "an endpoint and a policy exclude each other",
            where="rlhf evaluate",
            got=f"{asked.target} beside --endpoint",
            expected="nothing, or an agent that calls the endpoint, as ./file.py:Name",
            hint=f"remove {asked.target}, or --endpoint",
        )


def _refuse_misspelt(asked: EvaluationRequest) -> None:
    """Raise RecipeError for a near-miss of a model-free policy's name that is no recipe."""
    from rlhf.recipe.evaluation_request import BASELINES
    from rlhf.recipe.files import list_recipes

    names = {recipe.name for recipe in list_recipes()}
    others = [*BASELINES, *(path.parent.name for path in Path().glob("*/config.json"))]
    hint = nearest(asked.target, [*others, *names])
    if asked.target not in names and not Path(asked.target).exists() and any(f"'{name}'" in hint for name in others):
        raise RecipeError(
            "no such policy",
            where=asked.target,
            got="no file or folder, and no recipe of this name",
            expected=f"a recipe, a run, a model, {' or '.join(BASELINES)}",
            hint=hint,
        )


def _refuse_idle(asked: EvaluationRequest, checkpoint: Path | None, priced: bool) -> None:
    """Raise RecipeError for an option without effect on this policy, or an invalid address."""
    from rlhf.recipe.evaluation_request import is_model, is_program

    if asked.endpoint and not asked.endpoint.startswith(("http://", "https://")):
        raise RecipeError(
            "not an address",
            where="--endpoint",
            got=asked.endpoint,
            expected="an address that begins with http:// or https://",
            hint=f"--endpoint http://{asked.endpoint}",
        )
    without_tokens = not asked.endpoint and is_program(asked.target)
    brings_weights = not asked.endpoint and not without_tokens and not (asked.suite and is_model(asked.target))
    idle = {
        "--tries": asked.tries is not None and not asked.endpoint and "how often a server of --endpoint is asked",
        "--command": bool(asked.command) and without_tokens and "a model, which the program asks",
        "--programs": asked.programs is not None and not asked.command and "a program: --command",
        "--checkpoint": checkpoint is not None and not brings_weights and "weights for a recipe or a run",
        "--price-in and --price-out": priced and without_tokens and "a model, whose tokens are counted",
    }
    for option, meant in idle.items():
        if meant:
            raise RecipeError(
                "this option has no effect here",
                where=option,
                got=f"{option} for {asked.target or asked.endpoint}",
                expected=meant,
                hint="leave it out",
            )


def _refuse_beside_verify(
    asked: EvaluationRequest, checkpoint: Path | None, out: Path | None, priced: bool, by: Sequence[str]
) -> None:
    """Raise RecipeError for anything that would say again, or otherwise, what the folder says already."""
    given = [f"--{name}".replace("_", "-").replace("--target", "POLICY") for name in asked.plain]
    given += ["--checkpoint"] * (checkpoint is not None) + ["--out"] * (out is not None) + ["a price"] * priced
    given += ["--by"] * bool(by)
    if given:
        raise RecipeError(
            "an evaluation is repeated with its own settings",
            where="--verify",
            got=f"{', '.join(given)} beside --verify",
            expected="rlhf evaluate --verify FOLDER, and at most --json",
            hint="leave out the rest, or make another evaluation with --out and `rlhf compare` the two",
        )


def refuse_ignored(overrides: list[str], checkpoint: Path | None, what: str, sections: Sequence[str]) -> None:
    """Raise RecipeError for an override outside `sections`, the only ones that `what` reads."""
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


def _refuse_of_training(overrides: Sequence[str]) -> None:
    """Raise RecipeError for a key of `evaluation` that only training reads."""
    from rlhf.recipe.text import parse_fields

    for override in overrides:
        for key in (parse_fields([override]).get("evaluation") or {}) if override.startswith("evaluation") else ():
            if key not in _EVALUATION_KEYS:
                raise RecipeError(
                    "this key has no effect on an evaluation",
                    where=f"evaluation.{key}",
                    got=override,
                    expected=f"a key of evaluation among {', '.join(_EVALUATION_KEYS)}",
                    hint="give --allow-overlap" if key == "allow_overlap" else "remove it",
                )


def _refuse_of_suite(overrides: Sequence[str]) -> None:
    """Raise RecipeError for an override of what a suite says itself; parts of a program are needed to load its run."""
    from rlhf.recipe.text import parse
    from rlhf.rollout.limits import OF_POLICY

    pairs = [override.partition("=")[::2] for override in overrides]
    again = {key.partition(".")[0] for key, value in pairs if PREFIX in value}
    for override, (key, value) in zip(overrides, pairs, strict=True):
        section, _, name = key.partition(".")
        given = parse(value, key) if section == "limits" and not name else None
        names = set(given) if isinstance(given, dict) else {name.partition(".")[0]}
        is_own = section in ("environment", "rewards", "evaluation") or (
            section == "limits" and not names <= {*OF_POLICY}
        )
        if is_own and section not in again:
            raise RecipeError(
                "a suite has its own tasks, rewards and limits",
                where=key,
                got=override,
                expected=f"a key of agent, engine, policy or limits: {', '.join(OF_POLICY)}",
                hint="remove it, or copy the suite to a file and change it there: --suite ./mine.yaml",
            )


def recipe_and_checkpoint(target: str, checkpoint: Path | None) -> tuple[str, Path | None]:
    """Recipe that `target` names, and its checkpoint: the given one, itself, or the run's newest.

    Raises:
        CheckpointError: the checkpoint asked for is no folder, or the run has none.
        RecipeError: the target is a model without a run around it.
    """
    checkpoint = Path(os.path.expanduser(checkpoint)) if checkpoint is not None else None
    if checkpoint is not None and not checkpoint.is_dir():
        raise CheckpointError(
            "there is no such folder",
            where=f"--checkpoint {checkpoint}",
            got="a file" if checkpoint.exists() else "nothing",
            expected="a checkpoint of a run, or a model folder",
            hint=nearest(str(checkpoint), sorted(str(path) for path in checkpoint.parent.glob("*") if path.is_dir()))
            or "look into checkpoints/ of the run; a model on a hub is policy={kind: pretrained, path: NAME}",
        )
    target = os.path.expanduser(target)
    folder = Path(target)
    if (folder.parent / "state.json").is_file():  # the policy in a checkpoint
        folder = folder.parent
    run = folder.parent.parent
    if (folder / "state.json").is_file() and (run / "recipe.yaml").is_file():
        caution_without_digests(folder if checkpoint is None else checkpoint)
        return str(run), checkpoint if checkpoint is not None else folder
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RecipeError(
            "this is a model, without tasks or rewards",
            where=target,
            got="a model folder",
            expected="a recipe, a run, or a checkpoint of one",
            hint=f"name a recipe, and this folder with --checkpoint {target}",
        )
    found = checkpoint if checkpoint is not None else newest(folder)
    if found is not None:
        caution_without_digests(found)
    return target, found


def newest(run: Path) -> Path | None:
    """Return the newest checkpoint where `run` is the folder of a run; None for a recipe."""
    if not (run / "recipe.yaml").is_file():
        return None
    from rlhf.training.checkpoints.store import latest

    found = latest(run / "checkpoints")
    if found is None:
        raise CheckpointError(
            "this run has no checkpoint yet",
            where=str(run),
            got="no complete folder in checkpoints/",
            expected="a run that has finished a stage",
            hint=f"resume it: {how_to_resume(run)}",
        )
    return found


def _short(summary: dict[str, Any], checkpoint: str | None) -> dict[str, Any]:
    """The headline result under separate names, for scripts that read one number."""
    found, score = summary["success"], summary["score"]
    parts = list(summary["data"].values())
    return {
        "name": summary["suite"],
        "checkpoint": checkpoint,
        "split": parts[0]["split"],
        "environment": parts[0]["package"],
        "success": found["value"],
        "interval": [found["low"], found["high"]],
        "n": found["n"],
        "n_errors": summary["n_errors"],
        "return_mean": score["value"],
        "n_turns_mean": summary["turns_mean"],
    }
