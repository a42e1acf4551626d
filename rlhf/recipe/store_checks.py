"""What an agent with a store asks of the recipe around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agents.stores.remembering import Remembering
from rlhf.errors import RecipeError
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def _check_store(recipe: Recipe) -> None:
    if not isinstance(recipe.agent, Remembering):
        return
    if isinstance(recipe.agent.inner, Remembering):
        raise RecipeError(
            "an agent has one store",
            where="agent.inner.kind",
            got="remembering",
            expected="another agent",
            hint="remove one of the two",
        )
    stages = list(policy_gradient_stages(recipe))
    if not stages:
        raise RecipeError(
            "nothing is ever stored: only stages of policy gradients write to the store",
            where="agent.store",
            got=", ".join(type(stage).__name__ for stage in recipe.stages),
            expected="a stage {kind: policy_gradient}",
            hint="use the inner agent alone",
        )
    splits = {stage.split for _, stage in stages}
    if len(splits) > 1:
        raise RecipeError(
            "the stages draw from several splits, and a store takes the tasks of one",
            where="stages",
            got=", ".join(sorted(splits)),
            expected="one split",
            hint="give all stages of policy gradients the same split",
        )


STORE_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_store,)
