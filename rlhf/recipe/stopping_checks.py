"""What ending a stage early asks of the settings around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf.errors import RecipeError
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def _check_patience(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        every = stage.evaluate_every
        n_evaluations = (stage.steps - 1) // every if every else 0  # none after the last step
        if stage.patience is not None and n_evaluations <= stage.patience:
            raise RecipeError(
                "the stage would never end early: there are too few evaluations",
                where=f"{path}.patience",
                got=f"{stage.patience}, with {n_evaluations} evaluations between {stage.steps} steps",
                expected="more evaluations than that, the first being the best so far",
                hint=f"set {path}.evaluate_every, a lower one, or a lower patience",
            )


STOPPING_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_patience,)
