"""The contract of a memory: from everything that happened to what the policy is shown of it.

A memory is a frozen dataclass that holds nothing between turns. What it makes of the past, it either makes afresh each
turn, or leaves as a note with the turn (`Action.notes`), where it finds it again. An episode can therefore be replayed,
branched and resumed from its turns alone.

A memory only chooses what comes before the next call. Each call keeps its own prompt ids, so a memory that rewrites the
past merely makes an episode several rows for the trainer; nothing is tokenised again that a policy said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, runtime_checkable

from agents.base import PolicyHandle
from rlhf.capabilities import Capability, CapabilityView
from rlhf.data import Generation, Message, Role

#: Role of a call that asks for what is to be remembered; see `Generation.role`.
MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Observation with the reply and action that followed.

    Attributes:
        observation: as it is shown, with the possible actions where an agent lists them.
        said: the environment's own words.
        reply: what the policy answered, with the ids it sampled; None for the observation that waits for an answer.
        action: what was read in the reply.
        notes: what was left with the turn.
        role: who says the observation: the user, or a tool.
    """

    observation: str
    said: str
    reply: Message | None = None
    action: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    role: Role = Role.USER

    @property
    def messages(self) -> tuple[Message, ...]:
        """The exchange as a conversation has it."""
        shown = Message(self.role, self.observation)
        return (shown,) if self.reply is None else (shown, self.reply)

    def as_from(self, role: Role) -> Exchange:
        """The exchange with an observation that another says."""
        return replace(self, role=role)

    def opening_with(self, text: str) -> tuple[Message, ...]:
        """`with_observation` for the first exchange of a prompt, which is the user's as many templates require."""
        return self.as_from(Role.USER).with_observation(text)

    def with_observation(self, text: str) -> tuple[Message, ...]:
        """The exchange with another text in the place of the observation."""
        return (Message(self.role, text), *self.messages[1:])


@dataclass(frozen=True, slots=True)
class MemoryContext:
    """Messages that a memory selects for a call, and the notes it keeps.

    Attributes:
        messages: come after the agent's instructions and the task's own messages.
        generations: calls of the policy that the memory made, such as a summary.
        notes: what is to be left with this turn.
    """

    messages: tuple[Message, ...]
    generations: tuple[Generation, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """Reply after the memory has parsed it: the text from which the action is read.

    Attributes:
        text: the reply without the part for the memory.
        notes: what is to be left with this turn.
        again: the reply was for the memory only; the policy is called again in the same turn.
    """

    text: str
    notes: Mapping[str, str] = field(default_factory=dict)
    again: bool = False


@dataclass(frozen=True, slots=True)
class DemonstrationInputs:
    """Inputs of a demonstration for one turn.

    Attributes:
        action: the demonstrated action.
        recall: what to remember of the episode so far, where the environment provides it.
        recalled: `recall` of the turn before.
        subgoal: purpose of the action, where the environment provides it.
        before: `subgoal` of the turn before.
        role: of the call; see `Generation.role`.
        n_calls: calls of the agent in this turn so far, those of role `memory` not counted.
        asked: the last message of the prompt.
    """

    action: str
    recall: str = ""
    subgoal: str = ""
    before: str = ""
    role: str = ""
    n_calls: int = 0
    recalled: str = ""
    asked: str = ""


@runtime_checkable
class Memory(Protocol):
    """Selects the part of the past that a policy is shown; a frozen dataclass of recipe keys."""

    async def recall(self, past: Sequence[Exchange], policy: PolicyHandle, notes: Mapping[str, str]) -> MemoryContext:
        """Choose what is shown.

        Args:
            past: from the opening to the observation that waits for an answer, at least that one.
            policy: may be asked, with the role `memory`.
            notes: those of this turn so far, where the policy is asked again.
        """


class MemoryBase:
    """Base class of memories, with the defaults of those that read nothing from replies."""

    needs_thoughts: ClassVar[bool] = False
    """True if memories stand in the `<think>` block of each reply."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Needs of a demonstration beside actions: `recall`, what to remember; `subgoal`, what an action is for."""
    asks: ClassVar[bool] = True
    """True if it may ask the policy, with the role `memory`."""
    instruction: ClassVar[str] = ""
    """Said once to the policy, at the end of the agent's own instructions."""

    def read(self, text: str, past: Sequence[Exchange], notes: Mapping[str, str]) -> ParsedReply:
        """Read what was meant for the memory in a reply without its thoughts."""
        return ParsedReply(text)

    def remembered(self, shown: DemonstrationInputs) -> str:
        """Return the reply of a demonstration where the memory asks the policy."""
        return shown.recall

    def write(self, text: str, shown: DemonstrationInputs) -> str:
        """Add what `read` takes away to `text`, the agent's way to write the action; for demonstrations."""
        return text


class MemoryCapabilities(CapabilityView):
    """Optional attributes of a memory that does not inherit from `MemoryBase`."""

    asks = Capability[object](True)
    """True if it may ask the policy."""


def conversation(past: Sequence[Exchange]) -> tuple[Message, ...]:
    """All of `past` as it was said."""
    return tuple(message for exchange in past for message in exchange.messages)


def as_text(past: Sequence[Exchange]) -> str:
    """All of `past` as one text of observations and actions, for a message about it."""
    lines = [f"{e.said}\n> {e.action}" if e.reply is not None else e.said for e in past]
    return "\n".join(lines)
