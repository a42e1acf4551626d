"""Countdown: make a target out of given numbers with + - * / and parentheses.

    Numbers: 3, 7, 8, 12. Make 45 out of them with + - * / and parentheses; use each number exactly once.

An answer is read as Python reads an expression, as a tree of numbers and four operations, and its value is computed in
exact fractions; nothing of it is ever evaluated. The target is the value of an expression drawn by the seed, so each
task can be solved.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass as plain_dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.core.procedural import Attempts, DrawnQuestions, Judged, digest
from rlhf.settings import STRICT

_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
_OTHER_SIGNS = str.maketrans({"×": "*", "·": "*", "x": "*", "X": "*", "÷": "/", ":": "/", "−": "-", "–": "-"})
_LONGEST = 120


@plain_dataclass(frozen=True)
class Numbers:
    """Numbers in the order shown, a target, and an expression that makes it."""

    numbers: tuple[int, ...]
    target: int
    solution: str


@plain_dataclass(frozen=True)
class Value:
    """Value of an expression, or its error, and the numbers it uses."""

    value: Fraction | None
    numbers: tuple[int, ...]
    problem: str = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Countdown(DrawnQuestions):
    """Make a target out of numbers by arithmetic, in several attempts with feedback; pure Python."""

    numbers: Annotated[int, Field(ge=2, le=7)] = 4
    """Number of given numbers."""
    largest: Annotated[int, Field(ge=2, le=1000)] = 20
    """Largest number that may be given."""
    largest_target: Annotated[int, Field(ge=10, le=100_000)] = 100
    """Largest target; the smallest is 10, or the largest number where that is less."""
    use_all: bool = True
    """Require each number exactly once; else some may be left out."""
    max_steps: Annotated[int, Field(ge=1)] = 4
    """Attempts at one task."""

    name: ClassVar[str] = "countdown"

    @property
    def level(self) -> str:
        """Level: count and size of the numbers, and their use."""
        return f"{self.numbers}of{self.largest}to{self.largest_target}{'' if self.use_all else '-any'}"

    def draw(self, rng: random.Random) -> Numbers:
        """Draw numbers and a way to join them, until that makes a target in range."""
        while True:
            numbers = tuple(rng.randint(1, self.largest) for _ in range(self.numbers))
            parts = [(Fraction(number), str(number)) for number in numbers]
            while len(parts) > 1:
                (a, left), (b, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
                sign = rng.choice("+-*/" if b else "+-*")
                parts.append((_OPERATIONS[_SIGNS[sign]](a, b), f"({left} {sign} {right})"))
            value, text = parts[0]
            fits = value.denominator == 1 and min(10, self.largest) <= value <= self.largest_target
            if fits and value not in numbers:
                return Numbers(numbers, int(value), text[1:-1])

    def content(self, instance: Numbers) -> str:
        """Numbers in any order, and the target."""
        return f"{sorted(instance.numbers)}={instance.target}"

    def ask(self, instance: Numbers) -> Attempts:
        """Give the numbers and the target."""
        found = instance
        rule = "use each number exactly once" if self.use_all else "use each number at most once"
        question = (
            f"Numbers: {', '.join(map(str, found.numbers))}. Make {found.target} out of them with + - * / and "
            f"parentheses; {rule}.\nAnswer with an expression, such as (1 + 2) * 3."
        )
        return Attempts(
            question, lambda text: self._judge(found, text), name=self._name(found), max_steps=self.max_steps
        )

    def answer(self, instance: Numbers) -> str:
        """The expression that the target was made from."""
        return instance.solution

    def _name(self, found: Numbers) -> str:
        return f"countdown/{digest(repr((found.numbers, found.target, self.use_all)))}"

    def _judge(self, found: Numbers, text: str) -> Judged:
        worth = value_of(text, found.target)
        if worth is None:
            return Judged("Not an expression of numbers, + - * / and parentheses.", None)
        answer = f"{worth.value} of {sorted(worth.numbers)}"
        used, given = Counter(worth.numbers), Counter(found.numbers)
        if used - given:
            strange = next(iter(used - given))
            many = "is none of the numbers" if strange not in given else "is used more often than it is given"
            return Judged(f"{strange} {many}.", answer)
        if self.use_all and used != given:
            return Judged(f"{next(iter(given - used))} is not used as often as it is given.", answer)
        if worth.value is None:
            return Judged(f"{worth.problem}.", f"{worth.problem} of {sorted(worth.numbers)}")
        if worth.value == found.target:
            return Judged(f"{found.target} it is.", answer, solved=True)
        return Judged(f"That makes {worth.value}, not {found.target}.", answer)


_SIGNS: Mapping[str, type[ast.operator]] = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div}


def value_of(text: str, target: int | None = None) -> Value | None:
    """Read an expression and compute it; None where it is none.

    Other signs for the four operations are understood, and `= number` behind the expression is ignored where that is
    the target.
    """
    if len(text) > _LONGEST:
        return None
    text = text.strip().strip("`'\"*").translate(_OTHER_SIGNS).strip().rstrip(".")
    if target is not None:
        text = re.sub(rf"\s*=\s*{target}$", "", text)
    if not re.fullmatch(r"[0-9\s+\-*/()]+", text) or "**" in text or "//" in text:
        return None
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval").body
    except SyntaxError:
        return None
    numbers: list[int] = []
    try:
        value = _compute(tree, numbers)
    except ZeroDivisionError:
        return Value(None, tuple(numbers), "It divides by zero")
    return None if value is None else Value(value, tuple(numbers))


def _compute(node: ast.expr, numbers: list[int]) -> Fraction | None:
    """The value of a tree, its numbers noted down; None where something else is in it."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _compute(node.left, numbers), _compute(node.right, numbers)
        return None if left is None or right is None else _OPERATIONS[type(node.op)](left, right)
    return None
