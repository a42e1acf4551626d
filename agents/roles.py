"""Roles of an agent's policy calls (plan, memory, seats): lookup, and the error for an unknown one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from agents.base import Capabilities
from agents.memory.base import MEMORY
from rlhf.checking import Problem
from rlhf.errors import nearest

#: What to do about a role that is none, where plain actions are meant.
PLAIN_IS_EMPTY = "the empty role is that of plain actions"
_ASKING = f"take a memory that asks the policy, such as summary, or leave '{MEMORY}' out"


@runtime_checkable
class TakesSeats(Protocol):
    """An agent whose roles depend on the seats of the game."""

    def roles_in(self, seats: Sequence[str]) -> tuple[str, ...]:
        """Roles of its calls in a game with these seats; none where unknown beforehand."""


def roles_of(agent: Any, seats: Sequence[str] = ()) -> tuple[str, ...]:
    """Roles of an agent's calls, by its attribute `roles`; none where undeclared."""
    return agent.roles_in(seats) if isinstance(agent, TakesSeats) else tuple(Capabilities(agent).roles)


def never_called(where: str, role: str, roles: Sequence[str], way_out: str) -> Problem:
    """Problem of a role that the agent never uses."""
    return Problem(
        "the agent never calls the policy in this role",
        where=where,
        got=repr(role),
        expected=", ".join(map(repr, roles)) or "a role that the agent declares; it declares none",
        do=(_ASKING if role == MEMORY and roles else nearest(role, roles)) or way_out,
    )
