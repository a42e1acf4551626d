"""What is asked of the roles in which an agent calls the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from agents.contrib.critic import ActorCritic
from agents.contrib.self_play import SelfPlay
from agents.memory.base import MEMORY
from rlhf.errors import RecipeError, nearest
from rlhf.recipe.declared import declared_by
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe

_PLAIN = "the empty role is that of plain actions"
_ASKING = f"take a memory that asks the policy, such as summary, or leave '{MEMORY}' out"


def roles_of(recipe: Recipe) -> tuple[str, ...]:
    """Roles that the calls of the recipe's agent can have; nothing where that cannot be known beforehand."""
    if isinstance(recipe.agent, SelfPlay):
        seats = declared_by(recipe.environment).seats
        return (*seats, *filter(None, recipe.agent.player.roles)) if seats else ()
    return tuple(getattr(recipe.agent, "roles", ()))


def _check_trained(recipe: Recipe) -> None:
    roles = roles_of(recipe)
    for path, stage in policy_gradient_stages(recipe):
        for role in stage.train_roles or ():
            if roles and role not in roles:
                raise never_called(f"{path}.train_roles", role, roles, _PLAIN)


def never_called(where: str, role: str, roles: Sequence[str], way_out: str) -> RecipeError:
    """What is said of a role that is none of `roles`, those in which the agent calls the policy."""
    return RecipeError(
        "the agent never calls the policy in this role",
        where=where,
        got=repr(role),
        expected=", ".join(map(repr, roles)) or "a role that the agent says it has, and it says of none",
        hint=(_ASKING if role == MEMORY and roles else nearest(role, roles)) or way_out,
    )


def _caution_calls(recipe: Recipe) -> Iterator[str]:
    agent, allowed = recipe.agent, recipe.limits.max_calls
    if isinstance(agent, ActorCritic) and agent.max_calls > allowed:
        most = f"may take {agent.max_calls} calls in a turn"
        yield f"agent.max_rounds {agent.max_rounds} {most}, limits.max_calls is {allowed}"


ROLE_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_trained,)
ROLE_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_calls,)
