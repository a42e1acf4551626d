"""Guess my city: identify a person's town by questions about it.

    I live in one of these towns:
    - Belmora: by the sea; hot and dry; known for glass
    - Tarvik: in the hills; cold; known for glass
    > What is the weather like?
    It is cold.
    > Is it Tarvik?

Towns and what is said of them are drawn by seed, so nothing can be known before it is read, and the answers are always
right. Up to 12 names share neither beginning nor ending. An answer is one of several, where that of twenty questions is
yes or no; what to ask is what tells most of the towns that are left apart.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.core.normalise import plain_words
from environments.core.procedural import Attempts, Drawn, Judged, digest
from rlhf.data import Task
from rlhf.settings import STRICT


@plain_dataclass(frozen=True)
class Topic:
    """Topic of a question.

    Attributes:
        question: as it is offered.
        words: by which another wording of it is known.
        answer: with a place for what is so.
        told: how the list of towns says it.
        values: what may be so.
    """

    question: str
    words: str
    answer: str
    told: str
    values: tuple[str, ...]


#: The fields of each topic; words and values are in lists.
_TABLE = """
Where does it lie? | where/lie/lies/situated/located/location | It lies {}. | {} |
  by the sea, on a river, in the hills, in a plain
What is the weather like? | weather/climate/hot/cold/wet/dry | It is {}. | {} | cold, hot and dry, hot and wet, mild
What is it known for? | known/famous/make/makes/made/trade | It is known for its {}. | known for its {} |
  bells, clocks, glass, paper, ships, silk
What do people eat there? | eat/eaten/food/dish/cuisine/cook | They eat {}. | eats {} |
  cheese, dumplings, fish soup, flat bread, sweet rice
Which language is spoken there? | language/speak/speaks/spoken/tongue | They speak {}. | speaks {} |
  Maric, Oruvi, Sarnic, Teldan
How old is it? | old/age/ancient/founded | It is {}. | {} | a few centuries old, new, very old
How large is it? | large/big/small/size/population/inhabitants | It is {}. | {} |
  a large town, a small town, a town of middling size
Who rules it? | rule/rules/ruled/governs/government/king/mayor | It is ruled by {}. | ruled by {} |
  a bishop, a council, a king
"""
TOPICS = tuple(
    Topic(question, words.replace("/", "|"), answer, told, tuple(values.split(", ")))
    for question, words, answer, told, values in re.findall(" [|]\\s+".join(["(.+)"] * 5), _TABLE)
)
_FIRST = ("Bel", "Tar", "Quor", "Mes", "Ald", "Ner", "Vor", "Sil", "Kas", "Dru", "Wen", "Hol")
_LAST = ("mora", "vik", "dale", "tine", "esk", "ford", "uza", "ham", "onna", "ric", "ys", "burg")
NAMES = tuple(sorted(first + last for first in _FIRST for last in _LAST))

_WORDS = tuple(re.compile(rf"\b(?:{topic.words})\b") for topic in TOPICS)
_MEANT: Mapping[str, int] = {plain_words(topic.question).rstrip("?"): i for i, topic in enumerate(TOPICS)}
_NAMES: Mapping[str, str] = {name.lower(): name for name in NAMES}
_GUESS = re.compile(r"^(?:is it |it is |do you live in |you live in |i guess |guess |my guess is )?(\w+)\s*\??$")


@plain_dataclass(frozen=True)
class Towns:
    """Towns with their values by topic, and the hidden one."""

    facts: tuple[tuple[str, tuple[int, ...]], ...]
    meant: str

    def of(self, name: str) -> tuple[int, ...]:
        """Values of a town."""
        return dict(self.facts)[name]

    def alike(self, left: Sequence[str], asked: int | str | None) -> list[str]:
        """Remaining towns that are consistent with the answer to a question or guess."""
        if asked is None:
            return list(left)
        if isinstance(asked, str):
            return [name for name in left if (name == asked) == (self.meant == asked)]
        return [name for name in left if self.of(name)[asked] == self.of(self.meant)[asked]]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GuessMyCity(Drawn):
    """Find out which of several towns is meant, by questions with more than two answers; pure Python."""

    cities: Annotated[int, Field(ge=2, le=24)] = 10
    """Number of candidate towns; their values are told."""
    topics: Annotated[int, Field(ge=2, le=len(TOPICS))] = 4
    """Number of topics per town that can be asked."""
    max_steps: Annotated[int, Field(ge=1)] = 6
    """Questions and guesses at one town."""

    name: ClassVar[str] = "guess_my_city"

    def __post_init__(self) -> None:
        n = 1
        for topic in TOPICS[: self.topics]:
            n *= len(topic.values)
        if self.cities > n // 2:
            raise ValueError(f"cities must be at most {n // 2}, half of what {self.topics} topics tell apart")

    @property
    def level(self) -> str:
        """Level: numbers of towns and topics."""
        return f"{self.cities}-{self.topics}"

    def draw(self, rng: random.Random) -> Towns:
        """Draw towns, no two of which have everything in common, and one of them."""
        names = sorted(distinct_names(rng, self.cities))
        facts: dict[tuple[int, ...], None] = {}
        while len(facts) < self.cities:
            facts.setdefault(tuple(rng.randrange(len(t.values)) for t in TOPICS[: self.topics]), None)
        return Towns(tuple(zip(names, facts, strict=True)), rng.choice(names))

    def start(self, task: Task) -> Attempts:
        """Begin one attempt at a task."""
        towns: Towns = self.instance(task)
        listed = [
            f"- {name}: {'; '.join(t.told.format(t.values[v]) for t, v in zip(TOPICS, values, strict=False))}"
            for name, values in towns.facts
        ]
        offered = [topic.question for topic in TOPICS[: self.topics]]
        return Attempts(
            "\n".join(
                [
                    "I live in one of these towns:",
                    *listed,
                    f"Find out which, by asking such as: {' '.join(offered)} To guess, ask: Is it {towns.facts[0][0]}?",
                ]
            ),
            lambda text: judge(towns, text, self.topics),
            name=f"{self.name}/{digest(repr(towns))}",
            max_steps=self.max_steps,
            admissible=[*offered, *(guess(name) for name, _ in towns.facts)],
            unit="question",
        )

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give questions that lead to the town after `taken`; None where too few are left.

        They are those of someone who has read the list, but does not know the town: see `best_question`.
        """
        towns: Towns = self.instance(task)
        left = [name for name, _ in towns.facts]
        for text in taken[: self.max_steps]:
            asked = read_question(text, self.topics)
            if asked == towns.meant:
                return ()
            left = towns.alike(left, asked)
        path: list[str] = []
        while len(path) < self.max_steps - len(taken):
            asked = best_question(towns, left, self.topics)
            path.append(guess(asked) if isinstance(asked, str) else TOPICS[asked].question)
            if asked == towns.meant:
                return tuple(path)
            left = towns.alike(left, asked)
        return None


def distinct_names(rng: random.Random, n: int) -> list[str]:
    """Draw n distinct names; the first 12 share neither beginning nor ending."""
    halves = [list(_FIRST), list(_LAST)]
    names: list[str] = []
    while len(names) < n:
        for half in halves:
            rng.shuffle(half)
        names += [name for name in map("".join, zip(*halves, strict=True)) if name not in names]
    return names[:n]


def guess(name: str) -> str:
    """The question that guesses a town."""
    return f"Is it {name}?"


def read_question(text: str, n_topics: int = len(TOPICS)) -> int | str | None:
    """Topic number of a question, or the guessed town, or None.

    A topic is known by a word of it; where words of several occur, it is not understood.
    """
    asked = plain_words(text, 100)
    bare = asked.rstrip("? ")
    if _MEANT.get(bare, n_topics) < n_topics:
        return _MEANT[bare]
    if (match := _GUESS.match(bare)) and match[1] in _NAMES:
        return _NAMES[match[1]]
    if not re.fullmatch(r"[a-z0-9 ,?']+", asked):
        return None
    found = [i for i, words in enumerate(_WORDS[:n_topics]) if words.search(asked)]
    return found[0] if len(found) == 1 else None


def best_question(towns: Towns, left: Sequence[str], n_topics: int) -> int | str:
    """Topic with the fewest expected remaining towns, the first on ties.

    Where no more than two are left it is the guess of the first. Of n towns, n_v of which have value v, n_v² / n are
    expected to be left, summed over v.
    """
    if len(left) <= 2:
        return left[0]
    return min(range(n_topics), key=lambda i: sum(n * n for n in Counter(towns.of(name)[i] for name in left).values()))


def judge(towns: Towns, text: str, n_topics: int) -> Judged:
    """Answer a question or a guess."""
    asked = read_question(text, n_topics)
    if asked is None:
        return Judged("That question is not understood. Ask about one thing at a time.", None)
    if isinstance(asked, int):
        topic = TOPICS[asked]
        return Judged(topic.answer.format(topic.values[towns.of(towns.meant)[asked]]), topic.question)
    if asked not in dict(towns.facts):
        return Judged(f"{asked} is not one of these towns.", None)
    if asked == towns.meant:
        return Judged(f"Yes! I live in {asked}.", asked, solved=True)
    return Judged("No.", asked)
