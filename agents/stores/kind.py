"""Contract of a store kind: retrieval for an episode, and learning from a finished step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from agents.base import History, PolicyHandle
from agents.memory.base import DemonstrationInputs
from agents.stores.store import Store
from rlhf.capabilities import Capability, CapabilityView
from rlhf.data import Generation, ScoredGroup, Trajectory
from rlhf.data.task import origin_of

#: Notes of the turn in which an episode asked the store: what it was shown, and the ids of the entries behind that.
RECALLED, ENTRIES = "recalled", "recalled entries"


@dataclass(frozen=True, slots=True)
class Recollection:
    """Entries and text that a store gives to one episode.

    Attributes:
        text: shown in front of the opening; empty where there is nothing to say.
        entries: ids of the entries it was made of.
        notes: what else is to be left with the turn, for the kind itself to read later.
        generations: what the policy was asked for on the way.
    """

    text: str = ""
    entries: tuple[int, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    generations: tuple[Generation, ...] = ()


@runtime_checkable
class QueriesPolicy(Protocol):
    """Store kind that queries the policy about attempts before it stores anything of them.

    A kind that can also work without queries sets `asks_policy = False`.
    """

    async def learn_asking(
        self, store: Store, groups: Sequence[ScoredGroup], split: str, policy: PolicyHandle
    ) -> Mapping[str, float]:
        """Replace `StoreKind.learn`, which is then not called. What `policy` says here is not trained on.

        Raises:
            EngineError: the query failed; nothing of the step is stored then.
        """


@runtime_checkable
class PerTurnRetrieval(Protocol):
    """Store kind that retrieves before every action, not only before the first one.

    A kind that never queries the policy sets `asks_in_turns = False`.
    """

    async def retrieve(self, store: Store | None, history: History, policy: PolicyHandle) -> Recollection:
        """Choose the text in front of the newest observation.

        Args:
            store: only read; None in a demonstration.
            history: without the retrieved texts, with the notes of its turns.
            policy: may be asked, with the role `memory`; what it says is trained on.
        """

    def say(self, shown: DemonstrationInputs) -> str | None:
        """Return a demonstration's answer to a query of `retrieve`; None for any other query."""


@runtime_checkable
class ReadsCitations(Protocol):
    """Store kind that reads from the replies which retrieved entries were used."""

    def parse_citations(self, text: str, entries: Sequence[int]) -> tuple[str, Mapping[str, str]]:
        """Split one reply into text and citations. Never raises.

        Args:
            text: the reply.
            entries: ids of the retrieved entries, in the order shown.

        Returns:
            the reply without citations, from which the action is parsed; and notes for the turn.
        """


@runtime_checkable
class StoreKind(Protocol):
    """Memory across episodes: what an episode retrieves at its start, and what is stored after a step.

    A frozen dataclass of its recipe keys; all that it learns is in the store. Tasks have the ids of whole tasks here,
    also where an episode begins in the middle of one.
    """

    def recollect(self, store: Store, history: History) -> Recollection:
        """Choose what the episode that begins with `history` is shown. Only reads; equal stores give equal texts."""

    def learn(self, store: Store, groups: Sequence[ScoredGroup], split: str) -> Mapping[str, float]:
        """Update on the attempts of a finished training step, within one transaction. Returns what is logged of it.

        Args:
            store: open to write.
            groups: of all tasks of the step.
            split: that these tasks were drawn from.
        """


class KindCapabilities(CapabilityView):
    """Optional attributes of a kind of store that can ask the policy."""

    asks_policy = Capability[object](True)
    """See `QueriesPolicy`."""
    asks_in_turns = Capability[object](True)
    """See `PerTurnRetrieval`."""


def asks_policy(kind: object) -> bool:
    """True if a kind asks the policy between steps."""
    return isinstance(kind, QueriesPolicy) and bool(KindCapabilities(kind).asks_policy)


def asks_in_turns(kind: object) -> bool:
    """True if a kind may ask the policy during an episode."""
    return isinstance(kind, PerTurnRetrieval) and bool(KindCapabilities(kind).asks_in_turns)


def as_whole_tasks(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Return groups under the ids of whole tasks: what a start state leaves, its task has left."""
    found = []
    for group in groups:
        n_given = max((t.n_given for t in group.trajectories), default=0)
        task_id = origin_of(group.task_id, n_given)
        trajectories = tuple(replace(t, task_id=task_id) for t in group.trajectories)
        found.append(replace(group, task_id=task_id, trajectories=trajectories))
    return found


def n_shown(groups: Sequence[ScoredGroup]) -> int:
    """Return the number of entries that the attempts of a step were shown, in all."""
    turns = (turn for group in groups for t in group.trajectories for turn in t.own_turns)
    return sum(len(turn.action.notes.get(ENTRIES, "").split()) for turn in turns)


def recalled(trajectory: Trajectory) -> Recollection:
    """Return the recollection that an episode was shown."""
    for turn in trajectory.turns:
        if RECALLED in turn.action.notes:
            entries = turn.action.notes.get(ENTRIES, "").split()
            return Recollection(turn.action.notes[RECALLED], tuple(map(int, entries)), turn.action.notes)
    return Recollection()
