"""Knights and knaves: who always tells the truth, and who always lies.

    Ada, Ben and Cleo are knights or knaves. Knights always tell the truth, knaves always lie.
    Ada: Ben is a knave.
    ...

What each says is drawn at random, until exactly one answer fits it all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from itertools import product
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.core.procedural import Attempts, DrawnQuestions, Judged, digest
from rlhf.settings import STRICT

_TEXT = "Ada Ben Cleo Dora Emil Fay Gus Hana Ivo June Karl Lena Max Nora Otto Pia Quinn Rosa Sven Tess"
_NAMES = tuple(_TEXT.split())
_KIND: Mapping[bool, str] = {True: "knight", False: "knave"}
_SAID = re.compile(r"\b([a-z]+)\s*(?:is|=|:|->)?\s*(?:(?:an?|the)\s+)?\b(knight|knave)\b")
_LONGEST, _MOST_LISTED = 300, 5

Form = Literal["is", "same", "and", "or", "if"]


@plain_dataclass(frozen=True)
class Statement:
    """Statement of somebody about people, by their numbers.

    Attributes:
        form: `is` (first is `kind`), `same` (first and second are alike if `kind`, else different), `and`, `or` (both
            or at least one of them is `kind`), `if` (if the first is `kind`, so is the second).
        first, second: whom it is about; `second` counts for nothing in `is`.
        kind: True for knights, False for knaves.
    """

    form: Form
    first: int
    second: int
    kind: bool

    def holds(self, knights: Sequence[bool]) -> bool:
        """True if the statement holds with these knights."""
        first, second = knights[self.first] == self.kind, knights[self.second] == self.kind
        if self.form == "is":
            return first
        if self.form == "same":
            return (first == second) == self.kind
        if self.form == "and":
            return first and second
        return (first or second) if self.form == "or" else (not first or second)

    def words(self, speaker: int, names: Sequence[str]) -> str:
        """The statement as `speaker` makes it."""
        kind = _KIND[self.kind]
        first, second = ("I" if i == speaker else names[i] for i in (self.first, self.second))
        first_is, second_is = (f"{name} {'am' if name == 'I' else 'is'} a {kind}" for name in (first, second))
        if self.form == "is":
            return f"{first_is}."
        if self.form == "same":
            return f"{first} and {second} are {'of the same kind' if self.kind else 'of different kinds'}."
        if self.form == "and":
            return f"{first} and {second} are both {kind}s."
        return f"{first_is} or {second_is}, or both." if self.form == "or" else f"If {first_is}, {second_is}."


@plain_dataclass(frozen=True)
class Puzzle:
    """People, and what each says of whom."""

    names: tuple[str, ...]
    statements: tuple[Statement, ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Knights(DrawnQuestions):
    """Tell knights, who never lie, from knaves, who always do, by what they say; pure Python."""

    people: Annotated[int, Field(ge=2, le=8)] = 3
    """Number of people; each says one thing."""
    compound: bool = True
    """Include statements with `or`, `if` and comparisons of people; else only claims about one or two."""
    max_steps: Annotated[int, Field(ge=1)] = 3
    """Attempts at one task."""

    name: ClassVar[str] = "knights_and_knaves"

    @property
    def level(self) -> str:
        """Level: number of people, and their kinds of statements."""
        return f"{self.people}{'' if self.compound else '-plain'}"

    def draw(self, rng: random.Random) -> Puzzle:
        """Draw names, and statements that exactly one answer fits."""
        while True:
            statements = tuple(self._statement(rng, speaker) for speaker in range(self.people))
            if len(solutions(statements)) == 1:
                return Puzzle(tuple(sorted(rng.sample(_NAMES, self.people))), statements)

    def content(self, instance: Puzzle) -> str:
        """Statements, independent of the people's names."""
        return repr(instance.statements)

    def ask(self, instance: Puzzle) -> Attempts:
        """Tell what each says, and ask for their kinds."""
        puzzle = instance
        names, said = puzzle.names, list(enumerate(puzzle.statements))
        everybody = f"{', '.join(names[:-1])} and {names[-1]}"
        question = "\n".join(
            [
                f"{everybody} are knights or knaves. Knights always tell the truth, knaves always lie.",
                *(f"{names[i]}: {statement.words(i, names)}" for i, statement in said),
                f"Answer with what each is, such as: {answer(names, [i % 2 == 0 for i, _ in said])}",
            ]
        )
        few = self.people <= _MOST_LISTED
        return Attempts(
            question,
            lambda text: _judge(puzzle, text),
            name=f"knights/{digest(repr(puzzle))}",
            max_steps=self.max_steps,
            admissible=[answer(names, kinds) for kinds in product((True, False), repeat=self.people)] if few else (),
        )

    def answer(self, instance: Puzzle) -> str:
        """The one answer that fits."""
        [only] = solutions(instance.statements)
        return answer(instance.names, only)

    def _statement(self, rng: random.Random, speaker: int) -> Statement:
        forms: tuple[Form, ...] = ("is", "and", "same", "or", "if") if self.compound else ("is", "and")
        form = rng.choice(forms)
        if form == "is":
            first = second = rng.choice([i for i in range(self.people) if i != speaker])
        else:
            first, second = rng.sample(range(self.people), 2)
        return Statement(form, first, second, rng.random() < 0.5)


def solutions(statements: Sequence[Statement]) -> list[tuple[bool, ...]]:
    """All consistent assignments of knights (True) and knaves: a knight's statement holds, a knave's does not."""
    return [
        kinds
        for kinds in product((True, False), repeat=len(statements))
        if all(statement.holds(kinds) == kind for statement, kind in zip(statements, kinds, strict=True))
    ]


def answer(names: Sequence[str], kinds: Sequence[bool]) -> str:
    """An answer in words: Ada is a knight, Ben is a knave."""
    return ", ".join(f"{name} is a {_KIND[kind]}" for name, kind in zip(names, kinds, strict=True))


def read_answer(text: str, names: Sequence[str]) -> list[bool] | None:
    """Claimed kind of each person, each named once in any order; None if incomplete."""
    if len(text) > _LONGEST:
        return None
    found = _SAID.findall(re.sub(r"[*_`]", "", text.lower()))
    kinds = {name: kind == "knight" for name, kind in found}
    known = [name.lower() for name in names]
    return [kinds[name] for name in known] if sorted(name for name, _ in found) == sorted(known) else None


def _judge(puzzle: Puzzle, text: str) -> Judged:
    kinds = read_answer(text, puzzle.names)
    if kinds is None:
        return Judged(f"Not an answer: say of each of {', '.join(puzzle.names)} which of the two it is.", None)
    said = answer(puzzle.names, kinds)
    for name, statement, kind in zip(puzzle.names, puzzle.statements, kinds, strict=True):
        if statement.holds(kinds) != kind:
            lied = "a knight would have lied" if kind else "a knave would have told the truth"
            return Judged(f"That does not fit: {lied}, {name}.", said)
    return Judged("That fits.", said, solved=True)
