"""What stages that are no policy gradient ask of the settings around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe

#: Keys of demonstrations, which attempts take the place of.
_OF_DEMONSTRATIONS = ("n_demonstrations", "random_share", "unsolved_share")


def _imitating(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each stage that imitates attempts."""
    from rlhf.trainers.supervised import Supervised

    found = ((f"stages[{i}]", stage) for i, stage in enumerate(recipe.stages))
    return ((path, stage) for path, stage in found if isinstance(stage, Supervised) and stage.attempts is not None)


def _check_attempts(recipe: Recipe) -> None:
    for path, stage in _imitating(recipe):
        for name in _OF_DEMONSTRATIONS:
            if getattr(stage, name) != getattr(type(stage)(), name):
                raise RecipeError(
                    "this key has no effect",
                    where=f"{path}.{name}",
                    got=str(getattr(stage, name)),
                    expected=f"nothing, because {path}.attempts takes the place of demonstrations",
                    hint="remove the key, or attempts",
                )


def _check_scored(recipe: Recipe) -> None:
    for path, stage in _imitating(recipe):
        if stage.attempts.keep == "best" and not any(weighted.weight for weighted in recipe.rewards.values()):
            raise RecipeError(
                "no attempt can be better than another: every reward has weight 0",
                where="rewards",
                got=", ".join(recipe.rewards) or "no rewards",
                expected=f"a reward with a weight, for {path}.attempts.keep: best",
                hint="add rewards: {outcome: {kind: outcome}}, or use keep: solved",
            )


STAGE_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_attempts, _check_scored)
