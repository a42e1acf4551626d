"""Environments of stored attempts: of a run, or of a part of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.digests import read_listed
from rlhf.errors import RecipeError, nearest
from rlhf.evaluation.folder import PLAN, RECIPE, is_evaluation, no_run
from rlhf.recipe import load
from rlhf.recipe.builder import build_environment
from rlhf.recipe.text import from_text

if TYPE_CHECKING:
    from environments.base import Environment


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
        if not (folder / RECIPE).is_file():
            raise no_run(folder, "the folder of the attempt", "a run or an evaluation")
        recipe, number = load(folder), part.partition("-")[0]
        return (recipe.at(recipe.stages[int(number)]) if number.isdigit() else recipe).environment
    plan = folder / PLAN
    parts = from_text(read_listed(plan), str(plan))["suite"]["parts"]
    if part not in parts:
        raise RecipeError(
            "the evaluation has no such part",
            where=str(plan),
            got=part,
            expected=", ".join(parts),
            hint=nearest(part, parts) or "name an attempt as `rlhf view` does",
        )
    environment: Environment = build_environment(
        parts[part]["environment"], f"suite.parts.{part}.environment", base=folder.resolve()
    )
    return environment
