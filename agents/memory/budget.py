"""Memory with a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import PolicyHandle
from agents.memory.base import Exchange, MemoryBase, MemoryContext, conversation
from agents.memory.window import newest
from rlhf.data import Message
from rlhf.settings import STRICT

_LEFT_OUT = "(left out)"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TokenBudget(MemoryBase):
    """Shows all actions, and leaves out the oldest observations, but the first, until the conversation fits.

    Several are left out at a time, so that prompts stay the same for some turns and caches are reused. If leaving out
    all of them is not enough, the oldest exchanges go too, and what remains is the opening and the newest observation.
    """

    asks: ClassVar[bool] = False

    max_tokens: Annotated[int, Field(ge=16)] = 1024
    """Longest conversation; the agent's instructions and the task's own messages come on top."""
    at_a_time: Annotated[int, Field(ge=1)] = 4
    """Observations that are left out together."""

    async def recall(self, past: Sequence[Exchange], policy: PolicyHandle, notes: Mapping[str, str]) -> MemoryContext:
        """Leave out as little as needed."""
        for messages in self._shorter_and_shorter(past):
            if policy.n_tokens(messages) <= self.max_tokens:
                break
        return MemoryContext(messages)

    def _shorter_and_shorter(self, past: Sequence[Exchange]) -> Iterator[tuple[Message, ...]]:
        """The conversation without ever more observations, then without ever more exchanges; the last is shortest."""
        n_old = max(len(past) - 2, 0)
        for n in range(0, n_old + self.at_a_time, self.at_a_time):
            yield self._without(past, n)
        for turns in range(n_old, -1, -1):
            yield conversation(newest(past, turns))

    @staticmethod
    def _without(past: Sequence[Exchange], n: int) -> tuple[Message, ...]:
        """Conversation without observations 1 to n; the first and the newest always stay."""
        last = min(n, len(past) - 2)
        shown = (e.with_observation(_LEFT_OUT) if 1 <= i <= last else e.messages for i, e in enumerate(past))
        return tuple(message for messages in shown for message in messages)
