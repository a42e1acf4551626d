"""Satisfiability: find truth values that make every clause of a formula true.

    x1 to x5 are true or false. Make each of these clauses true:
    1. x1 or not x3 or x4
    ...

Formulas are drawn at random around hidden truth values that satisfy them, so each can be solved. How hard one is goes
by three numbers, as in SATURN (arXiv 2505.16368): n literals per clause, k variables, l clauses,

    D(n, k, l) = log2 k + 2 log2 l - n + k / n
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from environments.core.procedural import Attempts, DrawnQuestions, Judged, digest
from rlhf.data import Task
from rlhf.settings import STRICT

#: Positive for a variable, negative for its negation; variables count from 1.
Clause = tuple[int, ...]

_VALUES: Mapping[str, bool] = {"true": True, "t": True, "1": True, "yes": True} | {
    "false": False, "f": False, "0": False, "no": False,
}  # fmt: skip
_PAIR = re.compile(r"x_?(\d+)\s*(?:=|:|is|->)\s*(true|false|yes|no|t|f|1|0)\b")
_LONGEST, _MOST_LISTED, _MOST_NAMED = 400, 6, 3


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sat(DrawnQuestions):
    """Find truth values for a formula of clauses, in several attempts with feedback; pure Python."""

    literals: Annotated[int, Field(ge=1, le=8)] = 3
    """Literals per clause (n): variables, or their negations, no variable twice. More make a clause easier."""
    variables: Annotated[int, Field(ge=2, le=20)] = 5
    """Variables of a formula (k)."""
    clauses: Annotated[int, Field(ge=1, le=200)] = 15
    """Clauses of a formula (l), all different."""
    max_steps: Annotated[int, Field(ge=1)] = 4
    """Attempts at one task."""

    name: ClassVar[str] = "sat"

    @model_validator(mode="after")
    def _fits(self) -> Sat:
        if self.literals > self.variables:
            raise ValueError(
                f"a clause of {self.literals} literals needs as many variables, and there are {self.variables}"
            )
        # Of the 2^n signs of each choice of variables, one contradicts the hidden truth values.
        most = math.comb(self.variables, self.literals) * (2**self.literals - 1)
        if self.clauses > most // 2:
            raise ValueError(f"{self.clauses} clauses are too many: {most // 2} is the most for these sizes")
        return self

    @property
    def level(self) -> str:
        """The three numbers."""
        return f"{self.literals}-{self.variables}-{self.clauses}"

    @property
    def difficulty(self) -> float:
        """Difficulty of these formulas by SATURN's estimate."""
        return difficulty(self.literals, self.variables, self.clauses)

    def draw(self, rng: random.Random) -> tuple[Clause, ...]:
        """Draw truth values, and clauses that they satisfy."""
        hidden = [rng.random() < 0.5 for _ in range(self.variables)]
        found: dict[Clause, None] = {}
        while len(found) < self.clauses:
            chosen = sorted(rng.sample(range(1, self.variables + 1), self.literals))
            clause = tuple(x if rng.random() < 0.5 else -x for x in chosen)
            if satisfied(clause, hidden):
                found[clause] = None
        return tuple(found)

    def content(self, instance: tuple[Clause, ...]) -> str:
        """The clauses in any order."""
        return repr(sorted(instance))

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of a split, each with its `difficulty` in `Task.info`, for curricula."""
        info = {"difficulty": round(self.difficulty, 3)}
        return [replace(task, info=info) for task in super().tasks(split)]

    def ask(self, instance: tuple[Clause, ...]) -> Attempts:
        """List the clauses, and ask for truth values."""
        formula = instance
        lines = [f"{i}. {words(clause)}" for i, clause in enumerate(formula, start=1)]
        question = "\n".join(
            [
                f"x1 to x{self.variables} are true or false. Make each of these clauses true:",
                *lines,
                f"Answer with {self.variables} digits, 1 for true and 0 for false, x1 first.",
            ]
        )
        few = self.variables <= _MOST_LISTED
        return Attempts(
            question,
            lambda text: self._judge(formula, text),
            name=f"sat/{digest(repr(formula))}",
            max_steps=self.max_steps,
            admissible=["".join(bits) for bits in product("01", repeat=self.variables)] if few else (),
        )

    def answer(self, instance: tuple[Clause, ...]) -> str | None:
        """Truth values that satisfy the formula, as digits."""
        values = solve(instance, self.variables)
        return None if values is None else digits(values)

    def _judge(self, formula: Sequence[Clause], text: str) -> Judged:
        values = read_values(text, self.variables)
        if values is None:
            return Judged(f"Not an answer: give {self.variables} digits, 1 for true and 0 for false.", None)
        wrong = [i for i, clause in enumerate(formula, start=1) if not satisfied(clause, values)]
        if not wrong:
            return Judged("Every clause is true.", digits(values), solved=True)
        named = ", ".join(map(str, wrong[:_MOST_NAMED])) + (", ..." if len(wrong) > _MOST_NAMED else "")
        return Judged(f"{len(wrong)} of {len(formula)} clauses are false: {named}.", digits(values))


def difficulty(n: int, k: int, l: int) -> float:  # noqa: E741 - the letters of the formula
    """Difficulty D(n, k, l) = log2 k + 2 log2 l - n + k / n of `n` literals per clause, `k` variables, `l` clauses."""
    return math.log2(k) + 2 * math.log2(l) - n + k / n


def words(clause: Clause) -> str:
    """A clause in words."""
    return " or ".join(f"{'not ' if x < 0 else ''}x{abs(x)}" for x in clause)


def digits(values: Sequence[bool]) -> str:
    """Truth values as digits."""
    return "".join("01"[value] for value in values)


def satisfied(clause: Clause, values: Sequence[bool]) -> bool:
    """True if truth values, of variable 1 first, satisfy a clause."""
    return any(values[abs(x) - 1] == (x > 0) for x in clause)


def read_values(text: str, n: int) -> list[bool] | None:
    """Read `n` truth values, or None.

    Understood are digits, with or without something between them, words of truth in a row, and pairs such as
    `x1 = true` that name each variable once.
    """
    if len(text) > _LONGEST:
        return None
    text = text.lower()
    pairs = _PAIR.findall(text)
    if pairs:
        named = sorted((int(x), _VALUES[value]) for x, value in pairs if len(x) < 4)
        return [value for _, value in named] if [x for x, _ in named] == list(range(1, n + 1)) else None
    row = re.sub(r"[\s,;.()\[\]{}\"'`*]+", " ", text).split()
    if len(row) == 1 and re.fullmatch("[01]+", row[0]):
        row = list(row[0])
    if len(row) != n or not all(word in _VALUES for word in row):
        return None
    return [_VALUES[word] for word in row]


def solve(formula: Sequence[Clause], n: int) -> list[bool] | None:
    """Find truth values of `n` variables that satisfy a formula, or None: Davis, Putnam, Logemann and Loveland.

    A clause with one literal left decides its variable; where there is none, the commonest variable is tried out.
    """
    known = _search([frozenset(clause) for clause in formula])
    return None if known is None else [x in known for x in range(1, n + 1)]


def _search(clauses: list[frozenset[int]]) -> frozenset[int] | None:
    """Literals that satisfy all clauses."""
    if not clauses:
        return frozenset()
    if frozenset() in clauses:
        return None
    unit = next((next(iter(clause)) for clause in clauses if len(clause) == 1), None)
    counts: dict[int, int] = {}
    for clause in clauses:
        for x in clause:
            counts[x] = counts.get(x, 0) + 1
    commonest = max(sorted(counts), key=lambda x: counts[x])
    for x in (unit,) if unit is not None else (commonest, -commonest):
        rest = _search([clause - {-x} for clause in clauses if x not in clause])
        if rest is not None:
            return rest | {x}
    return None
