"""Finished subgoals as summaries, the present one in full.

Source: HiAgent, arXiv 2408.09559.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import PolicyHandle
from agents.memory.base import (
    MEMORY,
    DemonstrationInputs,
    Exchange,
    MemoryBase,
    MemoryContext,
    ParsedReply,
    as_text,
    conversation,
)
from agents.parsing import split_thoughts
from rlhf.data import Generation, Message, Role
from rlhf.settings import STRICT

#: Names of notes: the subgoal that begins with a turn, and the numbers of the chunks that the policy has asked for.
SUBGOAL, RETRIEVED = "subgoal", "retrieved"
_SUMMARY_OF = "summary of subgoal "
_LINE = re.compile(r"^[ \t]*subgoal[ \t]*:[ \t]*(.*)$", re.IGNORECASE | re.MULTILINE)
_RETRIEVE = re.compile(
    r"^[ \t]*(?:<action>[ \t]*|action[ \t]*:[ \t]*)?retrieve[ (]*([0-9]{1,6})\)?[ \t]*(?:</action>[ \t]*)?$",
    re.IGNORECASE | re.MULTILINE,
)


@plain_dataclass(frozen=True, slots=True)
class Chunk:
    """The turns of one subgoal: exchanges `first` to before `end`."""

    number: int
    subgoal: str
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Subgoals(MemoryBase):
    """Memory of subgoals: a policy-written summary of each finished one, and the present one's turns.

    A reply that begins something new starts with a line `Subgoal: ...`; the turns before it are then summed up in one
    more call. The action `retrieve N` is for the memory: the turns of subgoal N are shown in full, and the policy is
    asked again in the same turn. A subgoal that does not end within `max_turns` is ended here.
    """

    needs: ClassVar[tuple[str, ...]] = ("recall", "subgoal")
    instruction: ClassVar[str] = (
        "When you begin something new, write the line 'Subgoal: ...' before your action. Finished subgoals are shown "
        "as summaries; the action 'retrieve N' shows the N-th of them in full."
    )

    max_turns: Annotated[int, Field(ge=1)] = 10
    """Most turns that are shown of the present subgoal; older ones are summed up as if it had ended."""
    max_retrievals: Annotated[int, Field(ge=0)] = 2
    """Maximal retrievals of finished subgoals in a turn."""
    max_chars: Annotated[int, Field(ge=1)] = 500
    """Longest summary of one subgoal."""
    ask: str = "Sum up in one line what came of this subgoal."
    """Prompt for a summary, at the end of the turns of a subgoal."""

    async def recall(self, past: Sequence[Exchange], policy: PolicyHandle, notes: Mapping[str, str]) -> MemoryContext:
        """Show summaries and the present chunk; ask for the summaries that are missing."""
        *finished, present = self._chunks(past)
        known = {name: note for e in past for name, note in e.notes.items()} | dict(notes)
        generations: list[Generation] = []
        new: dict[str, str] = {}
        for chunk in finished:
            name = f"{_SUMMARY_OF}{chunk.number}"
            if name not in known:
                said = f"Subgoal: {chunk.subgoal}\n{as_text(past[chunk.first : chunk.end])}"
                reply = await policy.generate((Message(Role.USER, f"{said}\n\n{self.ask}"),), role=MEMORY)
                generations.append(reply.generation)
                new[name] = " ".join(split_thoughts(reply.text).answer.split())[: self.max_chars]
        wanted = {int(number) for number in notes.get(RETRIEVED, "").split()}
        text = "\n".join(self._lines(past, finished, present, wanted, known | new))
        shown = (*past[present.first].opening_with(text), *conversation(past[present.first + 1 :]))
        return MemoryContext(shown, tuple(generations), new)

    def read(self, text: str, past: Sequence[Exchange], notes: Mapping[str, str]) -> ParsedReply:
        """Take the subgoal's line and a request for the memory out of a reply."""
        kept = dict(notes)
        if match := _LINE.search(text):
            text = text[: match.start()] + text[match.end() :]
            if match[1].strip():
                kept[SUBGOAL] = match[1].strip()
        asked = kept.get(RETRIEVED, "").split()
        wanted = _RETRIEVE.search(text)
        if wanted and len(asked) < self.max_retrievals and 1 <= int(wanted[1]) < len(self._chunks(past)):
            kept[RETRIEVED] = " ".join([*asked, wanted[1]])
            return ParsedReply(text, kept, again=True)
        return ParsedReply(text, kept)

    def write(self, text: str, shown: DemonstrationInputs) -> str:
        """Begin with the subgoal where it is another than before."""
        is_new = bool(shown.subgoal) and shown.subgoal != shown.before
        return f"Subgoal: {shown.subgoal}\n{text}" if is_new else text

    def _chunks(self, past: Sequence[Exchange]) -> list[Chunk]:
        """Cut all turns at their subgoals; the last chunk holds the observation that waits for an answer."""
        chunks: list[Chunk] = []
        first, subgoal = 0, ""
        for i, exchange in enumerate(past):
            named = exchange.notes.get(SUBGOAL)
            if i > first and (named is not None or i - first >= self.max_turns):
                chunks.append(Chunk(len(chunks) + 1, subgoal, first, i))
                first = i
            subgoal = named or subgoal
        return [*chunks, Chunk(len(chunks) + 1, subgoal, first, len(past))]

    @staticmethod
    def _lines(
        past: Sequence[Exchange], finished: Sequence[Chunk], present: Chunk, wanted: set[int], known: Mapping[str, str]
    ) -> Iterator[str]:
        """Yield the lines before the turns of the present chunk, and its first observation."""
        if present.first:
            yield past[0].said
        for chunk in finished:
            yield f"Subgoal {chunk.number}: {chunk.subgoal}" if chunk.subgoal else f"Subgoal {chunk.number}"
            yield (
                as_text(past[chunk.first : chunk.end])
                if chunk.number in wanted
                else known[f"{_SUMMARY_OF}{chunk.number}"]
            )
        yield past[present.first].observation
