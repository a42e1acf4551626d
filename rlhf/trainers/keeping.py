"""A run's store: read by its episodes, written between its steps, copied into its checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.stores import copies
from agents.stores.remembering import Bound, Remembering
from agents.stores.store import Store
from rlhf.data import ScoredGroup
from rlhf.processes import current

#: Name of the file in the run's folder.
FILE = "store.sqlite"


@dataclass(frozen=True)
class Keeper:
    """The store of a run. Of several processes the first writes, and all read.

    Attributes:
        agent: whose store it is.
        store: open to write; None in the other processes.
        bound: the agent with the store, open for reading, for the episodes of the run.
    """

    agent: Remembering
    store: Store | None
    bound: Bound

    @classmethod
    def of(cls, agent: Remembering, folder: Path, found: Path | None, split: str, judged: Collection[str]) -> Keeper:
        """The store of the run in `folder`: as checkpoint `found` has it, else new.

        All processes call this together.

        Raises:
            StoreError: the checkpoint's is damaged, holds what a task left that judges the policy, or cannot be opened.
        """
        store, path = None, folder / FILE
        if current().is_main:
            if found is None:
                path.unlink(missing_ok=True)
            else:
                copies.restore(found, path)
            store = Store(path, split=split, judged=frozenset(judged))
        current().gather(None, "the store")
        return cls(agent, store, Bound(agent, Store(path)))

    def learn(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Take in a finished step, once, whole or not at all. Returns what is logged of it."""
        figures: dict[str, float] = {}
        if self.store is not None and self.store.split is not None:
            with self.store.transaction():
                figures = dict(self.agent.store.learn(self.store, groups, self.store.split))
        current().gather(None, "the store")
        return figures

    def save(self, folder: Path) -> None:
        """Copy the store into the folder of a checkpoint; in the process that writes it."""
        if self.store is not None:
            copies.save(self.store, folder)

    def close(self) -> None:
        """Let go of the file."""
        self.bound.store.close()
        if self.store is not None:
            self.store.close()


def opened(agent: Remembering, checkpoint: Path, judged: Collection[str]) -> Bound:
    """The agent of an evaluation: with the store of a checkpoint, which it only reads.

    Raises:
        StoreError: there is none, it is damaged, or holds what a task left that judges the policy.
    """
    return Bound(agent, Store(checkpoint / copies.COPY, judged=frozenset(judged)))
