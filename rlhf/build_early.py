"""What would be missed only in the first rollout, perhaps after whole stages: found before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agents.tools import ToolAgent
from rewards.parts import compared_in, with_parts
from rlhf.data import Task
from rlhf.errors import RecipeError
from rlhf.recipe import Recipe
from rlhf.recipe.suites import Suite
from rlhf.rollout.limits import Limits
from rlhf.rollout.renderer import Renderer
from rlhf.rollout.score import Weighted
from rlhf.rollout.tasks import tasks_of
from rlhf.trainers.stages import is_played

#: Tasks of each split that are looked at.
_N_TASKS = 16


def refuse_without_references(recipe: Recipe) -> None:
    """Raise RecipeError where a reward compares with references that the first tasks of a split do not have.

    Looked at are the splits of stages in which the policy attempts tasks, and that of the result. So many may lack one
    as attempts may fail, `limits.max_error_fraction`; of a reward that is only watched, one task has to have one.
    """
    for name in recipe.rewards:
        if error := lacking_reference(recipe, name):
            raise error


def lacking_reference(recipe: Recipe, name: str) -> RecipeError | None:
    """Say what reward `name` lacks in the first split that lacks it, if any does."""
    weighted = recipe.rewards[name]
    splits = [getattr(stage, "split", None) for stage in recipe.stages if is_played(stage)]
    for split in dict.fromkeys([*splits, recipe.evaluation.split]):
        if split is None or not any(compared_in(name, weighted.reward, None)):
            continue
        tasks = tasks_of(recipe.environment, split, _N_TASKS)
        if error := _lacking(weighted, f"rewards.{name}", tasks, split, recipe.limits):
            return error
    return None


def refuse_unreferenced(suite: Suite, tasks: Mapping[str, Sequence[Task]], *, of_recipe: bool) -> None:
    """Raise RecipeError where a reward of a suite compares with references that too many of a part's tasks lack.

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


def _lacking(weighted: Weighted, path: str, tasks: Sequence[Task], split: str, limits: Limits) -> RecipeError | None:
    without = _without(weighted.reward, path, tasks)
    if len(without) <= (len(tasks) - 1 if weighted.watch else limits.max_error_fraction * len(tasks)):
        return None
    task, place = without[0]
    return RecipeError(
        "this reward compares with the reference of a task, and there is none",
        where=f"{place}.kind",
        got=f"tasks without reference: {len(without)} of the first {len(tasks)} of the split {split!r}, "
        f"such as {task.id}",
        expected="Task.reference",
        hint="use an environment whose tasks have references, or a reward of (task, trajectory)",
    )


def _without(reward: Any, path: str, tasks: Sequence[Task]) -> list[tuple[Task, str]]:
    """The tasks that lack the reference, each with the place of what would compare with it."""
    lacking = (task for task in tasks if task.reference is None)
    return [(task, found) for task in lacking for found in list(compared_in(path, reward, task))[:1]]


def check_template(agent: Any, renderer: Any, where: str = "agent") -> None:
    """Raise RecipeError where an agent leaves it to the chat template to write tools, and the template knows none."""
    if not isinstance(renderer, Renderer) or renderer.knows_tools:
        return
    for path, part in with_parts(where, agent):
        if isinstance(part, ToolAgent) and part.through == "template":
            raise RecipeError(
                "the chat template of the policy does not know tools",
                where=f"{path}.through",
                got="template",
                expected="a model whose chat template has a variable `tools`",
                hint=f"write {path}.through: text: then the instruction tells of the tools",
            )
