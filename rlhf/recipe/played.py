"""Environments of stored attempts: of a run, or of a part of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.base import Environment, properties_of
from rlhf.digests import read_listed
from rlhf.errors import RecipeError, nearest
from rlhf.evaluation.folder import PLAN, RECIPE, is_evaluation, no_run
from rlhf.recipe import Recipe, load
from rlhf.recipe.builder import build_environment
from rlhf.recipe.text import from_text


def environment_of(folder: Path, part: str) -> Environment:
    """Return the environment that a stored attempt was played in.

    Args:
        folder: of a run, or of an evaluation, which has one for each part of its suite.
        part: name of the part, which is the stage of its attempts; of a run the stage, as `1-policy_gradient`.

    Raises:
        CheckpointError: the folder's recipe or plan is not what was written.
        RecipeError: the folder holds neither, or no such part.
    """
    if not is_evaluation(folder):
        return _recipe_of(folder, part).environment
    environment: Environment = build_environment(
        _planned(folder, part)["environment"], f"suite.parts.{part}.environment", base=folder.resolve()
    )
    return environment


def is_judged_by_rewards(folder: Path, part: str) -> bool:
    """True where a reward says what is solved in a stored attempt, of which the environment knows nothing.

    Arguments and errors are those of `environment_of`.
    """
    if not is_evaluation(folder):
        return any(weighted.success_threshold is not None for weighted in _recipe_of(folder, part).rewards.values())
    says = any("success_threshold" in reward for reward in _planned(folder, part)["rewards"].values())
    return says or properties_of(environment_of(folder, part)).judged_by_rewards


def _recipe_of(folder: Path, stage: str) -> Recipe:
    """Recipe of a run, as its stage plays it."""
    if not (folder / RECIPE).is_file():
        raise no_run(folder, "the folder of the attempt", "a run or an evaluation")
    recipe, number = load(folder), stage.partition("-")[0]
    return recipe.at(recipe.stages[int(number)]) if number.isdigit() else recipe


def _planned(folder: Path, part: str) -> Mapping[str, Any]:
    """Part of the suite of an evaluation, as its plan has it."""
    plan = folder / PLAN
    parts: Mapping[str, Any] = from_text(read_listed(plan), str(plan))["suite"]["parts"]
    if part not in parts:
        raise RecipeError(
            "the evaluation has no such part",
            where=str(plan),
            got=part,
            expected=", ".join(parts),
            hint=nearest(part, parts) or "name an attempt as `rlhf view` does",
        )
    found: Mapping[str, Any] = parts[part]
    return found
