"""What guidance asks of the settings around it: votes, demonstrations beside attempts, and new references."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf.catalog import kind_of
from rlhf.errors import RecipeError
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def _check_votes(recipe: Recipe) -> None:
    for name, weighted in recipe.rewards.items():
        for path, stage in policy_gradient_stages(recipe):
            if weighted.weight and hasattr(weighted.reward, "over_group") and stage.group_size < 2:
                raise RecipeError(
                    "this reward compares the attempts at a task, and there is one of each",
                    where=f"{path}.group_size",
                    got=str(stage.group_size),
                    expected=f"at least 2 for rewards.{name}, {kind_of('reward', weighted.reward)}",
                    hint="attempt each task several times: group_size: 8",
                )


GUIDANCE_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_votes,)
