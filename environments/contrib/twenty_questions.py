"""Twenty questions: find out which of several things is meant, by questions answered with yes or no.

    It is one of these: a bee, a bus, a cactus, ...
    > Is it alive?
    Yes.

The answers come from a small table of things and what is true of them, not from a model: they are the same every time,
and they are as right as the table. Splits share things, but no thing among the same others is in two of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.core.normalise import plain_words
from environments.core.procedural import Attempts, Drawn, Judged, digest
from rlhf.data import Task
from rlhf.settings import STRICT

#: What can be asked: the question, words by which another wording of it is known, and the things it is true of. A word
#: stands here only if both wordings have the same answer for every thing: a penguin has wings, and does not fly.
_TEXT = """
Is it alive? alive|living: ant, bee, butterfly, cactus, cat, cow, crocodile, dog, duck, eagle, elephant, frog,
  goldfish, horse, lion, mouse, oak, owl, penguin, rose, shark, snake, spider, whale, grass
Is it an animal? animal|creature: ant, bee, butterfly, cat, cow, crocodile, dog, duck, eagle, elephant, frog,
  goldfish, horse, lion, mouse, owl, penguin, shark, snake, spider, whale
Can it fly? fly|flies: bee, butterfly, duck, eagle, owl, aeroplane, helicopter
Is it found in water? water: boat, crocodile, duck, frog, goldfish, penguin, shark, submarine, whale, river
Does it have four legs? four legs|4 legs: bed, cat, chair, cow, crocodile, dog, elephant, frog, horse, lion, mouse,
  table
Does it have fur? fur|furry|hair: cat, cow, dog, horse, lion, mouse
Does it have feathers? feather|feathers|feathered: duck, eagle, owl, penguin, pillow
Is it an insect? insect|bug: ant, bee, butterfly
Is it kept as a pet? pet: cat, dog, goldfish, mouse
Does it eat meat? meat|predator|hunt|hunts: cat, crocodile, dog, eagle, frog, lion, owl, penguin, shark, snake, spider
Can you eat it? eat it|food|edible: apple, banana, bread, carrot, cheese, egg, ice cream, pizza
Is it bigger than a person? bigger|larger|big|large: aeroplane, boat, bus, car, cloud, cow, crocodile, elephant,
  helicopter, horse, moon, mountain, oak, piano, river, shark, submarine, sun, train, whale
Does it need electricity or fuel? electricity|electric|fuel: aeroplane, bus, car, fridge, helicopter, kettle, lamp,
  submarine, television, train
Does it have wheels? wheels|wheel: aeroplane, bicycle, bus, car, train
Can you ride in it or on it? ride|travel: aeroplane, bicycle, boat, bus, car, elephant, helicopter, horse, submarine,
  train
Is it a piece of furniture? furniture: bed, chair, table
Is it made of wood? wood|wooden: chair, guitar, ladder, oak, pencil, piano, table, violin
Is it made of metal? metal: aeroplane, bicycle, bus, car, fork, hammer, helicopter, kettle, knife, ring, saw,
  scissors, submarine, train, fridge
Is it a tool? tool: hammer, ladder, pencil, saw, scissors, knife
Is it sharp? sharp: cactus, fork, knife, saw, scissors
Is it used at meals? meals|meal: cup, fork, knife, table, kettle
Does it make music? music|musical|instrument: drum, guitar, piano, violin
Does it have strings? strings|string: guitar, piano, violin
Do you wear it? wear|worn|clothes|clothing: coat, glove, hat, ring, shoe
Does it come in pairs? pairs|pair: glove, shoe
Is it round? round|circle|circular: apple, clock, cup, drum, moon, pizza, ring, sun
Does it give light? light|shine|shines|bright: candle, lamp, moon, sun, television
Is it in the sky? sky: cloud, moon, sun
Is it yellow? yellow: banana, bee, cheese, lion, sun
Is it cold? cold|frozen: fridge, ice cream, snow
Is it good against rain or snow? rain|weather: coat, umbrella, hat
Is it soft? soft: bed, bread, cat, cloud, coat, pillow, snow, glove, grass, ice cream
Does it tell you something? tell|information: book, clock, television
Does it grow on a plant? grow|grows: apple, banana, carrot, rose
"""
_TABLE = re.findall(r"^(\w.*\?) (.+): ((?:.|\n  )+)$", _TEXT, re.MULTILINE)
_TRUE_OF: Mapping[str, frozenset[str]] = {
    question: frozenset(" ".join(thing.split()) for thing in things.split(",")) for question, _, things in _TABLE
}
_WORDS: Mapping[str, re.Pattern[str]] = {question: re.compile(rf"\b(?:{words})\b") for question, words, _ in _TABLE}
_MEANT: Mapping[str, str] = {plain_words(question).rstrip("?"): question for question in _TRUE_OF}

#: Everything that may be meant.
THINGS = tuple(sorted({*frozenset.union(*_TRUE_OF.values()), "mirror"}))

_GUESS = re.compile(r"^(?:is it |it is |i guess |guess |my guess is )?(?:an? |the )?(.+?)\s*\??$")


@plain_dataclass(frozen=True)
class Riddle:
    """The things it may be, sorted, and the one that it is."""

    things: tuple[str, ...]
    meant: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TwentyQuestions(Drawn):
    """Twenty questions: identify a thing by yes-no questions answered from a table; pure Python."""

    things: Annotated[int, Field(ge=2, le=len(THINGS))] = 16
    """Number of candidate things; they are told."""
    max_steps: Annotated[int, Field(ge=1)] = 10
    """Questions and guesses at one thing."""

    name: ClassVar[str] = "twenty_questions"

    @property
    def level(self) -> str:
        """Level: number of things."""
        return str(self.things)

    def draw(self, rng: random.Random) -> Riddle:
        """Draw things and one of them."""
        things = tuple(sorted(rng.sample(THINGS, self.things)))
        return Riddle(things, rng.choice(things))

    def start(self, task: Task) -> Attempts:
        """Begin one attempt at a task."""
        riddle: Riddle = self.instance(task)
        question = (
            f"Find out which of these things it is: {', '.join(map(named, riddle.things))}.\n"
            "Ask something that can be answered with yes or no, such as: Is it alive? To guess, ask: Is it a dog?"
        )
        return Attempts(
            question,
            lambda text: _judge(riddle, text),
            name=f"twenty_questions/{digest(repr(riddle))}",
            max_steps=self.max_steps,
            admissible=[*_TRUE_OF, *(guess(thing) for thing in riddle.things)],
            unit="question",
        )

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give questions that lead to the thing after `taken`; None where too few are left.

        They are those of someone who knows the table, but not the thing: see `best_question`.
        """
        riddle: Riddle = self.instance(task)
        left = set(riddle.things)
        for text in taken[: self.max_steps]:
            asked = read_question(text)
            if asked == riddle.meant:
                return ()
            left = _narrowed(left, asked, riddle.meant)
        path: list[str] = []
        while len(path) < self.max_steps - len(taken):
            asked = best_question(tuple(sorted(left)))
            path.append(asked if asked in _TRUE_OF else guess(asked))
            if asked == riddle.meant:
                return tuple(path)
            left = _narrowed(left, asked, riddle.meant)
        return None


def named(thing: str) -> str:
    """A thing with its article."""
    if thing in ("bread", "cheese", "grass", "ice cream", "snow"):
        return thing
    return f"the {thing}" if thing in ("moon", "sun") else f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def guess(thing: str) -> str:
    """The question that guesses a thing."""
    return f"Is it {named(thing)}?"


def answer(question: str, thing: str) -> bool:
    """True if the answer to a question of the table, or to a guess, is yes."""
    return thing in _TRUE_OF[question] if question in _TRUE_OF else question == thing


def read_question(text: str) -> str | None:
    """Return the question of the table that is asked, or the thing that is guessed, or None.

    A question is known by a word of it; where words of several occur, or a negation, it is not understood.
    """
    asked = plain_words(text, 100)
    bare = asked.rstrip("? ")
    if bare in _MEANT:
        return _MEANT[bare]
    match = _GUESS.match(bare)
    if match and match[1] in THINGS:
        return match[1]
    if not re.fullmatch(r"[a-z0-9 ,?']+", asked) or re.search(r"\b(?:not|no|never|or|and|isn|doesn)\b", asked):
        return None
    found = [question for question, words in _WORDS.items() if words.search(asked)]
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=4096)
def best_question(left: tuple[str, ...]) -> str:
    """Give the question that halves the things left best, the first of equally good ones.

    Where no more than two are left, or no question tells them apart, it is the guess of one.
    """
    if len(left) <= 2:
        return left[0]
    yes = {question: len(true.intersection(left)) for question, true in _TRUE_OF.items()}
    best = min(yes, key=lambda question: abs(2 * yes[question] - len(left)))
    return best if 0 < yes[best] < len(left) else left[0]


def _narrowed(left: set[str], asked: str | None, meant: str) -> set[str]:
    """The things left after an answer."""
    return left if asked is None else {thing for thing in left if answer(asked, thing) == answer(asked, meant)}


def _judge(riddle: Riddle, text: str) -> Judged:
    asked = read_question(text)
    if asked is None:
        return Judged("That question is not understood. Ask about one thing at a time.", None)
    if asked == riddle.meant:
        return Judged(f"Yes! It is {named(asked)}.", asked, solved=True)
    return Judged("Yes." if answer(asked, riddle.meant) else "No.", asked)
