"""Sliding window: the last turns as the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import PolicyHandle
from agents.memory.base import Exchange, MemoryBase, MemoryContext, conversation
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Window(MemoryBase):
    """Sliding window: the opening and the last turns, with dots for what was dropped between them.

    With `block`, turns are dropped so many at a time. Between two drops each prompt extends the one before, so that
    engines reuse its cached prefix and a row of training holds all turns of a block.
    """

    asks: ClassVar[bool] = False

    turns: Annotated[int, Field(ge=0)] = 3
    """Minimum number of last turns shown, beside the observation that waits for an answer."""
    block: Annotated[int, Field(ge=1)] = 1
    """Number of turns dropped at a time: between `turns` and `turns + block - 1` are shown. 1 drops one every turn."""

    async def recall(self, past: Sequence[Exchange], policy: PolicyHandle, notes: Mapping[str, str]) -> MemoryContext:
        """Show the opening and the newest exchanges."""
        return MemoryContext(conversation(newest(past, self.turns, block=self.block)))


def newest(past: Sequence[Exchange], turns: int, between: str = "...", block: int = 1) -> Sequence[Exchange]:
    """The last `turns` exchanges and the one that waits, the opening put before the first of them.

    Args:
        past: all of it.
        turns: finished ones to keep at least.
        between: what stands between the opening and what is kept, on lines of its own.
        block: how many are dropped at a time.
    """
    first = len(past) - 1 - turns
    first -= first % block
    if first <= 0:
        return past
    kept = past[first]
    text = f"{past[0].said}\n{between}\n{kept.observation}"
    return (Exchange(text, kept.said, kept.reply, kept.action, kept.notes), *past[first + 1 :])
