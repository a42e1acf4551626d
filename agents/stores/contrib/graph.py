"""Graph of facts about a text world, extended by every observation, across episodes.

Source: AriGraph, arXiv 2407.04363.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History, PolicyHandle
from agents.memory.base import MEMORY, DemonstrationInputs
from agents.parsing import split_thoughts
from agents.stores.asking import best_attempts, json_object, listed
from agents.stores.contrib.facts import Extractor, Fact, applied, around, facts_of, nearest_episodes
from agents.stores.entry import Entry, Origin
from agents.stores.kind import Recollection, n_shown
from agents.stores.store import Store
from rlhf.data import Generation, Message, Role, ScoredGroup, Trajectory
from rlhf.settings import STRICT

_FACT, _OBSERVATION, _TELLS = "fact", "observation", "tells"
#: Notes of a turn: what the observation before it told, as JSON; and what of a reply was no fact.
FACTS, REFUSED = "facts", "refused facts"


@plain_dataclass
class _World:
    """Known facts, and the observations that told them, oldest first.

    Attributes:
        facts: with the id that each has in the store; 0 for one of this episode.
        told: of each observation its text, its id in the store or 0, and its facts.
    """

    facts: dict[Fact, int] = field(default_factory=dict)
    told: list[tuple[str, int, list[Fact]]] = field(default_factory=list)

    def observe(self, text: str, new: Sequence[Fact], old: Sequence[Fact]) -> None:
        """Take in an observation of this episode."""
        numbers = {one: self.facts.get(one, 0) for one in new}
        for one in (*old, *new):
            self.facts.pop(one, None)
        self.facts |= numbers
        self.told.append((text, 0, list(new)))


@plain_dataclass(frozen=True)
class _Stored:
    """All facts of a store, from all tasks, oldest first.

    Attributes:
        facts: by their ids, each with the tasks that had a part in it.
        told: observations, each with the ids of the facts that it told.
    """

    facts: Mapping[int, tuple[Fact, frozenset[str]]]
    told: Sequence[tuple[Entry, tuple[int, ...]]]

    @classmethod
    def of(cls, store: Store) -> _Stored:
        """Read it; the store keeps what was read until it changes."""
        return store.view("graph", lambda: cls._read(store))

    @classmethod
    def _read(cls, store: Store) -> _Stored:
        tasks, told = store.tasks(), dict[int, list[int]]()
        facts = {entry.id: (_fact(entry), tasks[entry.id]) for entry in store.entries(_FACT)}
        for link in store.links():
            if link.relation == _TELLS:
                told.setdefault(link.source, []).append(link.target)
        return cls(facts, [(entry, tuple(told.get(entry.id, ()))) for entry in store.entries(_OBSERVATION)])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Graph:
    """Shows, before every action, what is known around the newest observation.

    Facts are triplets: subject, relation, object. Rules of `extractor` read them in each observation, or the policy is
    asked for them (role `memory`), in JSON: new facts, and the numbers of those it was shown that are out of date. What
    is no fact, and a number that was not shown, is passed over and left as a note. What an observation told stays with
    its turn, so that the graph of an episode is made of its turns alone, over that of the store.

    Shown are the `k` facts nearest to the observation in words, those around them to a `depth` and `width`, and the
    `n_observations` that told most of these, as far as `max_tokens` go. After a step, one attempt at each task leaves
    its facts, in the place of those that the task left before.
    """

    extractor: Extractor | None = None
    """Rules that read facts, with a `kind` and its keys; null asks the policy, once before every action."""
    teach: bool = False
    """Ask the policy all the same, and use the rules for demonstrations only."""
    k: Annotated[int, Field(ge=1)] = 6
    """Facts that are found by the words of the observation, and that the policy is shown when it is asked for new."""
    depth: Annotated[int, Field(ge=0)] = 1
    """Depth of the search from these to further facts."""
    width: Annotated[int, Field(ge=1)] = 4
    """Most facts that are taken at each thing on the way."""
    n_observations: Annotated[int, Field(ge=0)] = 1
    """Earlier observations that are shown."""
    max_tokens: Annotated[int, Field(ge=1)] = 200
    """Longest text that is shown before an action."""
    include_same_task: bool = False
    """Include what earlier attempts at the same task left, which a test task never has."""
    max_facts: Annotated[int, Field(ge=2)] = 2000
    """Most facts of the store; of more the oldest go."""
    max_observations: Annotated[int, Field(ge=2)] = 500
    """Likewise of observations."""
    max_chars: Annotated[int, Field(ge=20)] = 300
    """Longest observation that is kept; of a longer one its beginning."""
    max_new: Annotated[int, Field(ge=1)] = 12
    """Most facts of one observation."""
    ask: str = (
        'What does the observation tell? Answer in JSON: {"facts": [["subject", "relation", "object"]], "outdated": '
        "[1]}, where outdated are numbers of known facts that are true no more."
    )
    """Prompt for facts, after what is known and the observation."""

    def __post_init__(self) -> None:
        """Refuse teaching without rules."""
        if self.teach and self.extractor is None:
            raise ValueError(
                "teach is true without an extractor, expected rules: demonstrations take their answers from them"
            )

    @property
    def asks_in_turns(self) -> bool:
        """True if the policy extracts facts."""
        return self.extractor is None or self.teach

    def recollect(self, store: Store, history: History) -> Recollection:
        """Return the facts known around an opening; episodes call `retrieve`."""
        found = around(
            list(self._world(store, history).facts), history.opening, k=self.k, depth=self.depth, width=self.width
        )
        return Recollection("\n".join(["Known:", *(f"- {one.text}" for one in found)]) if found else "")

    async def retrieve(self, store: Store | None, history: History, policy: PolicyHandle) -> Recollection:
        """Read the facts of the newest observation, then show what is known around it."""
        world = self._world(store, history)
        notes: dict[str, str] = {}
        generations: tuple[Generation, ...] = ()
        new: list[Fact] = []
        if not (history.turns and history.turns[-1].action.error is not None):  # else nothing was observed
            if self.extractor is not None and not self.teach:
                new, old, n_refused = self._by_rules(self.extractor, history.observation, world)
            else:
                shown = around(list(world.facts), history.observation, k=self.k, depth=0, width=1)
                reply = await policy.generate((self._question(shown, history.observation),), role=MEMORY)
                generations = (reply.generation,)
                new, old, n_refused = self._read(split_thoughts(reply.text).answer, shown)
            world.observe(history.observation, new, old)
            notes[FACTS] = json.dumps({"new": [_parts(f) for f in new], "old": [_parts(f) for f in old]})
            notes |= {REFUSED: str(n_refused)} if n_refused else {}
        text, entries = self._shown(world, history.observation, new, policy)
        return Recollection(text, entries, notes, generations)

    def say(self, shown: DemonstrationInputs) -> str | None:
        """Return the reply of a demonstration: the facts that the rules find, nothing without rules."""
        if not shown.asked.endswith(self.ask):
            return None
        if self.extractor is None:
            return json.dumps({"facts": [], "outdated": []})
        known, _, asked = shown.asked.removesuffix(self.ask).partition("\nObservation: ")
        lines = [line.partition(": ")[2] for line in known.splitlines()[1:]]
        world = _World({Fact(*line.split(", ", 2)): 0 for line in lines if line.count(", ") > 1})
        new, old, _ = self._by_rules(self.extractor, asked.strip(), world)
        numbers = [i for i, one in enumerate(world.facts, start=1) if one in old]
        return json.dumps({"facts": [_parts(one) for one in new], "outdated": numbers}, ensure_ascii=False)

    def learn(self, store: Store, groups: Sequence[ScoredGroup], split: str) -> Mapping[str, float]:
        """Store the facts of one attempt at each task, and the observations that told them."""
        n_replaced = sum(_keep(store, of, split, self.max_chars) for of in best_attempts(groups))
        store.keep_newest(_FACT, self.max_facts)
        _drop_silent(store)
        store.keep_newest(_OBSERVATION, self.max_observations)
        turns = (turn for group in groups for t in group.trajectories for turn in t.own_turns)
        return {
            "store/n_entries": float(store.n_entries()),
            "store/n_facts": float(store.n_entries(_FACT)),
            "store/n_recalled": float(n_shown(groups)),
            "store/n_replaced": float(n_replaced),
            "store/n_refused": float(sum(int(turn.action.notes.get(REFUSED, "0")) for turn in turns)),
        }

    def _world(self, store: Store | None, history: History) -> _World:
        """Return the facts of the store, then those that the turns of the episode told."""
        world = _World()
        if store is not None:
            stored, mine = _Stored.of(store), {history.task.id}
            by_id = {i: one for i, (one, tasks) in stored.facts.items() if self.include_same_task or tasks != mine}
            world.facts = {one: number for number, one in by_id.items()}
            for entry, numbers in stored.told:
                told = [by_id[number] for number in numbers if number in by_id]
                if told and (self.include_same_task or entry.origin.task not in mine):
                    world.told.append((entry.text, entry.id, told))
        texts = (history.opening, *(turn.reply for turn in history.turns))
        for text, turn in zip(texts, history.turns, strict=False):
            if FACTS in turn.action.notes:
                world.observe(text, *_told(turn.action.notes))
        return world

    def _by_rules(self, rules: Extractor, text: str, world: _World) -> tuple[list[Fact], list[Fact], int]:
        """New facts, those out of date, and how many of what the rules gave are no facts."""
        given = list(rules(text))
        read = facts_of(given[: self.max_new])
        new: list[Fact] = []
        old: list[Fact] = []
        for one in read:
            gone = [known for known in (*world.facts, *new) if rules.replaces(_parts(one), _parts(known))]
            new = [*(known for known in new if known not in gone and known != one), one]
            old += [known for known in gone if known not in old]
        return new, old, len(given) - len(read)

    def _question(self, shown: Sequence[Fact], observation: str) -> Message:
        lines = [f"{i}: {one.text}" for i, one in enumerate(shown, start=1)]
        return Message(Role.USER, "\n".join(["Known:", *lines, f"Observation: {observation}", self.ask]))

    def _read(self, said: str, shown: Sequence[Fact]) -> tuple[list[Fact], list[Fact], int]:
        """Parse a reply into new facts, outdated facts, and the number of lines that are neither."""
        found = json_object(said)
        if found is None:
            return [], [], 1
        given, numbers = listed(found.get("facts")), listed(found.get("outdated"))
        new = facts_of(given[: self.max_new])
        known = [n for n in numbers if type(n) is int and 1 <= n <= len(shown)]
        n_refused = len(given) - len(new) + len(numbers) - len(known)
        return list(dict.fromkeys(new)), [shown[n - 1] for n in known], n_refused

    def _shown(
        self, world: _World, observation: str, now: Sequence[Fact], policy: PolicyHandle
    ) -> tuple[str, tuple[int, ...]]:
        """Return the facts shown within `max_tokens`, and their ids in the store; `now` is in the observation."""
        facts = around(list(world.facts), observation, k=self.k, depth=self.depth, width=self.width)
        seen = [(text, number, told) for text, number, told in world.told if text != observation]
        best = nearest_episodes({i: told for i, (_, _, told) in enumerate(seen)}, facts, self.n_observations)
        told = [(f"- {one.text}", world.facts[one]) for one in facts if one not in now]
        before = [("- " + " ".join(seen[i][0].split())[: self.max_chars], seen[i][1]) for i in best]
        lines: list[str] = []
        entries: list[int] = []
        for title, found in (("Known:", told), ("Seen before:", before)):
            for line, number in found:
                longer = [*lines, *([] if title in lines else [title]), line]
                if policy.n_tokens((Message(Role.USER, "\n".join(longer)),)) > self.max_tokens:
                    return "\n".join(lines), tuple(entries)
                lines = longer
                entries += [number] if number else []
        return "\n".join(lines), tuple(entries)


def _keep(store: Store, of: Trajectory, split: str, max_chars: int) -> int:
    """Store an attempt's facts in place of its task's earlier ones; returns the number of dropped facts."""
    origin = Origin(of.task_id, split)
    facts: list[Fact] = []
    gone: set[Fact] = set()
    told: dict[str, list[Fact]] = {}
    for text, turn in zip((of.opening, *(t.reply for t in of.turns)), of.turns, strict=False):
        if FACTS in turn.action.notes:
            new, old = _told(turn.action.notes)
            facts, gone = applied(facts, new, old), (gone | {*old}) - {*new}
            told.setdefault(" ".join(text.split())[:max_chars], []).extend(new)
    before, tasks = {_fact(e): e for e in store.entries(_FACT)}, store.tasks()
    out = gone | {one for one, e in before.items() if tasks[e.id] == {of.task_id}} - {*facts}
    leaving = [entry for one, entry in before.items() if one in out]
    for entry in leaving:
        store.delete(entry.id)
    numbers = {}
    for one in facts:
        if one in before:
            store.also(before[one].id, origin)
        numbers[one] = before[one].id if one in before else store.add(_FACT, one.text, origin, {"parts": _parts(one)})
    earlier = {e.text: e.id for e in store.entries(_OBSERVATION, of.task_id)}
    for text in earlier.keys() - told.keys():
        store.delete(earlier[text])
    for text, new in told.items():
        kept = [numbers[one] for one in dict.fromkeys(new) if one in numbers]
        if kept:
            number = earlier[text] if text in earlier else store.add(_OBSERVATION, text, origin)
            for target in kept:
                store.link(number, target, _TELLS)
    return len(leaving)


def _drop_silent(store: Store) -> None:
    """Delete the observations that tell nothing, all their facts being gone."""
    telling = {link.source for link in store.links() if link.relation == _TELLS}
    for entry in store.entries(_OBSERVATION):
        if entry.id not in telling:
            store.delete(entry.id)


def _told(notes: Mapping[str, str]) -> tuple[list[Fact], list[Fact]]:
    """New and outdated facts of an observation, by its turn's notes."""
    found = json.loads(notes[FACTS])
    return [Fact(*parts) for parts in found["new"]], [Fact(*parts) for parts in found["old"]]


def _fact(entry: Entry) -> Fact:
    return Fact(*entry.fields["parts"])


def _parts(one: Fact) -> list[Any]:
    return [one.subject, one.relation, one.object]
