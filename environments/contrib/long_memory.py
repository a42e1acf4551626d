"""Memory environment: facts are given one by one, some change, and questions follow much later.

One observation is one line, and nothing is said twice:

    Read on, and answer the questions at the end. Mia is in Rome.
    > next
    Ben is in Oslo.
    > next
    Mia is now in Paris.
    > next
    The day is calm.
    > next
    Question 1 of 1: where is Mia?
    > Paris

Four abilities are asked for, after those that MemoryAgentBench tells apart (Hu and others, arXiv 2507.05257):
`retrieval` asks for something said once, `conflict` for something that has changed since (the newest holds), `learning`
for the label of a thing never seen, by a rule that labelled examples show (its colour decides), and `understanding` for
a number that only all statements together give.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.core.normalise import NAMES, PLACES, named, plain, words
from environments.core.procedural import Attempt, PlansByReplay, digest, draw_for
from environments.core.seed_splits import Seeded
from rlhf.data import Task
from rlhf.settings import STRICT

Ability = Literal["retrieval", "conflict", "learning", "understanding"]

_COLOURS = words("black blue brown green grey red white yellow")
_THINGS = words("bag ball book box coat cup hat key lamp pen ring shoe")
_LABELS = words("dax fep gorp kiv mib toma wug zup")
_CALM = (
    "The day is calm.",
    "A cat sleeps.",
    "It rains a little.",
    "Bells ring far off.",
    "The road is dry.",
    "A bird sings.",
    "The sun is out.",
    "A door is shut.",
)
_PLACE = re.compile(r"(\w+) is (?:now )?in (\w+)")
_LABEL = re.compile(r"A (\w+) \w+ is a (\w+)")
_NEXT = frozenset({*words("next continue ok okay noted yes wait"), "go on", "read on", "i see"})


@plain_dataclass(frozen=True, slots=True)
class Question:
    """Question of an episode.

    Attributes:
        text: the question.
        answer: the one right answer.
        choices: all answers there are, sorted.
    """

    text: str
    answer: str
    choices: tuple[str, ...]


@plain_dataclass(frozen=True, slots=True)
class Story:
    """Random draw of one task.

    Attributes:
        said: what each turn says, before the questions.
        questions: in the order in which they are asked.
    """

    said: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def reference(self) -> str:
        """All answers, in the order of the questions."""
        return "; ".join(question.answer for question in self.questions)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LongMemory(PlansByReplay, Seeded):
    """Facts are stated and changed one by one, and asked for many turns later; pure Python."""

    abilities: Annotated[tuple[Ability, ...], Field(min_length=1)] = (
        "retrieval",
        "conflict",
        "learning",
        "understanding",
    )
    """Abilities asked about, in turn: `retrieval`, `conflict`, `learning`, `understanding`."""
    n_questions: Annotated[int, Field(ge=1, le=32)] = 4
    """Questions at the end; with more than `abilities`, they go through these again."""
    n_facts: Annotated[int, Field(ge=1, le=40)] = 4
    """People whose place is stated."""
    n_changes: Annotated[int, Field(ge=0, le=64)] = 2
    """Times that one of them moves on, each after the place was stated."""
    n_places: Annotated[int, Field(ge=2, le=16)] = 4
    """Places that people are in, and so the answers there are."""
    n_labels: Annotated[int, Field(ge=2, le=8)] = 2
    """Labels of the rule of `learning`: one for each of as many colours."""
    n_examples: Annotated[int, Field(ge=1, le=8)] = 2
    """Examples that show each label, where `learning` is asked for."""
    distance: Annotated[int, Field(ge=0, le=1_000)] = 2
    """Turns between the last statement and the first question, in which nothing that matters is said."""
    per_turn: Annotated[int, Field(ge=1, le=16)] = 1
    """Statements in one turn."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> LongMemory:
        """Refuse settings under which there are fewer things to ask for than questions."""
        n = {ability: self._asked().count(ability) for ability in ("retrieval", "conflict", "understanding")}
        if n["retrieval"] + n["conflict"] > self.n_facts:
            asked = n["retrieval"] + n["conflict"]
            raise ValueError(f"{asked} questions ask for the places of {self.n_facts} people; raise n_facts")
        if n["conflict"] > self.n_changes:
            raise ValueError(f"{n['conflict']} questions ask for {self.n_changes} changes; raise n_changes")
        if n["understanding"] > self.n_places:
            raise ValueError(f"{n['understanding']} questions count the people in {self.n_places} places")
        if n["retrieval"] == self.n_facts and self.n_changes:
            raise ValueError("everybody's first place is asked for, and so nobody can move; raise n_facts")
        return self

    @property
    def max_steps(self) -> int:
        """Turns of every episode: each statement and each question takes one."""
        n_examples = self.n_labels * self.n_examples if "learning" in self._asked() else 0
        n_said = self.n_facts + self.n_changes + n_examples
        return -(-n_said // self.per_turn) + self.distance + self.n_questions

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split; the reference is all answers, `Paris; 2`. Raises EnvError for another split."""
        prefix = f"long_memory-2/{self.n_facts}+{self.n_changes}+{self.distance}/{split}"
        return [
            Task(id=f"{prefix}/{seed}", seed=seed, reference=_story(self, seed).reference) for seed in self.seeds(split)
        ]

    def start(self, task: Task) -> LongMemoryEpisode:
        """Begin one attempt."""
        return LongMemoryEpisode(_story(self, task.seed))

    def recall(self, task: Task, taken: Sequence[str]) -> str:
        """Shortest summary of all statements up to `taken` that still hold."""
        return worth_keeping(_story(self, task.seed).said[: len(taken) + 1])

    def _asked(self) -> tuple[Ability, ...]:
        return tuple(self.abilities[i % len(self.abilities)] for i in range(self.n_questions))

    def draw(self, rng: random.Random) -> Story:
        """Draw what is said and what is asked."""
        asked = self._asked()
        people, places = rng.sample(NAMES, self.n_facts), sorted(rng.sample(PLACES, self.n_places))
        n_still = asked.count("retrieval")
        moving = people[n_still:][: self.n_changes]
        at = {name: rng.choice(places) for name in people}
        lines = [[f"{name} is in {at[name]}."] for name in people]
        for i in range(self.n_changes):
            name = moving[i % len(moving)]
            at[name] = rng.choice([place for place in places if place != at[name]])
            lines[people.index(name)].append(f"{name} is now in {at[name]}.")
        label_of = dict(zip(rng.sample(_COLOURS, self.n_labels), rng.sample(_LABELS, self.n_labels), strict=True))
        examples, unseen = self._examples(rng, label_of)
        if "learning" in asked:
            lines += [[line] for line in examples]
        still, moved, counted = people[:n_still], moving[: asked.count("conflict")], rng.sample(places, len(places))
        numbers = tuple(str(n) for n in sorted(range(self.n_facts + 1), key=str))
        labels = tuple(sorted(label_of.values()))
        questions = []
        for ability in asked:
            if ability in ("retrieval", "conflict"):
                name = (still if ability == "retrieval" else moved).pop()
                questions.append(Question(f"where is {name}?", at[name], tuple(places)))
            elif ability == "learning":
                colour, thing = unseen[len(questions) % len(unseen)]
                questions.append(Question(f"what is a {colour} {thing}?", label_of[colour], labels))
            else:
                place = counted.pop()
                questions.append(Question(f"how many are in {place}?", str([*at.values()].count(place)), numbers))
        said = _merged(rng, lines)
        turns = [" ".join(said[i : i + self.per_turn]) for i in range(0, len(said), self.per_turn)]
        return Story((*turns, *rng.choices(_CALM, k=self.distance)), tuple(rng.sample(questions, len(questions))))

    def _examples(self, rng: random.Random, label_of: dict[str, str]) -> tuple[list[str], list[tuple[str, str]]]:
        """Lines that show the rule, and unseen things of those colours, in random order."""
        lines, unseen = [], []
        for colour, label in label_of.items():
            things = rng.sample(_THINGS, len(_THINGS))
            lines += [f"A {colour} {thing} is a {label}." for thing in things[: self.n_examples]]
            unseen += [(colour, thing) for thing in things[self.n_examples :]]
        return lines, rng.sample(unseen, len(unseen))


def worth_keeping(said: Sequence[str]) -> str:
    """Present places of people and labels of colours: `Ben Oslo; Mia Paris; red dax`."""
    holds: dict[str, str] = {}
    for line in said:
        for sentence in line.split("."):
            if found := _PLACE.match(sentence.strip()) or _LABEL.match(sentence.strip()):
                holds[found[1]] = found[2]
    return "; ".join(f"{what} {value}" for what, value in sorted(holds.items()))


@lru_cache(maxsize=8192)
def _story(settings: LongMemory, seed: int) -> Story:
    return draw_for("long_memory", seed, settings.draw, lambda story: (story.said[0], story.reference))


def _merged(rng: random.Random, lines: Sequence[Sequence[str]]) -> list[str]:
    """Mix lists at random, keeping the order within each."""
    order = [i for i, own in enumerate(lines) for _ in own]
    rng.shuffle(order)
    left = [iter(own) for own in lines]
    return [next(left[i]) for i in order]


class LongMemoryEpisode(Attempt):
    """Reading of a story and its questions: every action advances a turn.

    The score is the share of questions answered right so far, and success is all of them. The key of a state tells
    the story, the turn, and how many answers were right. An answer may stand in a sentence, as long as it is the only
    one that the sentence names.
    """

    def __init__(self, story: Story) -> None:
        super().__init__(len(story.said) + len(story.questions))
        self._story, self._name = story, digest(repr(story))
        self._turn, self._n_right, self._n_wrong = 0, 0, 0
        self.opening = self.opened(f"Read on, and answer the questions at the end. {self._says()}")

    def do(self, action: str) -> tuple[str, bool]:
        """Go one turn on."""
        question = self._question()
        if question is None:
            valid = plain(action) in _NEXT
        else:
            found = named(action, question.choices)
            valid = len(found) == 1
            self._n_right += found == [question.answer]
            self._n_wrong += found != [question.answer]
            self.score = self._n_right / len(self._story.questions)
        self._turn += 1
        self.done = self.steps_left == 0
        self.solved = self.done and not self._n_wrong
        return "The end." if self.done else self._says(), valid

    def way_out(self) -> tuple[str, ...] | None:
        """Give the actions that answer everything right from here on."""
        if self._n_wrong:
            return None
        rest = ("next",) * max(0, len(self._story.said) - self._turn)
        return (*rest, *(question.answer for question in self._story.questions[self._n_right :]))

    def _question(self) -> Question | None:
        i = self._turn - len(self._story.said)
        return self._story.questions[i] if i >= 0 else None

    def _says(self) -> str:
        question = self._question()
        if question is None:
            return self._story.said[self._turn]
        n = len(self._story.questions)
        return f"Question {self._turn - len(self._story.said) + 1} of {n}: {question.text}"

    def state(self) -> str:
        """Return story, turn and right answers."""
        return f"{self._name}/{self._turn}/{self._n_right}"

    def possible(self) -> tuple[str, ...]:
        """Return the answers there are, or what turns the page."""
        question = self._question()
        return ("next",) if question is None else question.choices
