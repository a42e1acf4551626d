"""What is asked of the splits that tasks are drawn from, and which of them must not be one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlhf.errors import RecipeError, nearest
from rlhf.recipe.declared import declared_by
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def check_split(split: str, environment: object, where: str) -> None:
    """Raise RecipeError, at key or option `where`, for a split that the environment does not declare."""
    offered = declared_by(environment).splits
    if split not in offered:
        raise RecipeError(
            "the environment has no such split",
            where=where,
            got=split,
            expected=", ".join(offered),
            hint=nearest(split, offered) or "name one of these, or list it in the environment's `properties.splits`",
        )


def check_declared_split(split: str, environment: object, where: str) -> None:
    """As `check_split`, where the environment declares anything: of another, what it can list shows."""
    from environments.base import Properties

    if isinstance(getattr(environment, "properties", None), Properties):
        check_split(split, environment, where)


def refuse_judging(recipe: Recipe) -> None:
    """Raise RecipeError where a stage draws from the split of the result, unless `evaluation.allow_overlap` is true."""
    own, offered = recipe.evaluation, declared_by(recipe.environment).splits
    if (stages := _drawing_from_the_judged(recipe)) and not own.allow_overlap:
        raise RecipeError(
            "tasks that judge the policy would be trained on",
            where="evaluation.split",
            got=f"{own.split}, which {' and '.join(stages)} draw{'s' * (len(stages) == 1)} from",
            expected=" or ".join(split for split in offered if split != own.split) or "another split",
            hint="name another split; if it is meant, set evaluation.allow_overlap: true",
        )


def _drawing_from_the_judged(recipe: Recipe) -> list[str]:
    judged = recipe.evaluation.split
    return [f"stages[{i}]" for i, stage in enumerate(recipe.stages) if getattr(stage, "split", None) == judged]


def _check_splits(recipe: Recipe) -> None:
    wanted = {"evaluation.split": recipe.evaluation.split}
    wanted |= {f"stages[{i}].split": stage.split for i, stage in enumerate(recipe.stages) if hasattr(stage, "split")}
    if any(stage.evaluate_every for _, stage in policy_gradient_stages(recipe)):
        wanted["evaluation.watch_split"] = recipe.evaluation.watch_split
    for where, split in wanted.items():
        check_split(split, recipe.environment, where)


def _caution_unseen(recipe: Recipe) -> Iterator[str]:
    if stages := _drawing_from_the_judged(recipe):
        split = f"evaluation.split {recipe.evaluation.split}"
        yield f"{split} is that of {' and '.join(stages)}: success is measured on tasks that were trained on"


SPLIT_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_splits,)
SPLIT_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_unseen,)
