"""Difference memory: what has changed since the last observation.

Source: Piterbarg, Pinto, Fergus, "diff History for Neural Language Agents", arXiv 2312.07540.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import PolicyHandle
from agents.memory.base import Exchange, MemoryBase, MemoryContext
from agents.memory.window import newest
from rlhf.data import Message
from rlhf.settings import STRICT

_SAME = "(no change)"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DiffHistory(MemoryBase):
    """Shows the first observation whole, and each later one as its differences from the one before.

    A later one is shown whole where its differences would be longer. Lists of possible actions are shown with the
    first and the newest observation.
    """

    asks: ClassVar[bool] = False

    turns: Annotated[int, Field(ge=0)] | None = None
    """Number of last turns shown; all where none is given. The first that is shown is whole."""

    async def recall(self, past: Sequence[Exchange], policy: PolicyHandle, notes: Mapping[str, str]) -> MemoryContext:
        """Show the first observation and differences."""
        kept = past if self.turns is None else newest(past, self.turns)
        return MemoryContext(tuple(_messages(kept)))


def _messages(past: Sequence[Exchange]) -> Iterator[Message]:
    before: str | None = None
    for exchange in past:
        text = exchange.observation if before is None else difference(before, exchange.said)
        if exchange.reply is None and before is not None:
            text += exchange.observation.removeprefix(exchange.said)  # the list of possible actions
        yield from exchange.with_observation(text)
        before = exchange.said


def difference(before: str, after: str) -> str:
    """Lines that differ, as a unified diff without context; `after` itself where that is no longer."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    if not lines:
        return _SAME
    text = "\n".join(lines)
    return text if len(text) < len(after) else after
