"""Full history as the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic.dataclasses import dataclass

from agents.base import PolicyHandle
from agents.memory.base import Exchange, MemoryBase, MemoryContext, conversation
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FullHistory(MemoryBase):
    """Shows the whole conversation: caches are reused, and an episode is one row for the trainer."""

    asks: ClassVar[bool] = False

    async def recall(self, past: Sequence[Exchange], policy: PolicyHandle, notes: Mapping[str, str]) -> MemoryContext:
        """Show everything."""
        return MemoryContext(conversation(past))
