"""Requirements of demonstrations: an oracle, and an agent that can be shown its actions."""

from __future__ import annotations

from collections.abc import Iterator

from agents.base import Capabilities
from environments.base import can_demonstrate
from rlhf.checking import CheckContext, Problem


def unplanned(where: str, got: str, do: str, context: CheckContext) -> Iterator[Problem]:
    """Yield a problem where the environment cannot demonstrate.

    Args:
        where: YAML path of what asks for demonstrations.
        got: what is written there.
        do: how to do without.
        context: of the part that asks.
    """
    if not can_demonstrate(context.recipe.environment):
        yield Problem(
            "this environment cannot demonstrate",
            where=where,
            got=got,
            expected="an environment with a method `plan(task, taken)`",
            do=f"{do}, or write `plan`",
        )


def unwritten(where: str, got: str, remove: str, context: CheckContext) -> Iterator[Problem]:
    """Yield a problem where the agent cannot imitate foreign text; arguments as of `unplanned`."""
    if Capabilities(context.recipe.agent).write is None:
        yield Problem(
            "this agent cannot be shown demonstrations",
            where=where,
            got=f"{got}, which lacks write",
            expected="a method `write(shown)` beside `act`",
            do=f"{remove}, or write it as agents.chat.ChatAgent does",
        )


def unshowable(context: CheckContext) -> Iterator[Problem]:
    """Yield a problem where demonstrations cannot be made for the key that the part stands in."""
    environment, agent = context.recipe.environment, context.recipe.agent
    yield from unplanned(context.path, context.kind_of("environment", environment), "remove the key", context)
    yield from unwritten(context.path, context.kind_of("agent", agent), "remove the key", context)
