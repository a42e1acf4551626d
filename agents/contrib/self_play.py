"""Self-play: one policy in all seats of a game, each with its own conversation and role.

Source of training by self-play on such games: SPIRAL, arXiv 2506.24119.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History, PolicyHandle
from agents.chat import ChatAgent
from agents.memory.base import DemonstrationInputs
from agents.policy_proxy import PolicyProxy
from rlhf.checking import CheckContext, Problem
from rlhf.data import Action
from rlhf.data.trajectory import SEAT
from rlhf.errors import nearest
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SelfPlay:
    """Agent that asks the policy for the seat to move, with that seat's conversation alone.

    The environment names the seat of each turn (`StepResult.seat`). Where it names none, because the other player is
    its own, this is an agent of kind `chat`: what was trained in all seats can so be measured against others.

    An action has the seat for its role, which `train_roles` of the stage and `advantage: {kind: seats}` go by.
    """

    plays_seats: ClassVar[bool] = True

    player: ChatAgent = Field(default_factory=ChatAgent)
    """Player of each seat: the keys of an agent of kind `chat`."""
    systems: Mapping[str, str] = Field(default_factory=dict)
    """Instruction of a seat, by its name, in the place of the player's `system`."""

    def __hash__(self) -> int:
        """Settings are hashed by their text, as `systems` cannot be."""
        return hash(repr(self))

    @property
    def needs(self) -> tuple[str, ...]:
        """Inputs of a demonstration besides actions."""
        return self.player.needs

    def roles_in(self, seats: Sequence[str]) -> tuple[str, ...]:
        """The seats, and roles of the player's other calls; none if the environment plays the other seat."""
        return (*seats, *filter(None, self.player.roles)) if seats else ()

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse an instruction for a seat that the game does not have."""
        seats = context.recipe.properties.seats
        for name in self.systems if seats and context.parent is None else ():
            if name not in seats:
                yield Problem(
                    "the game has no such seat",
                    where=context.at(f"systems.{name}"),
                    got=name,
                    expected=", ".join(seats),
                    do=nearest(name, seats) or "remove the key",
                )

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Choose the action of the seat that has the turn."""
        seat = history.seats[-1] if history.seats else ""
        if not seat:
            return await self.player.act(history, policy)
        own = [said for said, of in zip(self.player.past(history), history.seats, strict=True) if of == seat]
        player = replace(self.player, system=self.systems.get(seat, self.player.system))
        action = await player.act_on(own, history, PolicyProxy(policy, seat))
        return replace(action, notes={SEAT: seat, **action.notes})

    def write(self, shown: DemonstrationInputs) -> str:
        """Write the reply that a demonstration gives."""
        return self.player.write(shown)
