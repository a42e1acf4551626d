"""What guidance asks of the settings around it: votes, demonstrations beside attempts, and new references."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def _check_references(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if stage.reference_reset is None:
            continue
        if not getattr(stage.loss, "needs_ref", False):
            raise RecipeError(
                "there is no reference to renew",
                where=f"{path}.reference_reset",
                got=f"loss {kind_of('loss', stage.loss)} without a KL term",
                expected="a loss that compares with a reference",
                hint="set loss.kl and loss.kl_coef, or remove reference_reset",
            )
        _check_patience(path, stage)


def _check_patience(path: str, stage: Any) -> None:
    patience, every = stage.reference_reset.patience, stage.evaluate_every
    n_evaluations = (stage.steps - 1) // every if every else 0  # none after the last step
    if patience is not None and n_evaluations <= patience:
        raise RecipeError(
            "the patience never ends: there are too few evaluations",
            where=f"{path}.reference_reset.patience",
            got=f"{patience}, with {n_evaluations} evaluations between {stage.steps} steps",
            expected="more evaluations than that, the first being the best so far",
            hint=f"set {path}.evaluate_every, a lower one, or a lower patience",
        )


GUIDANCE_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_votes, _check_references)
