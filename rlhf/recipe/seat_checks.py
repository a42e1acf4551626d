"""What games with several seats ask of the agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agents.self_play import SelfPlay
from rlhf.errors import RecipeError, nearest
from rlhf.kinds import kind_of
from rlhf.recipe.declared import declared_by

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def _check_seats(recipe: Recipe) -> None:
    seats = declared_by(recipe.environment).seats
    if not seats:
        return
    if not isinstance(recipe.agent, SelfPlay):
        if getattr(recipe.agent, "plays_seats", False) is True:
            return
        raise RecipeError(
            "this agent would play all seats of the game as if they were one",
            where="agent.kind",
            got=f"{kind_of('agent', recipe.agent)}, for {', '.join(seats)}",
            expected="an agent that keeps a conversation for each seat",
            hint="write agent: {kind: self_play}; an agent of your own that can has an attribute plays_seats = True",
        )
    for name in recipe.agent.systems:
        if name not in seats:
            raise RecipeError(
                "the game has no such seat",
                where=f"agent.systems.{name}",
                got=name,
                expected=", ".join(seats),
                hint=nearest(name, seats) or "remove the key",
            )


SEAT_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_seats,)
