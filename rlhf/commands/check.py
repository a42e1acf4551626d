"""`rlhf check`: walk a part through its contract and say which call broke which promise."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.commands.check_availability import refuse_absent_models
from rlhf.commands.contrib.check_labels import holds_labels, on_labels
from rlhf.commands.contrib.check_on import on_answers, on_attempts, refuse_absent, show_worst
from rlhf.commands.output import EXIT_USER_ERROR, AsJson, command, one_of, print_json, results, said_if_slow
from rlhf.errors import RecipeError

if TYPE_CHECKING:
    from rlhf.data import Task, Trajectory
    from rlhf.data.report import Report
    from rlhf.recipe.model import Recipe

#: Tasks of a recipe that its rewards are tried on.
_N_TASKS = 3


class What(StrEnum):
    """Parts that can be checked."""

    environment = "environment"
    reward = "reward"
    agent = "agent"
    recipe = "recipe"


@command
def check(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=f"Type of the target: {', '.join(What)}.")],
    target: Annotated[
        str,
        typer.Argument(
            help="A catalogue name, package.module:Name, ./file.py:Name, or {kind: ..., KEY: VALUE}; for a recipe, its "
            "file or name."
        ),
    ],
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Its settings, or overrides of the recipe.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="For a verifier: also score a suite of labelled answers, such as math.")
    ] = None,
    on: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|FILE",
            help="For a reward: also score a run's attempts, or answers or replies with labels in a file.",
        ),
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="Number of suspicious attempts shown with --on.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Check an environment, reward, agent or recipe against its contract, with one line per passing part.

    Examples: rlhf check environment ./maze.py:Maze size=5; rlhf check reward ./mine.py:judge --suite math
    """
    contract = one_of(What, what, f"rlhf check {what}", "contract")
    attempts: list[dict[str, Any]] = []
    heading = ""
    if on is not None:
        reports, attempts, heading = _on(contract, target, fields or [], on)
    elif contract is What.recipe:
        reports = _recipe(target, fields or [])
    else:
        reports = [_walk(contract.value, _built(contract.value, target, fields or []))]
    if suite is not None:
        reports.append(_suite(contract, target, fields or [], suite))
    are_short = [contract is What.recipe and report.ok and not report.cautions for report in reports]
    for report, is_short in zip(reports, are_short, strict=True):
        results().print(report.heading if is_short else str(report), soft_wrap=True, markup=False)
    if any(are_short) and not as_json:
        results().print("each promise by its name: --json")
    if heading and worst:
        show_worst(attempts[:worst], heading)
    if as_json:
        found = {"attempts": attempts[:worst]} if on is not None else {}
        print_json({"ok": all(r.ok for r in reports), "reports": [_plain(r) for r in reports], **found})
    if not all(report.ok for report in reports):
        raise typer.Exit(EXIT_USER_ERROR)


def _built(section: str, target: str, fields: list[str]) -> Any:
    from rlhf.recipe.builder import build_environment, build_part
    from rlhf.recipe.text import overridden, parse

    given = parse(target, section) if target.lstrip().startswith("{") else None
    values = overridden(given if isinstance(given, dict) else {"kind": target}, fields, "command line")
    if section == "environment":
        return build_environment(values, section, base=Path.cwd())
    return build_part(section, values, section, base=Path.cwd())


def _on(what: What, target: str, fields: list[str], on: Path) -> tuple[list[Report], list[dict[str, Any]], str]:
    """Reports on a reward over attempts or answers, attempts worth reading, and their source."""
    if what is not What.reward:
        raise RecipeError(
            "only a reward can judge attempts",
            where="--on",
            got=f"{what.value} {target}",
            expected="rlhf check reward TARGET --on RUN",
            hint="leave --on out",
        )
    part = _built("reward", target, fields)
    refuse_absent(on)
    if on.is_file() and not (on.suffix == ".parquet" and on.parent.name == "trajectories"):
        if not holds_labels(on):
            return [_walk("reward", part), on_answers(part, target, on)], [], ""
        return on_labels(part, target, on)
    return on_attempts(part, target, on)


def _suite(what: What, target: str, fields: list[str], name: str) -> Report:
    from rewards import suite
    from rewards.verified import is_verifier

    part: Any = _built("reward", target, fields) if what is What.reward else None
    if not is_verifier(part):
        raise RecipeError(
            "a suite is for a verifier",
            where="--suite",
            got=f"{what.value} {target}",
            expected="rlhf check reward TARGET, where TARGET is a function of (answer, reference)",
            hint="leave --suite out, or name a verifier",
        )
    return suite.report(part, name)


def _recipe(target: str, overrides: list[str]) -> list[Report]:
    from rewards.models.model_folder import stage_of
    from rlhf.data.report import Finding, Report
    from rlhf.errors import EnvError
    from rlhf.recipe import load

    recipe = load(target, overrides)
    from rlhf.build.algorithm_trial import own_algorithms  # loads torch: after the cheap checks
    from rlhf.build.pair_data import check_sources
    from rlhf.build.preflight import lacking_reference, splits_of
    from rlhf.build.supervised_data import check_data

    refuse_absent_models(recipe)
    check_sources(recipe)
    check_data(recipe)
    from rlhf.recipe.view import environments_of_run

    reports = [_named(name, name, getattr(recipe, name)) for name in ("environment", "agent")]
    owns = ((f"stages[{i}].environment", stage.environment) for i, stage in enumerate(recipe.stages))
    reports += [_named(path, "environment", environment) for path, environment in owns if environment is not None]
    tried_in = {path: seen for path, seen in environments_of_run(recipe) if splits_of(seen, path)}
    records = {path: _records(seen, splits_of(seen, path)[-1]) for path, seen in tried_in.items()}
    asked = [(path, name) for path, seen in tried_in.items() for name in seen.rewards]
    for path, name in asked:
        seen = tried_in[path]
        if (stage := stage_of(seen.rewards[name].reward)) is not None:
            found = Finding(True, f"path: a model that stages[{stage}] trains; it is checked there")
            reports.append(Report(f"{path}rewards.{name} ({_kind('reward', seen.rewards[name].reward)})", (found,)))
            continue
        try:
            lacking = lacking_reference(seen, name, splits_of(seen, path), path)
        except EnvError:  # which the walk of the environment has said
            lacking = None
        tried = _named(f"{path}rewards.{name}", "reward", seen.rewards[name].reward, None if lacking else records[path])
        if lacking:
            found = Finding(False, "task: has the reference that this needs", str(lacking))
            tried = replace(tried, findings=(found, *tried.findings))
        reports.append(tried)
    return [
        *reports,
        *own_algorithms(recipe),
        *(_program(seen, splits_of(seen, path)[0], path) for path, seen in tried_in.items() if _starts(seen)),
    ]


def _starts(recipe: Recipe) -> bool:
    """True if the environment starts the program of an agent."""
    from rlhf.gateway.environment import External

    return isinstance(recipe.environment, External) and bool(recipe.environment.command)


def _program(recipe: Recipe, split: str, path: str) -> Report:
    """Report on an attempt of the agent's program, whose requests are refused as in a run."""
    from rlhf.build.preflight import attempted
    from rlhf.data.report import Finding, Report
    from rlhf.errors import EnvError

    said: list[str] = []
    try:
        asyncio.run(attempted(recipe, split, path, said.append))
    except EnvError as error:
        said.append(str(error))
    finding = Finding(not said, "program: makes an attempt, and none of its requests is refused", "\n".join(said))
    return Report(f"{path}environment.command", (finding,))


def _named(path: str, section: str, part: Any, records: list[tuple[Task, Trajectory]] | None = None) -> Report:
    """Walk a part, under the name that it has in the recipe."""
    return replace(_walk(section, part, records), subject=f"{path} ({_kind(section, part)})")


def _kind(section: str, part: Any) -> str:
    """Recipe name of a part, seen through the workers or verifier wrapper around it."""
    from environments.workers.pool import Processes
    from rlhf.recipe.rewards import as_named
    from rlhf.registry import kind_of

    part = part.environment if isinstance(part, Processes) else part
    kind = kind_of(section, as_named(part) if section == "reward" else part)
    return Path(kind).name if Path(kind).is_absolute() else kind


def _records(recipe: Recipe, split: str) -> list[tuple[Task, Trajectory]]:
    """Tasks that the rewards of `recipe` will meet; a verifier needs those with references."""
    from rlhf.data import Outcome, Trajectory
    from rlhf.errors import EnvError
    from rlhf.rollout.tasks import tasks_of

    try:
        tasks = tasks_of(recipe.environment, split, _N_TASKS)
    except EnvError:  # which the walk of the environment has said
        return []
    return [(task, Trajectory(task.id, 0, "", (), Outcome.FAILED)) for task in tasks]


def _walk(section: str, part: Any, records: list[tuple[Task, Trajectory]] | None = None) -> Report:
    with said_if_slow(f"checking the {section} {_kind(section, part)}: many calls, up to a minute where each is slow"):
        if section == "environment":
            from environments.check import check_environment

            return check_environment(part)
        if section == "agent":
            from agents.check import check_agent

            return check_agent(part)
        from rewards.check import check_reward

        return check_reward(part, records)


def _plain(report: Report) -> dict[str, Any]:
    findings = [
        {"ok": f.ok, "promise": f.promise, "detail": f.detail, **({"caution": True} if f.is_caution else {})}
        for f in report.findings
    ]
    return {"subject": report.subject, "ok": report.ok, "findings": findings}
