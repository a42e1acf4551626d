"""Summaries by topic, written after episodes, and a re-ranker of them that learns which are used.

Source: RMM, arXiv 2503.08026: prospective and retrospective reflection.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History, PolicyHandle
from agents.stores.asking import actions_of, asked, how_it_ended, json_object, listed, news, short, transcript
from agents.stores.contrib.rerank import Array, Weights, draw, gradient, scores, vector
from agents.stores.entry import Entry, Origin
from agents.stores.kind import Recollection, n_shown, recalled
from agents.stores.search import in_common
from agents.stores.store import Store
from rlhf.data import ScoredGroup, Trajectory
from rlhf.settings import STRICT
from rlhf.text_search import tokenize

_TOPIC, _TOLD, _WEIGHTS, _N_UPDATES = "topic", "told", "re-ranker", "updates"
#: Notes: ids of all entries that could be shown, of those that were cited, and marks that nothing had.
AMONG, CITED, UNKNOWN = "recalled among", "cited", "cited unknown"
_MARK = re.compile(r"\s?\[m(\d{1,6})\]")


@plain_dataclass
class _Counts:
    refused: int = 0
    merged: int = 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reflection:
    """Reflective memory: summaries by topic, in an order learnt from their use.

    Prospective: after a step the policy (role `memory`) or a rule writes summaries of one attempt at each task that has
    something new to tell, each with a topic; a summary is merged into the entry it continues, or becomes an entry.

    Retrospective: of the `candidates` nearest to the opening in words, `k` are drawn by s + τ g, where s = q′ · m′ with
    q′ = q + W_q q and m′ = m + W_m m, g is Gumbel noise, and q and m are hashed bags of words. What was used has the
    reward 1, what was not −1, and W moves by REINFORCE once after each step. W lies in the store.
    """

    k: Annotated[int, Field(ge=1)] = 4
    """Most summaries that are shown."""
    candidates: Annotated[int, Field(ge=1)] = 20
    """Number of candidates: the nearest to the opening in words (BM25)."""
    tau: Annotated[float, Field(ge=0)] = 0.2
    """τ of the draw: the higher, the more others than the best are tried. The draw is the task's own: all attempts of a
    step at it are shown the same. 0 shows the best."""
    lr: Annotated[float, Field(ge=0)] = 0.001
    """Learning rate of W_q and W_m; 0 keeps the order by words in common. A step moves the log-odds of what was drawn
    by some 4 lr / τ²: 0.1 here. Where that is 1 and more, the draw settles on whatever came first."""
    baseline: float = 0.0
    """b, which is taken off each reward."""
    dim: Annotated[int, Field(ge=2, le=256)] = 32
    """Length of the vectors; W is twice its square."""
    seed: int = 0
    """Of the draws."""
    used: Literal["cited", "words"] = "cited"
    """Evidence of use: what the policy cites as [m1], which no action holds; or what an action shares a word with that
    neither the opening nor an observation had said."""
    writer: Literal["policy", "rule"] = "policy"
    """Writer of the summaries. A rule writes one: what was done, and how it ended."""
    merge_at: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The rule merges a summary into the entry whose topic has at least this share of words in common."""
    neighbours: Annotated[int, Field(ge=0)] = 3
    """Entries nearest to the attempt that the policy is shown, to merge into."""
    max_new: Annotated[int, Field(ge=1)] = 3
    """Most summaries of one attempt."""
    max_topics: Annotated[int, Field(ge=2)] = 500
    """Most entries; of more the oldest go."""
    max_chars: Annotated[int, Field(ge=20)] = 300
    """Longest summary; a merged one keeps its end."""
    include_same_task: bool = False
    """Include summaries that the same task had a part in, which a test task never has."""
    max_transcript: Annotated[int, Field(ge=20)] = 2000
    """Characters of an attempt that the policy is asked about: its end, where it is longer."""
    ask: str = (
        'Summarise by topic what helps with later tasks, as JSON: {"topics": [{"topic": "...", "summary": "..."}]}. '
        'Add "id": 1 to merge a summary into a known one, whose text it then replaces.'
    )
    """Prompt for summaries, after the neighbours and the attempt."""
    cite: str = "Cite what you use of this, as [m1]."
    """Said behind the summaries where `used` is `cited`; empty for a policy that was trained to cite."""

    def __post_init__(self) -> None:
        """Refuse learning from a deterministic ranking."""
        if self.tau == 0 and self.lr > 0:
            raise ValueError(
                f"tau is 0 and lr is {self.lr}, expected tau above 0, or lr: 0: a fixed order cannot be learnt"
            )

    @property
    def asks_policy(self) -> bool:
        """True if the policy writes the summaries."""
        return self.writer == "policy"

    def recollect(self, store: Store, history: History) -> Recollection:
        """Draw summaries for a task that begins."""
        tasks, task = store.tasks(), history.task.id
        found = [hit.entry for hit in store.search(history.opening, len(tasks), kind=_TOPIC)] if tasks else []
        among = [e for e in found if self.include_same_task or task not in tasks[e.id]][: self.candidates]
        if not among:
            return Recollection()
        order = self._drawn(store, history.opening, among, task)
        chosen = [among[i] for i in order]
        marks = [f"[m{i}] " if self.used == "cited" else "- " for i in range(1, len(chosen) + 1)]
        lines = [f"{mark}{entry.text}" for mark, entry in zip(marks, chosen, strict=True)]
        last = [self.cite] if self.cite and self.used == "cited" else []
        notes = {AMONG: " ".join(str(e.id) for e in among)}
        return Recollection("\n".join(["Summaries:", *lines, *last]), tuple(e.id for e in chosen), notes)

    def parse_citations(self, text: str, entries: Sequence[int]) -> tuple[str, Mapping[str, str]]:
        """Take the citations from a reply. One of a number that was not shown is left as a note, and goes too."""
        numbers = [int(found) for found in _MARK.findall(text)] if self.used == "cited" else []
        if not numbers:
            return text, {}
        known = [str(entries[n - 1]) for n in numbers if 1 <= n <= len(entries)]
        unknown = [f"m{n}" for n in numbers if not 1 <= n <= len(entries)]
        notes = {name: " ".join(found) for name, found in ((CITED, known), (UNKNOWN, unknown)) if found}
        return _MARK.sub("", text), notes

    def learn(self, store: Store, groups: Sequence[ScoredGroup], split: str) -> Mapping[str, float]:
        """Learn what was used, then write summaries by rule."""
        figures, counts = self._look_back(store, groups), _Counts()
        for of in self._news(store, groups):
            topic, summary = short(of.opening, self.max_chars // 2), how_it_ended(of)
            same = max(store.entries(_TOPIC), key=lambda e: in_common(topic, e.fields["topic"]), default=None)
            into = same if same and in_common(topic, same.fields["topic"]) >= self.merge_at else None
            if into is not None:
                topic, summary = into.fields["topic"], f"{into.fields['summary']} {summary}"
            self._write(store, Origin(of.task_id, split), topic, summary, into, counts)
        return figures | self._finish(store, groups, counts)

    async def learn_asking(
        self, store: Store, groups: Sequence[ScoredGroup], split: str, policy: PolicyHandle
    ) -> Mapping[str, float]:
        """Learn from use, then ask for summaries of one informative attempt at each task."""
        figures, counts = self._look_back(store, groups), _Counts()
        for of in self._news(store, groups):
            told = transcript(of, self.max_transcript)
            near = [hit.entry for hit in store.search(told, self.neighbours, kind=_TOPIC)] if self.neighbours else []
            known = ["Known:", *(f"{e.id}: {e.text}" for e in near)] if near else []
            found = json_object(await asked(policy, "\n".join([*known, told, self.ask])))
            said = listed((found or {}).get("topics"))
            counts.refused += not said
            by_id, origin = {e.id: e for e in near}, Origin(of.task_id, split)
            for one in said[: self.max_new]:
                topic, summary, into = self._read(one, by_id)
                if topic and summary:
                    self._write(store, origin, topic, summary, into, counts)
                counts.refused += not (topic and summary)
        return figures | self._finish(store, groups, counts)

    def _read(self, one: object, known: Mapping[int, Entry]) -> tuple[str, str, Entry | None]:
        """Topic, summary, and the entry that it updates; empty if absent or of an unknown id."""
        if not isinstance(one, dict):
            return "", "", None
        number = one.get("id")
        into = known.get(number) if type(number) is int else None
        if number is not None and into is None:
            return "", "", None
        topic = short(one.get("topic"), self.max_chars // 2) or (into.fields["topic"] if into is not None else "")
        return topic, short(one.get("summary"), self.max_chars), into

    def _news(self, store: Store, groups: Sequence[ScoredGroup]) -> list[Trajectory]:
        told: dict[str, bool] = json.loads(store.kept(_TOLD) or "{}")
        found = news(groups, told)
        if found:
            store.keep(_TOLD, json.dumps(told | {of.task_id: of.solved for of in found}, sort_keys=True))
        return found

    def _write(
        self, store: Store, origin: Origin, topic: str, summary: str, into: Entry | None, counts: _Counts
    ) -> None:
        fields = {"topic": topic, "summary": summary[-self.max_chars :].strip()}
        text = f"{topic}: {fields['summary']}"
        if into is None:
            store.add(_TOPIC, text, origin, fields)
            return
        store.update(into.id, text, fields)
        store.also(into.id, origin)
        counts.merged += 1

    def _finish(self, store: Store, groups: Sequence[ScoredGroup], counts: _Counts) -> dict[str, float]:
        store.keep_newest(_TOPIC, self.max_topics)
        turns = [turn for group in groups for t in group.trajectories for turn in t.own_turns]
        unknown = sum(len(turn.action.notes.get(UNKNOWN, "").split()) for turn in turns)
        return {
            "store/n_entries": float(store.n_entries()),
            "store/n_recalled": float(n_shown(groups)),
            "store/n_refused": float(counts.refused + unknown),
            "store/n_merged": float(counts.merged),
        }

    def _drawn(self, store: Store, opening: str, among: Sequence[Entry], task: str) -> list[int]:
        weights, query = weights_of(store, self.dim), vector(opening, self.dim)
        values = scores(weights, query, np.stack([vector(e.text, self.dim) for e in among]))
        seed = f"{self.seed}/{task}/{store.kept(_N_UPDATES) or 0}/{len(among)}"
        return draw([round(float(v), 9) for v in values], self.k, self.tau, seed)

    def _look_back(self, store: Store, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Move W by what the attempts of a step used of what they were shown."""
        weights, steps, rewards = weights_of(store, self.dim), [], []
        by_id = {entry.id: entry for entry in store.entries(_TOPIC)}
        vectors: dict[int, Array] = {}
        for of in (t for group in groups for t in group.trajectories):
            found = recalled(of)
            among = [n for n in map(int, found.notes.get(AMONG, "").split()) if n in by_id]
            order = [among.index(n) for n in found.entries if n in among]
            if not order:
                continue
            used = self._used(of, by_id, found)
            mine = [1.0 if among[i] in used else -1.0 for i in order]
            rewards += mine
            if self.lr:
                vectors |= {n: vector(by_id[n].text, self.dim) for n in among if n not in vectors}
                query, entries = vector(of.opening, self.dim), np.stack([vectors[n] for n in among])
                steps.append(gradient(weights, query, entries, order, mine, tau=self.tau, baseline=self.baseline))
        if steps:
            for one in steps:
                weights = weights.after(one, self.lr / len(steps))
            kept = {name: np.round(getattr(weights, name), 12).tolist() for name in ("query", "entry")}
            store.keep(_WEIGHTS, json.dumps(kept))
            store.keep(_N_UPDATES, str(int(store.kept(_N_UPDATES) or 0) + 1))
        n_used = float(sum(reward > 0 for reward in rewards))
        shown = {"store/used_share": n_used / len(rewards)} if rewards else {}
        return {"store/n_used": n_used, **shown}

    def _used(self, of: Trajectory, by_id: Mapping[int, Entry], found: Recollection) -> set[int]:
        if self.used == "cited":
            return {int(n) for turn in of.turns for n in turn.action.notes.get(CITED, "").split()}
        known = tokenize(" ".join([of.opening, *(turn.reply for turn in of.turns)]))
        said = {*tokenize(" ".join(actions_of(of)))}.difference(known)
        return {n for n in found.entries if n in by_id and not said.isdisjoint(tokenize(by_id[n].text))}


def weights_of(store: Store, dim: int) -> Weights:
    """The re-ranker as it is in a store; that of another `dim` is none."""
    found: dict[str, Any] = json.loads(store.kept(_WEIGHTS) or "{}")
    if len(found.get("query", ())) != dim:
        return Weights.nothing(dim)
    return Weights(np.array(found["query"]), np.array(found["entry"]))
