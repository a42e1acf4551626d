"""Agent with a store: earlier episodes' entries are shown before its observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from typing import Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import Agent, Capabilities, History, PolicyHandle, Reply
from agents.chat import ChatAgent
from agents.memory.base import MEMORY, DemonstrationInputs
from agents.policy_proxy import PolicyProxy
from agents.stores.cases import Cases
from agents.stores.kind import (
    ENTRIES,
    RECALLED,
    PerTurnRetrieval,
    ReadsCitations,
    Recollection,
    StoreKind,
    asks_in_turns,
)
from agents.stores.store import Store
from rlhf.checking import CheckContext, Problem
from rlhf.data import Action, Message
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Remembering:
    """Another agent, whose opening begins with what the store recalls.

    The store is asked once, before the episode's first own action, and its answer is left with that turn as a note: an
    episode is replayed, branched and resumed as it was, whatever the store holds by then. Without a store, as in a
    check of the agent alone, nothing is recalled. A kind that follows the episode (`graph`) is asked before every
    action, and what it says stands in front of the newest observation, then and in later prompts.
    """

    is_outermost: ClassVar[bool] = True

    inner: Agent = Field(default_factory=ChatAgent)
    """The agent that acts, with a `kind` and its keys."""
    store: StoreKind = Field(default_factory=Cases)
    """Store kind, with a `kind` and its keys."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse stores that nothing is written to, and tasks of several splits in one."""
        if context.parent is not None:
            return
        if isinstance(self.inner, Remembering):
            yield Problem(
                "an agent has one store",
                where="agent.inner.kind",
                got="remembering",
                expected="another agent",
                do="remove one of the two",
            )
        if not context.recipe.learning:
            yield Problem(
                "nothing would be stored: only policy_gradient stages write to the store",
                where="agent.store",
                got=", ".join(type(stage).__name__ for stage in context.recipe.stages),
                expected="a stage {kind: policy_gradient}",
                do="use the inner agent alone",
            )
        splits = {stage.split for _, stage in context.recipe.learning}
        if len(splits) > 1:
            yield Problem(
                "the stages draw from several splits, and a store takes the tasks of one",
                where="stages",
                got=", ".join(sorted(splits)),
                expected="one split",
                do="give all policy_gradient stages the same split",
            )

    @property
    def needs(self) -> Sequence[str]:
        """Inputs of a demonstration besides actions."""
        return tuple(Capabilities(self.inner).needs)

    @property
    def needs_tools(self) -> bool:
        """True if the inner agent needs tools."""
        return bool(Capabilities(self.inner).needs_tools)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that its calls can have; none where the inner agent does not say its own."""
        inner = tuple(Capabilities(self.inner).roles)
        return tuple(dict.fromkeys((*inner, MEMORY))) if inner and asks_in_turns(self.store) else inner

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Act without a store."""
        return await self.act_with(None, history, policy)

    async def act_with(self, store: Store | None, history: History, policy: PolicyHandle) -> Action:
        """Act as the inner agent does on observations that begin with what `store` recalls."""
        follows = isinstance(self.store, PerTurnRetrieval)
        before = {i: t.action.notes for i, t in enumerate(history.turns) if RECALLED in t.action.notes}
        told = {i if follows else 0: left[RECALLED] for i, left in before.items()}
        found: Recollection | None = None
        asking = replace(history, task=history.task.beginning)  # a start state is not shown what its task has left
        if isinstance(self.store, PerTurnRetrieval):
            found = await self.store.retrieve(store, asking, policy)
        elif not before and store is not None:
            found = self.store.recollect(store, asking)
        notes: dict[str, str] = {}
        if found is not None:
            told[len(history.turns) if follows else 0] = found.text
            notes = {RECALLED: found.text, ENTRIES: " ".join(map(str, found.entries)), **found.notes}
        known: Mapping[str, str] = notes or (before[min(before)] if before else {})
        listening = _Listening(policy, kind=self.store, entries=tuple(map(int, known.get(ENTRIES, "").split())))
        hears = isinstance(self.store, ReadsCitations) and bool(listening.entries)
        action = await self.inner.act(_with(history, told), listening if hears else policy)
        asked = found.generations if found is not None else ()
        left_now = {**notes, **listening.notes, **action.notes}
        return replace(action, notes=left_now, generations=asked + action.generations) if left_now else action

    def write(self, shown: DemonstrationInputs) -> str:
        """Write the reply that a demonstration gives."""
        said = self.store.say(shown) if shown.role == MEMORY and isinstance(self.store, PerTurnRetrieval) else None
        return str(self.inner.write(shown)) if said is None else said  # type: ignore[attr-defined]


@plain_dataclass(frozen=True)
class Bound:
    """A remembering agent with its store, open for reading."""

    agent: Remembering
    store: Store

    @property
    def needs(self) -> Sequence[str]:
        """Inputs of a demonstration besides actions."""
        return self.agent.needs

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Choose the next action, shown what the store recalls."""
        return await self.agent.act_with(self.store, history, policy)

    def write(self, shown: DemonstrationInputs) -> str:
        """Write the reply that a demonstration gives."""
        return self.agent.write(shown)


@plain_dataclass
class _Listening(PolicyProxy):
    """Policy proxy for the inner agent, with what is said to the store moved into notes.

    Attributes:
        kind: of the store.
        entries: that are shown.
        notes: what was left.
    """

    kind: Any = None
    entries: tuple[int, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)

    def received(
        self, reply: Reply, messages: Sequence[Message], role: str, tools: Sequence[Mapping[str, Any]]
    ) -> Reply:
        """Take from a reply's text what is meant for the store; its tokens stay as they are."""
        text, notes = self.kind.parse_citations(reply.text, self.entries)
        for name, note in notes.items():
            both = f"{self.notes.get(name, '')} {note}".split()
            self.notes[name] = " ".join(dict.fromkeys(both))
        return replace(reply, text=text)


def _with(history: History, told: Mapping[int, str]) -> History:
    """History with texts of `told` before the observations of those numbers; the opening is 0."""
    opening = f"{told[0]}\n{history.opening}" if told.get(0) else history.opening
    turns = [
        replace(turn, reply=f"{told[i]}\n{turn.reply}") if told.get(i) else turn
        for i, turn in enumerate(history.turns, start=1)
    ]
    return replace(history, opening=opening, turns=tuple(turns))
