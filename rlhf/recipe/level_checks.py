"""What credit on two levels, and an agent that plans, ask of the settings around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlhf.errors import RecipeError, nearest
from rlhf.recipe.keys import keys_of, section_in
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.credit.two_level import TwoLevel
    from rlhf.recipe.model import Recipe


def _levels(path: str, part: object) -> Iterator[tuple[str, TwoLevel]]:
    """Path and settings of each estimator on two levels, in `part` or held by it."""
    from rlhf.credit.two_level import TwoLevel

    if isinstance(part, TwoLevel):
        yield path, part
    for name, key in keys_of(type(part)).items():
        held = getattr(part, name) if section_in(key.annotation) == "advantage" else None
        if isinstance(held, list | tuple):
            for i, inner in enumerate(held):
                yield from _levels(f"{path}.{name}[{i}]", inner)
        elif held is not None:
            yield from _levels(f"{path}.{name}", held)


def _all_levels(recipe: Recipe) -> Iterator[tuple[str, TwoLevel]]:
    for path, stage in policy_gradient_stages(recipe):
        yield from _levels(f"{path}.advantage", stage.advantage)


def _check_low_reward(recipe: Recipe) -> None:
    for path, levels in _all_levels(recipe):
        if levels.low_reward is not None and levels.low_reward not in recipe.trained_rewards:
            raise RecipeError(
                "there is no such reward",
                where=f"{path}.low_reward",
                got=levels.low_reward,
                expected=", ".join(recipe.trained_rewards),
                hint=nearest(levels.low_reward, recipe.trained_rewards)
                or "name a key of `rewards` that judges each turn",
            )


def _caution_calls(recipe: Recipe) -> Iterator[str]:
    from agents.planner import PlannerExecutor

    if not isinstance(recipe.agent, PlannerExecutor):
        return
    n, allowed = recipe.agent.max_plans_per_turn, recipe.limits.max_calls
    most = 2 * n + 1  # an executor that says done, then a plan and a word of the executor for each
    if most > allowed:
        yield f"agent.max_plans_per_turn {n} may take {most} calls in a turn, limits.max_calls is {allowed}"


LEVEL_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_low_reward,)
LEVEL_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_calls,)
