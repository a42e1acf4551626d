"""What games with several seats ask of the agent, and of the estimator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from agents.contrib.self_play import SelfPlay
from rewards.combinators.parts import with_parts
from rlhf.credit.contrib.self_play import Seats
from rlhf.errors import RecipeError, nearest
from rlhf.recipe.declared import declared_by
from rlhf.recipe.loss_checks import policy_gradient_stages
from rlhf.registry import kind_of

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


def _caution_credit(recipe: Recipe) -> Iterator[str]:
    """An estimator of a stranger's may read the notes that say who had a turn; those of the catalogue do not."""
    if len(declared_by(recipe.environment).seats) < 2:
        return
    for path, stage in policy_gradient_stages(recipe):
        kind = kind_of("advantage", stage.advantage)
        if ":" in kind or any(isinstance(part, Seats) for _, part in with_parts("", stage.advantage)):
            continue
        inner = "" if stage.advantage.needs_values else f", inner: {{kind: {kind}}}"
        others = ", an older version's among them" if stage.opponents is not None else ""
        yield (
            f"{path}.advantage {kind} tells no seats apart: what one wins praises the moves of the other{others}; "
            f"unless they win together, write advantage: {{kind: seats{inner}}}"
        )


SEAT_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_seats,)
SEAT_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_credit,)
