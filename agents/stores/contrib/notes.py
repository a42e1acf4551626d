"""Linked notes written by the policy on its attempts, each of which may revise older ones.

Source: A-MEM, arXiv 2502.12110.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History, PolicyHandle
from agents.stores.asking import asked, how_it_ended, json_object, listed, news, short, transcript, words
from agents.stores.entry import Entry, Origin
from agents.stores.kind import Recollection
from agents.stores.store import Store
from rlhf.data import ScoredGroup, Trajectory
from rlhf.settings import STRICT

_NOTE = "note"


@plain_dataclass
class _Counts:
    """Counts of how the replies of a step were read."""

    refused: int = 0
    evolved: int = 0
    linked: int = 0


@plain_dataclass(frozen=True)
class _Note:
    """A note as it is written."""

    content: str
    context: str = ""
    keywords: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    solved: bool = False
    plain: bool = field(default=False, compare=False)

    @property
    def text(self) -> str:
        """Everything that a search looks through."""
        known = ", ".join(dict.fromkeys((*self.keywords, *self.tags)))
        return " ".join(filter(None, [self.content, self.context, f"[{known}]" if known else ""]))

    @property
    def fields(self) -> dict[str, Any]:
        """The parts as the store keeps them."""
        lists = {"keywords": list(self.keywords), "tags": list(self.tags)}
        return {"content": self.content, "context": self.context, "solved": self.solved, **lists}

    @classmethod
    def of(cls, entry: Entry) -> _Note:
        known = entry.fields
        lists = tuple(known["keywords"]), tuple(known["tags"])
        return cls(known["content"], known["context"], *lists, known["solved"])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Notes:
    """Shows the notes nearest to the opening, and those that they are linked to.

    After a step the policy is asked (role `memory`) for a note of one attempt at each task, in JSON: content, context,
    keywords, tags. It is then shown the notes nearest to the new one, and says which of them it is to be linked to and
    which of them are to get another context or other tags. A reply that is not JSON leaves a plain note, or changes
    nothing; an unknown id is passed over, and so is a second change of one note. All this counts in `store/n_refused`.
    A task leaves one note, and another, in its place, only where it was solved for the first time.
    """

    k: Annotated[int, Field(ge=1)] = 5
    """Notes that are found for an opening, and neighbours that a new note is shown."""
    max_notes: Annotated[int, Field(ge=2)] = 1000
    """Most notes; of more the oldest go."""
    max_chars: Annotated[int, Field(ge=20)] = 300
    """Longest content, and longest context, of a note."""
    max_transcript: Annotated[int, Field(ge=20)] = 2000
    """Characters of an attempt that the policy is shown to write a note of: its end, where it is longer."""
    ask: str = (
        'Write a note that helps with later tasks, as JSON: {"content": "...", "context": "...", "keywords": ["..."], '
        '"tags": ["..."]}'
    )
    """Prompt for a note, after the attempt."""
    ask_links: str = (
        'What of the others belongs to the new note, or is to change? Answer in JSON: {"links": [1], "updates": '
        '[{"id": 1, "context": "...", "tags": ["..."]}]}'
    )
    """Prompt for links and changes, after the new note and its neighbours."""

    def recollect(self, store: Store, history: History) -> Recollection:
        """Choose notes for a task that begins; those that the task itself had a part in are left out."""
        tasks, task = store.tasks(), history.task.id
        found = [f.entry for f in store.search(history.opening, len(tasks), kind=_NOTE)] if tasks else []
        chosen = [e for e in found if task not in tasks[e.id]][: self.k]
        by_id = {entry.id: entry for entry in chosen}
        for entry in chosen:
            for link in store.links(entry.id):
                other = store.get(link.target if link.source == entry.id else link.source)
                if task not in tasks[other.id] and len(by_id) < 2 * self.k:
                    by_id.setdefault(other.id, other)
        lines = [f"- {entry.text}" for entry in by_id.values()]
        return Recollection("\n".join(["Notes:", *lines]) if lines else "", tuple(by_id))

    def learn(self, store: Store, groups: Sequence[ScoredGroup], split: str) -> Mapping[str, float]:
        """Store plain notes, without calling the policy."""
        counts = _Counts()
        for chosen in self._chosen(store, groups):
            self._write(store, chosen, _plain(chosen, self.max_chars), split)
        return self._figures(store, counts)

    async def learn_asking(
        self, store: Store, groups: Sequence[ScoredGroup], split: str, policy: PolicyHandle
    ) -> Mapping[str, float]:
        """Ask for a note on one attempt at each task, its links, and changes of its neighbours."""
        counts = _Counts()
        for chosen in self._chosen(store, groups):
            said = await asked(policy, f"{transcript(chosen, self.max_transcript)}\n\n{self.ask}")
            note = _note(said, chosen.solved, self.max_chars) or _plain(chosen, self.max_chars)
            counts.refused += note.plain
            number = self._write(store, chosen, note, split)
            near = [f.entry for f in store.search(note.text, self.k + 1, kind=_NOTE) if f.entry.id != number]
            if near[: self.k] and not note.plain:
                lines = [f"New: {note.text}", *(f"{e.id}: {e.text}" for e in near[: self.k])]
                said = await asked(policy, "\n".join([*lines, self.ask_links]))
                self._evolve(store, number, near[: self.k], said, counts)
        return self._figures(store, counts)

    def _chosen(self, store: Store, groups: Sequence[ScoredGroup]) -> list[Trajectory]:
        """Informative attempt of each task: a solution where there is one."""
        return news(groups, {e.origin.task: bool(e.fields["solved"]) for e in store.entries(_NOTE)})

    def _write(self, store: Store, of: Trajectory, note: _Note, split: str) -> int:
        before = store.entries(_NOTE, of.task_id)
        if before:
            return store.update(before[0].id, note.text, note.fields).id
        number = store.add(_NOTE, note.text, Origin(of.task_id, split), note.fields)
        store.keep_newest(_NOTE, self.max_notes)
        return number

    def _evolve(self, store: Store, number: int, near: Sequence[Entry], said: str, counts: _Counts) -> None:
        """Carry out what was said about the neighbours of a note; nothing of what names another id, or one changed."""
        found = json_object(said)
        if found is None:
            counts.refused += 1
            return
        known = {entry.id: entry for entry in near}
        for other in listed(found.get("links")):
            if type(other) is int and other in known:
                store.link(number, other)
                counts.linked += 1
            else:
                counts.refused += 1
        for change in listed(found.get("updates")):
            named = change.get("id") if isinstance(change, dict) else None
            target = known.get(named) if type(named) is int else None
            if target is None:
                counts.refused += 1
                continue
            old = _Note.of(target)
            context = short(change.get("context"), self.max_chars) or old.context
            tags = words(change.get("tags")) or old.tags
            now = _Note(old.content, context, old.keywords, tags, old.solved)
            if now != old:
                store.update(target.id, now.text, now.fields)
                store.also(target.id, store.get(number).origin)
                counts.evolved += 1
                del known[target.id]

    @staticmethod
    def _figures(store: Store, counts: _Counts) -> dict[str, float]:
        return {
            "store/n_entries": float(store.n_entries()),
            "store/n_refused": float(counts.refused),
            "store/n_evolved": float(counts.evolved),
            "store/n_linked": float(counts.linked),
        }


def _plain(of: Trajectory, max_chars: int) -> _Note:
    """Default note of an attempt without a written one."""
    return _Note(short(f"{of.opening} {how_it_ended(of)}", max_chars), solved=of.solved, plain=True)


def _note(said: str, solved: bool, max_chars: int) -> _Note | None:
    """The note in a reply; None where there is none."""
    found = json_object(said)
    content = short(found.get("content"), max_chars) if found else ""
    if not found or not content:
        return None
    lists = words(found.get("keywords")), words(found.get("tags"))
    return _Note(content, short(found.get("context"), max_chars), *lists, solved)
