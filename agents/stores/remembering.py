"""An agent that is shown what earlier episodes have left in a store, in front of the opening."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import Agent, History, PolicyHandle
from agents.chat import ChatAgent
from agents.memory.base import Shown
from agents.stores.cases import Cases
from agents.stores.kind import ENTRIES, RECALLED, StoreKind
from agents.stores.store import Store
from rlhf.data import Action
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Remembering:
    """Another agent, whose opening begins with what the store recalls.

    The store is asked once, before the episode's first own action, and its answer is left with that turn as a note: an
    episode is replayed, branched and resumed as it was, whatever the store holds by then. Without a store, as in a
    check of the agent alone, nothing is recalled.
    """

    inner: Agent = Field(default_factory=ChatAgent)
    """The agent that acts, with a `kind` and its keys."""
    store: StoreKind = Field(default_factory=Cases)
    """What is stored and shown, with a `kind` and its keys."""

    @property
    def needs(self) -> Sequence[str]:
        """What a demonstration has to show beside actions."""
        return tuple(getattr(self.inner, "needs", ()))

    @property
    def needs_tools(self) -> bool:
        """Whether the inner agent does."""
        return bool(getattr(self.inner, "needs_tools", False))

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Act without a store."""
        return await self.act_with(None, history, policy)

    async def act_with(self, store: Store | None, history: History, policy: PolicyHandle) -> Action:
        """Act as the inner agent does on an opening that begins with what `store` recalls."""
        told = next((t.action.notes[RECALLED] for t in history.turns if RECALLED in t.action.notes), None)
        notes: dict[str, str] = {}
        if told is None and store is not None:
            found = self.store.recollect(store, history)
            told = found.text
            notes = {RECALLED: told, ENTRIES: " ".join(map(str, found.entries))}
        opening = f"{told}\n{history.opening}" if told else history.opening
        action = await self.inner.act(replace(history, opening=opening), policy)
        return replace(action, notes={**notes, **action.notes}) if notes else action

    def write(self, shown: Shown) -> str:
        """Write the reply that a demonstration gives."""
        return str(self.inner.write(shown))  # type: ignore[attr-defined]


@plain_dataclass(frozen=True)
class Bound:
    """A remembering agent with its store, open for reading."""

    agent: Remembering
    store: Store

    @property
    def needs(self) -> Sequence[str]:
        """What a demonstration has to show beside actions."""
        return self.agent.needs

    async def act(self, history: History, policy: PolicyHandle) -> Action:
        """Choose the next action, shown what the store recalls."""
        return await self.agent.act_with(self.store, history, policy)

    def write(self, shown: Shown) -> str:
        """Write the reply that a demonstration gives."""
        return self.agent.write(shown)
