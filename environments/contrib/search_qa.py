"""Questions that a search engine has to be asked for, over one to three documents.

    Question: what is the country of the birthplace of Mia Berg?
    > search[Mia Berg]
    1. Mia Berg was born in Arden. Mia Berg works for Celnova.
    2. Celnova was founded by Mia Berg. Celnova is based in Belton.
    > search[Arden]
    1. Arden is a city in Vinland.
    2. Mia Berg was born in Arden. Mia Berg works for Celnova.
    > answer[Vinland]
    Right.

Each task draws a world of its own, with people, companies, cities and countries that nobody has heard of, so that
nothing can be known but what is found. The engine is BM25 (`rlhf.text_search`). A corpus and questions of
one's own
may take the place of the drawn ones.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.base import Properties
from environments.core.normalise import NAMES, words
from environments.core.procedural import Attempt, RecallsByReplay, belongs_to, digest, draw_for
from environments.core.seed_splits import FIRST_SEED, Seeded, refuse_two_splits, refuse_unknown
from environments.tasks.dataset_files import Row, json_lines
from rewards.answers.qa import exact, f1, references
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT
from rlhf.text_search import Index, installed

_LAST = words(
    "Berg Bloom Cole Dahl Eriks Falk Fox Gray Hale Hart Holm Jensen Kern Lund Marsh Nord Parker Quist Reed Stone Storm "
    "Vale West Wolf"
)
_CITIES = tuple(
    a + b
    for b in words("den burg field ford mouth ton wick")
    for a in words("Ar Bel Cor Dun Fal Gren Hol Lin Mar Nor Sel Tor")
)
_COMPANIES = tuple(
    a + b
    for b in words("corp dyne ex ix line nova tron")
    for a in words("Alt Bor Cel Der Ner Ol Quin Ral Sol Tek Vex Zen")
)
_COUNTRIES = words("Arcadia Borduria Elbonia Florin Genovia Kyrat Latveria Norland Syldavia Vinland Wakanda Zubrowka")

#: Kind of thing -> what may be asked of it: word of the question, how a document says it, kind of the answer.
_RELATIONS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "person": (
        ("birthplace", "{0} was born in {1}.", "city"),
        ("employer", "{0} works for {1}.", "company"),
    ),
    "company": (
        ("founder", "{0} was founded by {1}.", "person"),
        ("seat", "{0} is based in {1}.", "city"),
    ),
    "city": (("country", "{0} is a city in {1}.", "country"),),
    "country": (),
}
_TAGS = re.compile(r"<(search|answer)>\s*(.*?)\s*(?:</\1>|$)", re.DOTALL | re.IGNORECASE)
_PLAIN = re.compile(r"^\W*(search|answer)\b(?: for\b| is\b)?[\s:=(\[]*(.*?)[\s)\]]*$", re.DOTALL | re.IGNORECASE)
_UNKNOWN = "Unknown action. Say search[words], or answer[words]."


@plain_dataclass(frozen=True, slots=True)
class Question:
    """Question of a task.

    Attributes:
        text: the question.
        chain: the thing it begins with, those on the way, and the answer; empty for questions from a file.
        relations: what leads from each to the next.
        answer: or answers, as a JSON list.
    """

    text: str
    chain: tuple[str, ...]
    relations: tuple[str, ...]
    answer: str


@plain_dataclass(frozen=True)
class Library:
    """Searchable texts, the names that each mentions, and their index."""

    texts: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    index: Index


def ways(hops: int) -> list[tuple[str, tuple[str, ...]]]:
    """List the kinds of things to begin with, and the relations to follow from there."""

    def following(kind: str, n: int) -> list[tuple[str, ...]]:
        if n == 0:
            return [()]
        return [(word, *rest) for word, _, target in _RELATIONS[kind] for rest in following(target, n - 1)]

    return [(kind, way) for kind in _RELATIONS for way in following(kind, hops)]


def draw_question(rng: random.Random, hops: int) -> Question:
    """Draw a chain of different things, and ask for the last."""
    kind, way = rng.choice(ways(hops))
    chain = [_drawn(rng, kind, ())]
    for word in way:
        kind = next(target for name, _, target in _RELATIONS[kind] if name == word)
        chain.append(_drawn(rng, kind, chain))
    asks = "".join(f"the {word} of " for word in reversed(way))
    return Question(f"what is {asks}{chain[0]}?", tuple(chain), way, chain[-1])


def _drawn(rng: random.Random, kind: str, taken: Sequence[str]) -> str:
    while True:
        if kind == "person":
            name = f"{rng.choice(NAMES)} {rng.choice(_LAST)}"
        else:
            name = rng.choice({"company": _COMPANIES, "city": _CITIES, "country": _COUNTRIES}[kind])
        if name not in taken:
            return name


def draw_library(rng: random.Random, question: Question, n_documents: int) -> Library:
    """Draw the documents around a question: one for each person, company and city, in any order."""
    things: dict[str, list[str]] = {"person": [], "company": [], "city": [], "country": list(_COUNTRIES)}
    of = {**dict.fromkeys(_COMPANIES, "company"), **dict.fromkeys(_CITIES, "city")}
    for name in question.chain:
        if name not in _COUNTRIES:
            things[of.get(name, "person")].append(name)
    n_few = max(3, n_documents // 6)
    for kind, n in (("company", n_few), ("city", n_few), ("person", n_documents - 2 * n_few)):
        while len(things[kind]) < n:
            things[kind].append(_drawn(rng, kind, things[kind]))
    told = {(a, word): b for a, word, b in zip(question.chain, question.relations, question.chain[1:], strict=False)}
    documents = []
    for kind in ("person", "company", "city"):
        for name in things[kind]:
            facts = [(form, told.get((name, word)) or rng.choice(things[to])) for word, form, to in _RELATIONS[kind]]
            mentioned = tuple(dict.fromkeys([name, *(other for _, other in facts)]))
            documents.append((" ".join(form.format(name, other) for form, other in facts), mentioned))
    rng.shuffle(documents)
    texts = tuple(text for text, _ in documents)
    # The thing that a document is about counts once more, as its title would.
    return Library(
        texts, tuple(names for _, names in documents), Index([f"{n[0]} {t}" for t, n in documents]).require()
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SearchQA(RecallsByReplay, Seeded):
    """Questions over one to three documents that have to be searched for, with BM25."""

    hops: Annotated[int, Field(ge=1, le=3)] = 1
    """Documents that lead to the answer; only without `corpus`."""
    n_documents: Annotated[int, Field(ge=12, le=480)] = 24
    """Documents of a task's world; only without `corpus`."""
    n_results: Annotated[int, Field(ge=1, le=20)] = 2
    """Documents that a search shows, best first."""
    max_steps: Annotated[int, Field(ge=1)] = 8
    """Maximum steps per episode; longer ones are truncated."""
    metric: Literal["exact", "f1"] = "exact"
    """Reward of the answer: exact match or F1 of words, as SQuAD counts them. Success is always exact match."""
    corpus: Path | None = None
    """A file with one JSON object per line, each with `text` and optionally `title`, to search instead."""
    questions: Path | None = None
    """A file with one JSON object per line for that corpus: `question`, `answer` (a text, a number or a list of
    them), optionally `split`; without it, the hash of a question says which split it is in."""

    @model_validator(mode="after")
    def _agrees(self) -> SearchQA:
        """Refuse a corpus without questions, questions without a corpus, and keys without effect."""
        if (self.corpus is None) != (self.questions is None):
            raise ValueError("corpus and questions go together; give both or neither")
        if self.corpus is not None and (self.hops, self.n_documents) != (1, 24):
            raise ValueError("hops and n_documents are for drawn worlds, and have no effect with a corpus")
        return self

    @property
    def properties(self) -> Properties:
        """Properties of the environment; corpus searches may be slower than a generated world's."""
        return replace(super().properties, inline=self.corpus is None, package=installed())

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of `train`, `dev` or `test`, each with its answer as `reference`.

        Raises:
            EnvError: there is no such split, or a line of the files is not what it should be.
        """
        seeds = self.seeds(split)
        if self.questions is None:
            return [
                Task(id=f"search_qa/{self.hops}/{split}/{seed}", seed=seed, reference=_question(seed, self.hops).answer)
                for seed in seeds
            ]
        found = [(i, own) for i, (own, at) in enumerate(_questions_of(self.questions)) if at == split][: len(seeds)]
        return [
            Task(
                id=f"search_qa/{digest(repr(own.text))}-{i}", seed=i, reference=own.answer, info={"question": own.text}
            )
            for i, own in found
        ]

    def start(self, task: Task) -> SearchQAEpisode:
        """Begin one attempt. Raises MissingPackageError where `bm25s` is not installed."""
        if self.corpus is None:
            question, library = _world(task.seed, self.hops, self.n_documents)
        else:
            question = Question(str(task.info.get("question", "")), (), (), task.reference or "")
            library = _library_of(self.corpus)
        return SearchQAEpisode(question, library, self)


@lru_cache(maxsize=8192)
def _question(seed: int, hops: int) -> Question:
    return draw_for("search_qa", seed, lambda rng: draw_question(rng, hops))


@lru_cache(maxsize=256)
def _world(seed: int, hops: int, n_documents: int) -> tuple[Question, Library]:
    question = _question(seed, hops)
    return question, draw_library(random.Random(f"search_qa/library/{seed}"), question, n_documents)


def _lines_of(path: Path, needed: Sequence[str]) -> list[Row]:
    """Read JSON lines. Raises EnvError where one is no object, or lacks a key."""
    found = list(json_lines(path))
    for number, own in found:
        if any(own.get(key) in (None, "", []) for key in needed):
            expected = f"a JSON object with {' and '.join(needed)}"
            raise EnvError("a line cannot be used", where=f"{path}:{number}", got=str(own)[:80], expected=expected)
    if not found:
        raise EnvError("the file is empty", where=str(path), expected="one JSON object per line")
    return [own for _, own in found]


@lru_cache(maxsize=8)
def _questions_of(path: Path) -> list[tuple[Question, str]]:
    questions = []
    places: dict[str, str] = {}
    for own in _lines_of(path, ("question", "answer")):
        question = Question(str(own["question"]), (), (), _reference(own["answer"]))
        split = str(own.get("split") or belongs_to(question.text))
        refuse_unknown(split, FIRST_SEED, f"{path}, key split")
        refuse_two_splits(places, question.text, split, str(path))
        questions.append((question, split))
    return questions


def _reference(answer: object) -> str:
    """Reference of an answer in a file: a text or a number as text, several as a JSON list of texts."""
    return json.dumps([str(one) for one in answer]) if isinstance(answer, list) else str(answer)


@lru_cache(maxsize=8)
def _library_of(path: Path) -> Library:
    lines = _lines_of(path, ("text",))
    texts = tuple(f"{own['title']}: {own['text']}" if own.get("title") else str(own["text"]) for own in lines)
    return Library(texts, ((),) * len(texts), Index(texts).require())


class SearchQAEpisode(Attempt):
    """Attempt at a question, which an answer ends.

    The key of a state tells the world and which documents have been read. Where the world was drawn, the listed actions
    are searches and answers with every name that was read so far; any other words may be searched for as well.
    """

    def __init__(self, question: Question, library: Library, settings: SearchQA) -> None:
        super().__init__(settings.max_steps)
        self._question, self._library, self._settings = question, library, settings
        self._name = digest(repr((question.text, len(library.texts))))
        self._read: set[int] = set()
        self.opening = self.opened(f"Question: {question.text}")

    def do(self, action: str) -> tuple[str, bool]:
        """Search, or answer."""
        understood = read_action(action)
        if understood is None:
            return _UNKNOWN, False
        verb, argument = understood
        if verb == "search":
            found = self._library.index.best(argument, self._settings.n_results)
            self._read.update(found)
            lines = [f"{rank}. {self._library.texts[i]}" for rank, i in enumerate(found, 1)]
            return "\n".join(lines) or "Nothing found.", True
        self.done, self.solved = True, exact(argument, self._question.answer)
        self.score = f1(argument, self._question.answer) if self._settings.metric == "f1" else float(self.solved)
        return "Right." if self.solved else "Wrong.", True

    def way_out(self) -> tuple[str, ...] | None:
        """Give searches for the things on the way whose documents are unread, and the answer."""
        if self.done:
            return () if self.solved else None
        known = {self._library.names[i][0] for i in self._read if self._library.names[i]}
        searches = [f"search[{name}]" for name in self._question.chain[:-1] if name not in known]
        answer = self._question.answer
        if not self._question.chain:
            answer = references(answer)[0]
        actions = (*searches, f"answer[{answer}]")
        return actions if len(actions) <= self.steps_left else None

    def worth_keeping(self) -> str:
        """Say which links of the chain have been read: `founder of Celline Kim Vale`."""
        read = {self._library.names[i][0] for i in self._read if self._library.names[i]}
        question = self._question
        links = zip(question.chain, question.relations, question.chain[1:], strict=False)
        return "; ".join(f"{word} of {name} {other}" for name, word, other in links if name in read)

    def state(self) -> str:
        """Return the world and the documents read."""
        return f"{self._name}/{'+'.join(map(str, sorted(self._read)))}{'/answered' if self.done else ''}"

    def possible(self) -> tuple[str, ...]:
        """Return searches and answers with the names read so far."""
        names = {name for i in self._read for name in self._library.names[i]} | set(self._question.chain[:1])
        return tuple(sorted(f"{verb}[{name}]" for name in names for verb in ("search", "answer")))


def read_action(text: str) -> tuple[str, str] | None:
    """Return the verb of an action and its words, or None.

    `search[x]`, `search: x`, `Search x` and `<search>x</search>` are one.
    """
    if len(text) > 500:
        return None
    found = _TAGS.search(text) or _PLAIN.match(text.strip())
    argument = found[2].strip(" \t\r\n\"'`*") if found else ""
    return (found[1].lower(), argument) if found and argument else None
