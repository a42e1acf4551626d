"""Typed memory: core, episodic, semantic and procedural, each with its own rules.

The last three are those that agents have taken over from psychology (CoALA, arXiv 2309.02427); the core is always in
the prompt (MemGPT, arXiv 2310.08560).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.base import History, PolicyHandle
from agents.stores.asking import actions_of, asked, best_attempts, json_object, listed, short, transcript
from agents.stores.contrib.facts import Extractor, facts_of
from agents.stores.contrib.operations import BadOperation, Bank, Operation, parsed
from agents.stores.entry import Entry, Origin
from agents.stores.kind import Recollection, n_shown
from agents.stores.search import in_common
from agents.stores.store import Store
from rlhf.data import ScoredGroup, Trajectory
from rlhf.settings import STRICT

_CORE, _EPISODIC, _SEMANTIC, _PROCEDURAL = "core", "episodic", "semantic", "procedural"
_TITLES = {_CORE: "Always:", _PROCEDURAL: "How to:", _SEMANTIC: "Known:", _EPISODIC: "Before:"}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Core:
    """Lines that every opening begins with; the policy adds, changes and deletes them after an attempt."""

    begin: tuple[str, ...] = ()
    """Lines that are there from the start."""
    max_lines: Annotated[int, Field(ge=1)] = 8
    """Maximum number of lines; more are refused."""
    max_chars: Annotated[int, Field(ge=1)] = 100
    """Maximum length of a line."""

    def __post_init__(self) -> None:
        """Refuse a start beyond the bounds."""
        if len(self.begin) > self.max_lines or any(not 0 < len(line) <= self.max_chars for line in self.begin):
            raise ValueError(f"begin is not {self.max_lines} lines of 1 to {self.max_chars} characters, or fewer")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Episodic:
    """Episodic memory: the newest attempt at each task, retrieved by similarity and recency.

    The n-th newest, from 0, has the score (1 − recency) · words in common + recency · 2^(−n / half_life).
    """

    k: Annotated[int, Field(ge=1)] = 2
    """Maximum number of attempts shown."""
    recency: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Weight of recency; 0 ranks by word overlap of the opening alone."""
    half_life: Annotated[float, Field(gt=0)] = 20.0
    """Half-life of recency, in newer attempts."""
    max_entries: Annotated[int, Field(ge=1)] = 500
    """Maximum number of attempts; the oldest beyond it are dropped."""
    max_chars: Annotated[int, Field(ge=20)] = 200
    """Maximum length of a text."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Semantic:
    """Semantic memory of facts, from the policy or by rules, retrieved by words."""

    extractor: Extractor | None = None
    """Rules that extract facts, with a `kind` and its keys; null calls the policy."""
    k: Annotated[int, Field(ge=1)] = 5
    """Maximum number of facts shown, by BM25 with the opening."""
    max_new: Annotated[int, Field(ge=1)] = 4
    """Maximum number of facts per attempt."""
    max_entries: Annotated[int, Field(ge=1)] = 500
    """Maximum number of facts; the oldest beyond it are dropped."""
    max_chars: Annotated[int, Field(ge=20)] = 120
    """Maximum length of a fact."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Procedural:
    """Procedural memory: one procedure for each solved task, of its shortest solution; retrieved by similarity."""

    k: Annotated[int, Field(ge=1)] = 2
    """Maximum number of procedures shown, by word overlap of their task with the opening."""
    max_entries: Annotated[int, Field(ge=1)] = 200
    """Maximum number of procedures; the oldest beyond it are dropped."""
    max_chars: Annotated[int, Field(ge=20)] = 300
    """Maximum length of a procedure."""


@plain_dataclass
class _Counts:
    refused: int = 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Typed:
    """Typed memory: shows the core, then matching how-tos, facts and episodes; null omits a kind.

    After a step the policy is asked once (role `memory`) about one attempt at each task: for operations on the core,
    for facts, and for a how-to where the task was solved. What of a reply cannot be read changes nothing and is
    counted; a how-to that is none is the list of actions. Episodes are written by rule.
    """

    core: Core | None = Field(default_factory=Core)
    """Always shown."""
    episodic: Episodic | None = Field(default_factory=Episodic)
    """Attempts at other tasks."""
    semantic: Semantic | None = Field(default_factory=Semantic)
    """Facts."""
    procedural: Procedural | None = Field(default_factory=Procedural)
    """Procedural memory: how-tos."""
    ask_policy: bool = True
    """Ask the policy; else the core stays as it began, and how-tos are lists of actions."""
    include_same_task: bool = False
    """Include what earlier attempts at the same task left, which a test task never has."""
    max_transcript: Annotated[int, Field(ge=20)] = 2000
    """Characters of an attempt that the policy is asked about: its end, where it is longer."""

    def __post_init__(self) -> None:
        """Refuse kinds of memory that would stay empty."""
        if not any((self.core, self.episodic, self.semantic, self.procedural)):
            raise ValueError("core, episodic, semantic and procedural are all null, expected at least one")
        if not self.ask_policy and self.semantic is not None and self.semantic.extractor is None:
            raise ValueError("ask_policy is false and semantic has no extractor, expected one of them to write facts")
        if not self.ask_policy and self.core is not None and not self.core.begin:
            raise ValueError(
                "ask_policy is false and core.begin is empty, expected lines, or core: null: only the policy changes it"
            )

    @property
    def asks_policy(self) -> bool:
        """True if there is anything to ask."""
        says_facts = self.semantic is not None and self.semantic.extractor is None
        return self.ask_policy and (self.core is not None or self.procedural is not None or says_facts)

    def recollect(self, store: Store, history: History) -> Recollection:
        """Choose of each kind what fits a task that begins."""
        tasks = store.tasks()
        mine = frozenset() if self.include_same_task else frozenset({history.task.id})
        lines: list[str] = []
        entries: list[int] = []
        if self.core is not None:
            there = store.entries(_CORE)
            begun = [entry.text for entry in there] if store.kept(_CORE) else self.core.begin
            lines += [_TITLES[_CORE], *begun] if begun else []
            entries += [entry.id for entry in there]
        for kind, choose in self._choices().items():
            known = [entry for entry in store.entries(kind) if tasks[entry.id] != mine]
            chosen = choose(store, history.opening, known)
            lines += [_TITLES[kind], *(f"- {entry.text}" for entry in chosen)] if chosen else []
            entries += [entry.id for entry in chosen]
        return Recollection("\n".join(lines), tuple(entries))

    def learn(self, store: Store, groups: Sequence[ScoredGroup], split: str) -> Mapping[str, float]:
        """Write what rules can."""
        self._begin(store, split)
        for of in best_attempts(groups):
            self._by_rules(store, of, split)
            self._how_to(store, of, split, None)
        return self._figures(store, groups, _Counts())

    async def learn_asking(
        self, store: Store, groups: Sequence[ScoredGroup], split: str, policy: PolicyHandle
    ) -> Mapping[str, float]:
        """Ask about one attempt at each task, and write what comes of it."""
        counts = _Counts()
        self._begin(store, split)
        for of in best_attempts(groups):
            self._by_rules(store, of, split)
            core = [f"{entry.id}: {entry.text}" for entry in store.entries(_CORE)]
            shown = ["Always:", *core] if self.core is not None else []
            told = transcript(of, self.max_transcript)
            found = json_object(await asked(policy, "\n".join([*shown, told, self._question(of)])))
            if found is None:
                counts.refused += 1
            said = found or {}
            self._change_core(store, said.get("core", []), Origin(of.task_id, split), counts)
            self._add_facts(store, said.get("facts", []), Origin(of.task_id, split), counts)
            self._how_to(store, of, split, counts if found is not None else None, said.get("how_to"))
        return self._figures(store, groups, counts)

    def _choices(self) -> dict[str, Callable[[Store, str, list[Entry]], list[Entry]]]:
        """Return the entries read of each kind but the core, in the order shown."""
        found: dict[str, Callable[[Store, str, list[Entry]], list[Entry]]] = {}
        if (how := self.procedural) is not None:
            found[_PROCEDURAL] = lambda _, opening, known: _likest(known, how.k, opening, "goal")
        if (facts := self.semantic) is not None:
            found[_SEMANTIC] = lambda store, opening, known: _nearest(store, opening, known, facts.k)
        if (past := self.episodic) is not None:
            found[_EPISODIC] = lambda _, opening, known: recent_and_like(known, opening, past)
        return found

    def _question(self, of: Trajectory) -> str:
        parts = []
        if self.core is not None:
            parts.append('"core": [{"op": "ADD", "text": "..."}, {"op": "UPDATE", "id": 1, "text": "..."}]')
        if self.semantic is not None and self.semantic.extractor is None:
            parts.append('"facts": ["..."]')
        if self.procedural is not None and of.solved:
            parts.append('"how_to": "..."')
        return "What is to be remembered? Answer in JSON: {" + ", ".join(parts) + "}"

    def _begin(self, store: Store, split: str) -> None:
        if self.core is not None and not store.kept(_CORE):
            for line in self.core.begin:
                store.add(_CORE, line, Origin("", split))
            store.keep(_CORE, "begun")

    def _by_rules(self, store: Store, of: Trajectory, split: str) -> None:
        origin = Origin(of.task_id, split)
        if self.episodic is not None:
            for entry in store.entries(_EPISODIC, of.task_id):
                store.delete(entry.id)
            ended = "solved" if of.solved else "not solved"
            most = self.episodic.max_chars
            done = short(f"> {', '.join(actions_of(of))}", min(most // 2, most - len(ended) - 3))
            opening = short(of.opening, max(most - len(done) - len(ended) - 4, 0))
            store.add(_EPISODIC, f"{opening} {done} ({ended})".strip(), origin, {"opening": of.opening})
            store.keep_newest(_EPISODIC, self.episodic.max_entries)
        if self.semantic is not None and (rules := self.semantic.extractor) is not None:
            texts = (of.opening, *(turn.reply for turn in of.turns if turn.action.error is None))
            read = facts_of(parts for text in texts for parts in rules(text))
            new = [one.text[: self.semantic.max_chars] for one in dict.fromkeys(read)]
            _add_once(store, new[: self.semantic.max_new], origin)
            store.keep_newest(_SEMANTIC, self.semantic.max_entries)

    def _change_core(self, store: Store, said: object, origin: Origin, counts: _Counts) -> None:
        """Carry out operations on the core, all or none."""
        if self.core is None or said == []:
            return
        limits = self.core
        bank = Bank(tuple((entry.id, entry.text) for entry in store.entries(_CORE)))
        try:
            text = json.dumps(said, ensure_ascii=False).encode("utf-8", "ignore").decode()
            operations = parsed(text, max_operations=limits.max_lines, max_chars=limits.max_chars)
            after = bank.after([op for op in operations if op.op != "ADD"]).entries
            if len(after) + sum(op.op == "ADD" for op in operations) > limits.max_lines:
                raise BadOperation(f"the core has at most {limits.max_lines} lines")
        except (BadOperation, RecursionError):
            counts.refused += 1
            return
        for op in operations:
            _carry_out(store, op, origin)

    def _add_facts(self, store: Store, said: object, origin: Origin, counts: _Counts) -> None:
        limits = self.semantic
        if limits is None or limits.extractor is not None:
            return
        given = listed(said)
        good = [text for one in given if (text := short(one, limits.max_chars))]
        counts.refused += len(given) - len(good) + (not isinstance(said, list))
        _add_once(store, good[: limits.max_new], origin)
        store.keep_newest(_SEMANTIC, limits.max_entries)

    def _how_to(self, store: Store, of: Trajectory, split: str, counts: _Counts | None, said: object = None) -> None:
        """Store a task's solution, replacing a longer one; `counts` where the policy could have written it."""
        if self.procedural is None or not of.solved:
            return
        actions = actions_of(of)
        text = short(said, self.procedural.max_chars)
        if counts is not None and not text:
            counts.refused += 1
        text = text or short(f"{of.opening} > {', '.join(actions)}", self.procedural.max_chars)
        before = next(iter(store.entries(_PROCEDURAL, of.task_id)), None)
        fields: dict[str, Any] = {"goal": of.opening, "n_actions": len(actions)}
        if before is None:
            store.add(_PROCEDURAL, text, Origin(of.task_id, split), fields)
        elif len(actions) < before.fields["n_actions"]:
            store.update(before.id, text, fields)
        store.keep_newest(_PROCEDURAL, self.procedural.max_entries)

    @staticmethod
    def _figures(store: Store, groups: Sequence[ScoredGroup], counts: _Counts) -> dict[str, float]:
        return {
            "store/n_entries": float(store.n_entries()),
            "store/n_recalled": float(n_shown(groups)),
            "store/n_refused": float(counts.refused),
            **{f"store/n_{kind}": float(store.n_entries(kind)) for kind in sorted(_TITLES)},
        }


def recent_and_like(known: Sequence[Entry], opening: str, rule: Episodic) -> list[Entry]:
    """The attempts of the highest score by `rule`, best first; `known` are oldest first. Of equal ones the newer."""
    scores = []
    for n, entry in enumerate(reversed(known)):
        like = in_common(opening, entry.fields["opening"])
        scores.append(((1 - rule.recency) * like + rule.recency * 2 ** (-n / rule.half_life), entry))
    return [entry for _, entry in sorted(scores, key=lambda pair: -pair[0])[: rule.k]]


def _likest(known: Sequence[Entry], k: int, opening: str, name: str) -> list[Entry]:
    """Entries with most words in common with an opening, newer first; none if it has no words."""
    scored = [(in_common(opening, entry.fields[name]), entry) for entry in reversed(known)]
    return [entry for score, entry in sorted(scored, key=lambda pair: -pair[0])[:k] if score > 0]


def _nearest(store: Store, opening: str, known: Sequence[Entry], k: int) -> list[Entry]:
    allowed = {entry.id for entry in known}
    found = (hit.entry for hit in store.search(opening, store.n_entries(_SEMANTIC), kind=_SEMANTIC))
    return [entry for entry in found if entry.id in allowed][:k]


def _carry_out(store: Store, op: Operation, origin: Origin) -> None:
    if op.op == "ADD":
        store.add(_CORE, op.text, origin)
    elif op.op == "UPDATE":
        store.update(op.id, op.text)
        store.also(op.id, origin)
    elif op.op == "DELETE":
        store.delete(op.id)


def _add_once(store: Store, texts: Sequence[str], origin: Origin) -> None:
    """Keep facts, or note of those that are kept that another task told them too."""
    known = {entry.text.casefold(): entry.id for entry in reversed(store.entries(_SEMANTIC))}
    for text in texts:
        if (number := known.get(text.casefold())) is None:
            known[text.casefold()] = store.add(_SEMANTIC, text, origin)
        else:
            store.also(number, origin)
