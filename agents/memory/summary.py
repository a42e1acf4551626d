"""Context compaction: a running summary that the policy writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import PolicyHandle
from agents.memory.base import MEMORY, Exchange, MemoryBase, MemoryContext, as_text, conversation
from agents.parsing import split_thoughts
from rlhf.data import Generation, Message, Role
from rlhf.settings import STRICT

_SUMMARY, _UP_TO = "summary", "summarised"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Summary(MemoryBase):
    """Shows the opening, a summary of what is long past, and the turns since.

    When more than `every` turns have come since the last summary, the policy is asked for a new one: it is shown the
    old one and those turns. Its answer, without thoughts, is cut at `max_chars`, so that the prompt is bounded however
    much it writes.
    """

    needs: ClassVar[tuple[str, ...]] = ("recall",)

    every: Annotated[int, Field(ge=1)] = 6
    """Turns that are shown as they were before they are summarised."""
    keep: Annotated[int, Field(ge=0)] = 1
    """Of those, how many of the newest stay as they were."""
    max_chars: Annotated[int, Field(ge=1)] = 1000
    """Longest summary."""
    ask: str = "Sum up what has happened so far. Keep everything that may be needed later."
    """Prompt for a summary, at the end of the turns to be summarised."""

    def __post_init__(self) -> None:
        """Hold the bounds together."""
        if self.keep >= self.every:
            raise ValueError(f"keep is {self.keep}, expected less than every ({self.every})")

    async def recall(self, past: Sequence[Exchange], policy: PolicyHandle, notes: Mapping[str, str]) -> MemoryContext:
        """Show the summary and what came after it; ask for a new one where it is time."""
        summary, first = _latest(past)
        generations: tuple[Generation, ...] = ()
        kept: dict[str, str] = {}
        n_finished = len(past) - 1
        if n_finished - first > self.every:
            last = n_finished - self.keep
            earlier = f"{summary}\n" if summary else f"{past[0].said}\n" if first else ""
            question = Message(Role.USER, f"{earlier}{as_text(past[first:last])}\n\n{self.ask}")
            reply = await policy.generate((question,), role=MEMORY)
            said = split_thoughts(reply.text).answer.strip()
            summary, first, generations = said[: self.max_chars], last, (reply.generation,)
            kept = {_SUMMARY: summary, _UP_TO: str(first)}
        if not first:
            return MemoryContext(conversation(past))
        text = "\n".join(filter(None, [past[0].said, summary, past[first].observation]))
        return MemoryContext((*past[first].opening_with(text), *conversation(past[first + 1 :])), generations, kept)


def _latest(past: Sequence[Exchange]) -> tuple[str, int]:
    """The newest summary, and how many turns it sums up."""
    for exchange in reversed(past):
        if _UP_TO in exchange.notes:
            return exchange.notes[_SUMMARY], int(exchange.notes[_UP_TO])
    return "", 0
