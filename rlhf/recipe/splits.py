"""Split checks: declared by the environment, and not both trained and evaluated on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from environments.base import Capabilities
from rlhf.checking import no_split
from rlhf.errors import RecipeError
from rlhf.recipe.environment_properties import properties_declared_by

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def check_declared_split(split: str, environment: object, where: str) -> None:
    """Raise RecipeError, at key or option `where`, for a split that the environment does not declare.

    Of an environment that declares nothing, what it can list shows.
    """
    if Capabilities(environment).properties is not None:
        for problem in no_split(split, properties_declared_by(environment).splits, where):
            raise problem.error


def refuse_judging(recipe: Recipe) -> None:
    """Raise RecipeError where a stage draws from the split of the result, unless `evaluation.allow_overlap` is true."""
    own, offered = recipe.evaluation, properties_declared_by(recipe.environment).splits
    if (stages := drawing_from_the_judged(recipe)) and not own.allow_overlap:
        raise RecipeError(
            "evaluation tasks would be trained on",
            where="evaluation.split",
            got=f"{own.split}, which {' and '.join(stages)} draw{'s' * (len(stages) == 1)} from",
            expected=" or ".join(split for split in offered if split != own.split) or "another split",
            hint="name another split; if it is meant, set evaluation.allow_overlap: true",
        )


def drawing_from_the_judged(recipe: Recipe) -> list[str]:
    """YAML paths of the stages that draw from the split of the result."""
    judged = recipe.evaluation.split
    here = (s.environment is None and not s.reads_file for s in recipe.stages)
    drawing = ((i, stage.split) for i, (stage, is_here) in enumerate(zip(recipe.stages, here, strict=True)) if is_here)
    return [f"stages[{i}]" for i, split in drawing if split == judged]
