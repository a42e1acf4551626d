"""The contract of a kind of store: what of it an episode is shown, and what a finished step leaves in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agents.base import History, PolicyHandle
from agents.stores.store import Store
from rlhf.data import ScoredGroup, Trajectory

#: Notes of the turn in which an episode asked the store: what it was shown, and the ids of the entries behind that.
RECALLED, ENTRIES = "recalled", "recalled entries"


@dataclass(frozen=True, slots=True)
class Recollection:
    """What a store says to one episode.

    Attributes:
        text: shown in front of the opening; empty where there is nothing to say.
        entries: ids of the entries it was made of.
    """

    text: str = ""
    entries: tuple[int, ...] = ()


@runtime_checkable
class Asks(Protocol):
    """A kind that asks the policy what to make of the attempts, before it stores anything of them."""

    async def learn_asking(
        self, store: Store, groups: Sequence[ScoredGroup], split: str, policy: PolicyHandle
    ) -> Mapping[str, float]:
        """As `StoreKind.learn`, which is then not called. What `policy` says here is not trained on.

        Raises:
            EngineError: it could not be asked; nothing of the step is then stored.
        """
        ...


@runtime_checkable
class StoreKind(Protocol):
    """A frozen dataclass whose fields are its recipe keys; all that it learns is in the store."""

    def recollect(self, store: Store, history: History) -> Recollection:
        """Choose what the episode that begins with `history` is shown. Only reads; equal stores give equal texts."""
        ...

    def learn(self, store: Store, groups: Sequence[ScoredGroup], split: str) -> Mapping[str, float]:
        """Take in the attempts of a finished training step, within one transaction. Returns what is logged of it.

        Args:
            store: open to write.
            groups: of all tasks of the step.
            split: that these tasks were drawn from.
        """
        ...


def recalled(trajectory: Trajectory) -> Recollection:
    """What an episode was shown of its store."""
    for turn in trajectory.turns:
        if RECALLED in turn.action.notes:
            entries = turn.action.notes.get(ENTRIES, "").split()
            return Recollection(turn.action.notes[RECALLED], tuple(map(int, entries)))
    return Recollection()
