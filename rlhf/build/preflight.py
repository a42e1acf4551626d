"""Preflight checks: errors that would otherwise surface in the first rollout, perhaps after whole stages.

Keys and references are looked at; an environment and rewards are tried, once each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agents.tools import ToolAgent
from environments.base import Properties
from rewards.base import Capabilities
from rewards.combinators.parts import compared_in, with_parts
from rlhf.build.alone import check_alone
from rlhf.build.program_trial import ProgramTrial, temperatures_of
from rlhf.build.reference_trial import to_try
from rlhf.capabilities import Capability, CapabilityView
from rlhf.credit.estimator import EstimatorCapabilities, with_nested
from rlhf.data import Outcome, ScoredGroup, Task, Trajectory
from rlhf.data.report import counted, one_line
from rlhf.data.untrusted import shown
from rlhf.errors import EnvError, RecipeError, RewardError
from rlhf.evaluation.evaluate import Evaluation
from rlhf.recipe import Recipe
from rlhf.recipe.suites import Suite
from rlhf.recipe.view import environments_of_run
from rlhf.registry import kind_of
from rlhf.rollout.env_session import EpisodeEnded
from rlhf.rollout.episode import executor_for
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.scoring import WeightedReward, score_group
from rlhf.rollout.tasks import tasks_of
from rlhf.tasks.sampler import DemonstratedSampler
from rlhf.tasks.shuffled import Shuffled
from rlhf.training.stages.base import is_played
from rlhf.training.stages.demonstrations import RandomDeviations, play_one
from rlhf.training.stages.policy_gradient import PolicyGradient

#: Tasks of each split that are looked at.
_N_TASKS = 16
#: Tasks that an environment may fail at when it is tried, and turns of an attempt then.
_N_TRIED, _N_TURNS = 3, 2


class _Declared(CapabilityView):
    """Declarations of an environment, of whatever type."""

    properties = Capability[object](None)
    """See `environments.base.Properties`."""


def refuse_without_references(recipe: Recipe) -> None:
    """Raise RecipeError where a reward needs references that the first tasks of a split lack.

    Looked at are the splits of stages in which the policy attempts tasks, and that of the result. So many may lack one
    as attempts may fail, `limits.max_error_fraction`; of a reward that is only monitored, one task has to have one.
    """
    for path, seen in environments_of_run(recipe):
        for name in seen.rewards:
            if error := lacking_reference(seen, name, splits_of(seen, path), path):
                raise error


def splits_of(recipe: Recipe, path: str) -> list[str]:
    """Splits whose attempts are scored: of stages, and for the whole recipe, whose `path` is empty, the result's."""
    splits = [stage.split for stage in recipe.stages if is_played(stage)]
    return splits if path else [*splits, recipe.evaluation.split]


def lacking_reference(recipe: Recipe, name: str, splits: Sequence[str], path: str = "") -> RecipeError | None:
    """Say what reward `name` lacks in the first of `splits` that lacks it, if any does; `path` stands before keys."""
    weighted = recipe.rewards[name]
    for split in dict.fromkeys(splits):
        if not any(compared_in(name, weighted.reward, None)):
            continue
        tasks = tasks_of(recipe.environment, split, _N_TASKS)
        if error := _lacking(weighted, f"{path}rewards.{name}", tasks, split, recipe.limits):
            return error
    return None


def refuse_unreferenced(suite: Suite, tasks: Mapping[str, Sequence[Task]], *, of_recipe: bool) -> None:
    """Raise RecipeError where a suite's reward needs references that too many tasks lack.

    Args:
        suite: that is about to be played.
        tasks: part -> its tasks.
        of_recipe: whether the suite is a recipe's own evaluation, whose rewards are not those of a part.
    """
    for part in suite.parts:
        for name, weighted in part.rewards.items():
            path = f"rewards.{name}" if of_recipe else f"parts.{part.name}.rewards.{name}"
            if error := _lacking(weighted, path, tasks[part.name], part.tasks.split, part.limits):
                raise error


def _lacking(
    weighted: WeightedReward, path: str, tasks: Sequence[Task], split: str, limits: Limits
) -> RecipeError | None:
    without = _without(weighted.reward, path, tasks)
    if len(without) <= (len(tasks) - 1 if weighted.monitor else limits.max_error_fraction * len(tasks)):
        return None
    task, place = without[0]
    return RecipeError(
        "this reward needs references, and the tasks have none",
        where=f"{place}.kind",
        got=f"tasks without reference: {len(without)} of the first {len(tasks)} of the split {split!r}, "
        f"such as {task.id}",
        expected="Task.reference",
        hint="use an environment whose tasks have references (environment.reference names the column of a data set), "
        "or a reward of (task, trajectory)",
    )


def _without(reward: Any, path: str, tasks: Sequence[Task]) -> list[tuple[Task, str]]:
    """The tasks that lack the reference, each with the place of what would compare with it."""
    lacking = (task for task in tasks if task.reference is None)
    return [(task, found) for task in lacking for found in list(compared_in(path, reward, task))[:1]]


def try_samplers(recipe: Recipe) -> None:
    """Start each sampler once, so that a misfit with the tasks is refused before training."""
    for stage in recipe.stages:
        if isinstance(stage, PolicyGradient) and not isinstance(stage.sampler, Shuffled | DemonstratedSampler):
            stage.sampler.start(tasks_of(recipe.at(stage).environment, stage.split), recipe.seed)


def tell_few_tasks(recipe: Recipe, say: Callable[[str], None]) -> None:
    """Say which numbers of tasks are more than there are: an evaluation is smaller then, and a step repeats tasks."""
    own, usual = recipe.evaluation, Evaluation()
    asked = [("evaluation.n_tasks", own.n_tasks, own.split, recipe.environment)] * (own.n_tasks != usual.n_tasks)
    if own.validation_n_tasks != usual.validation_n_tasks:
        asked.append(
            ("evaluation.validation_n_tasks", own.validation_n_tasks, own.validation_split, recipe.environment)
        )
    for where, wanted, split, environment in asked:
        if (n := len(tasks_of(environment, split, wanted))) < wanted:
            say(
                f"caution: {where} is {wanted}, and the split {split!r} has {counted(n, 'task')}: no more are attempted"
            )
    for i, stage in enumerate(recipe.stages):
        if isinstance(stage, PolicyGradient) and isinstance(stage.sampler, Shuffled):
            n = len(tasks_of(recipe.at(stage).environment, stage.split, stage.tasks_per_step))
            if n < stage.tasks_per_step:
                say(
                    f"caution: stages[{i}].tasks_per_step is {stage.tasks_per_step}, and the split {stage.split!r} has "
                    f"{counted(n, 'task')}: each step attempts tasks more than once; write {n}, or add tasks"
                )


async def try_once(recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> None:
    """Preflight attempt: play one task by random actions and score it, so that faults show early.

    Not asked are rewards that load a model, that read sampled tokens, of which there are none yet, or that cannot be
    copied: the trial leaves no trace in them. What is only monitored may fail, and `say` is told.

    Raises:
        EnvError: the environment fails at each of the first tasks.
        RewardError: a reward fails.
    """
    for path, seen in environments_of_run(recipe):
        splits = [stage.split for stage in seen.stages if is_played(stage) and stage.split]
        if splits or not path:
            await _try_world(seen, (splits or [recipe.evaluation.split])[0], path, say)


async def _try_world(recipe: Recipe, split: str, path: str, say: Callable[[str], None]) -> None:
    declared = _Declared(recipe.environment).properties
    if not isinstance(declared, Properties | None):
        say(
            f"caution: {path}environment.properties is {shown(declared)}, and what it says is not heard: the defaults "
            "hold; return an environments.base.Properties"
        )
    task, attempt = await attempted(recipe, split, path, say)
    _tell_stateless(recipe, attempt, f"{path}environment, {task.id}", say)
    for name, weighted in recipe.rewards.items():
        if (copied := to_try(weighted)) is None:
            continue
        alone = {name: replace(copied, monitor=None)}
        # What judges a whole group is shown one of two: a result of one number would pass with one attempt.
        n = 1 if Capabilities(copied.reward).over_group is None else 2
        attempts = [replace(attempt, attempt=i) for i in range(n)]
        found = await score_group(task, attempts, alone, timeout_s=recipe.limits.reward_timeout_s)
        if not found.failures:
            _check_per_turn(recipe, found, name, f"{path}rewards.{name}")
            continue
        message = one_line(found.failures[0].message)
        if weighted.monitor:
            say(f"caution: the monitored reward {path}{name} fails: {message}")
            continue
        raise RewardError(
            "the reward fails at an attempt by random actions",
            where=f"{path}rewards.{name}, {task.id}",
            got=message,
            expected="a number or a verdict for every attempt, a bad one too",
            hint=f"fix it, and try it {check_alone('reward', weighted.reward)}",
        )


def _tell_stateless(recipe: Recipe, attempt: Trajectory, where: str, say: Callable[[str], None]) -> None:
    """Say which estimators compare states, where no turn of an attempt began in one that is known."""
    if not attempt.turns or any(turn.state_key is not None for turn in attempt.turns):
        return
    for i, stage in enumerate(recipe.stages):
        parts = with_nested(stage.advantage) if isinstance(stage, PolicyGradient) else ()
        if kinds := [kind_of("advantage", part) for part in parts if EstimatorCapabilities(part).compares_states]:
            say(
                f"caution: stages[{i}].advantage, {kinds[0]}, compares turns that began in the same state, and {where} "
                "names no state: no turn is compared; return a `state_key` with each StepResult, the opening too, or "
                "choose an estimator that needs none: grpo, turn_rloo"
            )


def _check_per_turn(recipe: Recipe, found: ScoredGroup, name: str, where: str) -> None:
    """Raise RecipeError where an estimator reads values per turn of a reward that gives none."""
    learning = [stage for stage in recipe.stages if isinstance(stage, PolicyGradient)]
    named = {EstimatorCapabilities(part).turn_reward for stage in learning for part in with_nested(stage.advantage)}
    if name in named and any(score.parts[name].per_turn is None for score in found.scores):
        raise RecipeError(
            "the advantage estimator reads values per turn, and this reward gives none",
            where=where,
            got="a Verdict without per_turn for an attempt by random actions",
            expected="a Verdict with per_turn",
            hint="name a reward that judges each turn, such as environment, invalid_action or turn_cost",
        )


async def attempted(recipe: Recipe, split: str, path: str, say: Callable[[str], None]) -> tuple[Task, Trajectory]:
    """Attempt the first task that can be, by random actions; `say` gets rejected requests of an agent's program.

    Raises:
        EnvError: none of the first tasks can be attempted.
    """
    refused: dict[str, None] = {}
    limits = replace(recipe.limits, max_turns=min(recipe.limits.max_turns, _N_TURNS))
    executor, failed = executor_for(recipe.environment), list[EnvError]()
    try:
        for task in tasks_of(recipe.environment, split, _N_TRIED):
            deviations = RandomDeviations(1.0, {}, random.Random(recipe.seed))
            trial = ProgramTrial(deviations, recipe.agent, temperatures_of(recipe), refused)
            try:
                found = await play_one(recipe.environment, task, trial, limits, executor.open(), ())
            except EpisodeEnded as ended:
                failed.append(_failure(ended, recipe.environment, f"{path}environment, {task.id}", list(refused)))
                continue
            for text in refused:
                say(f"caution: a request of the agent's program is refused with {text}")
            return task, found.trajectory
    finally:
        await executor.close()
    raise failed[0]


def _failure(ended: EpisodeEnded, environment: Any, place: str, refused: Sequence[str]) -> EnvError:
    """The error of an attempt that the environment has ended, with the words of the check that refused its answer.

    `refused` are the answers to requests of an agent's program that were refused.
    """
    causes = ended.__cause__, getattr(ended.__cause__, "__cause__", None)
    told = next((cause for cause in causes if isinstance(cause, EnvError) and cause.expected), None)
    detail = "; ".join(map(one_line, [ended.detail, *(text for text in refused if text not in ended.detail)]))
    if ended.outcome is Outcome.AGENT_ERROR:
        part, expected, do, alone = (
            "agent's program",
            "a program that sends requests and ends with status 0",
            "mend the program",
            "",
        )
    else:
        part, expected, do = "environment", "`start` and `step` that answer, and raise nothing", "fix it"
        alone = f"; to try it {check_alone('environment', environment)}"
    return EnvError(
        f"the {part} fails at its first tasks{f': {told.what}' if told else ''}",
        where=f"{place}, {told.where}" if told and not place.endswith(told.where) else place,
        got=told.got if told else f"{ended.outcome.value}: {detail}",
        expected=told.expected if told else expected,
        hint="fix the requests of the agent's program" if refused else ((told and told.hint) or do) + alone,
    )


def check_template(agent: Any, renderer: Any) -> None:
    """Raise RecipeError where an agent needs tools written by a chat template that has none."""
    if not isinstance(renderer, Renderer) or renderer.knows_tools:
        return
    for path, part in with_parts("agent", agent):
        if isinstance(part, ToolAgent) and part.tool_definitions == "chat_template":
            raise RecipeError(
                "the policy's chat template does not support tools",
                where=f"{path}.tool_definitions",
                got="chat_template",
                expected="a model whose chat template has a variable `tools`",
                hint=f"write {path}.tool_definitions: system_prompt: then the system prompt describes the tools",
            )
