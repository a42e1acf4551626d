"""Software repair: a small module with one mutated line, tests that fail, and edits until they pass.

    Test failed: clamp(5, 0, 3) returned 5, expected 3.
    1: def clamp(x, low, high):
    2:     return max(low, max(x, high))
    > replace 2: return max(low, min(x, high))
    > submit

Modules are drawn from the functions below, and a mutant of one of them by its syntax tree; a mutant that passes all
tests is none. What the policy writes runs in the sandbox alone. After SWE-smith, arXiv 2504.21798, in the small;
rewards that compare patches (`patch_similarity`, SWE-RL) are for data sets of real repositories, which no registry has.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult
from environments.core.procedural import Attempt, Drawn, digest, word_of
from rewards.sandbox import values
from rewards.sandbox.calls import FunctionCall, call_all
from rewards.sandbox.run import Bounds
from rlhf.data import Task
from rlhf.settings import STRICT

#: Functions in the normal form of `ast.unparse`; none has a loop without an end.
_SOURCE = """\
def clamp(x, low, high):
    return max(low, min(x, high))

def is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)

def mean(xs):
    if not xs:
        return 0
    return sum(xs) / len(xs)

def count_above(xs, limit):
    n = 0
    for x in xs:
        if x > limit:
            n += 1
    return n

def is_sorted(xs):
    for i in range(len(xs) - 1):
        if xs[i] > xs[i + 1]:
            return False
    return True

def vowels(text):
    return sum(1 for c in text.lower() if c in 'aeiou')

def discount(price, n):
    if n >= 10:
        return price * n * 8 // 10
    return price * n

def digits(n):
    total = 0
    for c in str(n):
        total += int(c)
    return total

def common(a, b):
    return [x for x in a if x in b and x > 0]

def seconds(h, m, s):
    return h * 3600 + m * 60 + s

def runs(text):
    n = 0
    for i in range(len(text)):
        if i == 0 or text[i] != text[i - 1]:
            n += 1
    return n

def grade(points):
    if points >= 90:
        return 'A'
    if points >= 75:
        return 'B'
    return 'C'
"""
#: Arguments to call each with.
_ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "clamp": ((5, 0, 3), (-1, 0, 3), (2, 0, 3)),
    "is_leap": ((2000,), (1900,), (2024,), (2023,)),
    "mean": (([],), ([1, 2],), ([4],)),
    "count_above": (([1, 2, 3], 2), ([1, 5, 9], 1), ([], 0)),
    "is_sorted": (([1, 2, 2],), ([3, 1],), ([1, 3, 2],), ([],)),
    "vowels": (("Apple",), ("",), ("rhythm",)),
    "discount": ((5, 10), (5, 9), (2, 20)),
    "digits": ((123,), (0,), (99,)),
    "common": (([1, 2, 3], [2, 3]), ([0, 1], [0]), ([], [1])),
    "seconds": ((1, 1, 1), (0, 2, 5), (2, 0, 0)),
    "runs": (("aabba",), ("",), ("abc",)),
    "grade": ((90,), (89,), (75,), (10,)),
}
_LIBRARY: Mapping[str, tuple[str, tuple[tuple[Any, ...], ...]]] = {
    node.name: (ast.unparse(node), _ARGUMENTS[node.name])
    for node in ast.parse(_SOURCE).body
    if isinstance(node, ast.FunctionDef)
}
_SWAPPED: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.In: ast.NotIn,
}  # fmt: skip
_OTHER_NAME = {"min": "max", "max": "min"}
_REPLACE = re.compile(r"^replace (\d{1,3})\s*:\s*(.*)$", re.DOTALL | re.IGNORECASE)
_UNKNOWN = "Unknown action. Write 'replace N: the new line', 'test', or 'submit'."
_LONGEST = 200


@plain_dataclass(frozen=True)
class Bug:
    """A module with a bug.

    Attributes:
        lines: of the module.
        at: which of them is wrong, from 0.
        right: what it should be.
        calls: (function, its arguments, what it should return), of all functions.
        failing: number of a call that does not.
        got: what it returns or raises, as text.
    """

    lines: tuple[str, ...]
    at: int
    right: str
    calls: tuple[tuple[str, str, str], ...]
    failing: int
    got: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Repair(Drawn):
    """Mend a small Python module with one mutated line, by edits and tests; runs in the sandbox."""

    functions: Annotated[int, Field(ge=1, le=len(_LIBRARY))] = 2
    """Functions of a module."""
    max_steps: Annotated[int, Field(ge=2)] = 6
    """Edits, runs of the tests, and `submit` among them; what is not submitted counts for nothing."""
    cpu_s: Annotated[float, Field(gt=0, le=60)] = 4.0
    """Processor time of one run of the tests."""

    name: ClassVar[str] = "repair"

    @property
    def properties(self) -> Properties:
        """Properties: steps that run tests start a process, so they run in threads."""
        return replace(super().properties, inline=False)

    @property
    def level(self) -> str:
        """Level: number of functions of a module."""
        return str(self.functions)

    def draw(self, rng: random.Random) -> Bug:
        """Draw functions, and a mutant of one of them."""
        names = rng.sample(sorted(_LIBRARY), self.functions)
        wrong = names[rng.randrange(len(names))]
        mutant, failing, got = rng.choice(mutants(wrong))
        lines: list[str] = []
        at, right = 0, ""
        for name in names:
            source = _LIBRARY[name][0].splitlines()
            told = mutant.splitlines() if name == wrong else source
            if name == wrong:
                [line] = [i for i, (a, b) in enumerate(zip(source, told, strict=True)) if a != b]
                at, right = len(lines) + line, source[line]
            lines += told
        calls = [call for name in names for call in _calls(name)]
        first = next(i for i, (name, _, _) in enumerate(calls) if name == wrong)
        return Bug(tuple(lines), at, right, tuple(calls), first + failing, got)

    def told(self, instance: Bug) -> str:
        """The wrong line and the right one: no bug is in two splits, whatever stands around it."""
        return repr((instance.lines[instance.at], instance.right))

    def start(self, task: Task) -> RepairEpisode:
        """Begin one attempt at a task."""
        return RepairEpisode(self.instance(task), self)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Put every line right and submit; None where too few steps are left, or something was submitted."""
        bug: Bug = self.instance(task)
        lines, wanted = list(bug.lines), list(bug.lines)
        wanted[bug.at] = bug.right
        for action in taken:
            if word_of(action) == "submit":
                return () if lines == wanted else None
            lines = replaced(lines, action) or lines
        path = [
            f"replace {i}: {b.strip()}" for i, (a, b) in enumerate(zip(lines, wanted, strict=True), start=1) if a != b
        ]
        return (*path, "submit") if len(path) < self.max_steps - len(taken) else None


class RepairEpisode(Attempt):
    """One attempt: lines are replaced and tests run until the module is submitted."""

    def __init__(self, bug: Bug, settings: Repair) -> None:
        super().__init__(settings.max_steps)
        self._bug, self._settings, self._name = bug, settings, digest(repr(bug))
        self.lines = list(bug.lines)
        name, args, expected = bug.calls[bug.failing]
        failed = f"Test failed: {_call(name, args)} returned {bug.got}, expected {expected}."
        self.opening = self.opened(f"{failed}\n{self._shown()}\n{_UNKNOWN.partition('. ')[2]}")

    async def step(self, action: str) -> StepResult:
        """Do one action; the tests run before it is answered."""
        if not self.over and word_of(action) in ("test", "submit"):
            self._wrong = await self._tested()
        return self.act(action)

    _wrong: str = ""

    def do(self, action: str) -> tuple[str, bool]:
        """Replace a line, tell of the tests, or submit."""
        if word_of(action) == "submit":
            self.done, self.solved = True, not self._wrong
            self.score = float(self.solved)
            return self._wrong or "All tests pass.", True
        if word_of(action) == "test":
            return self._wrong or "All tests pass.", True
        made = replaced(self.lines, action.strip())
        if made is None:
            return _UNKNOWN, False
        self.lines = made
        return self._shown(), True

    async def _tested(self) -> str:
        """Return the first test that fails, or an empty text."""
        calls = [FunctionCall(name, ast.literal_eval(args)) for name, args, _ in self._bug.calls]
        bounds = Bounds(cpu_s=self._settings.cpu_s, wall_s=2 * self._settings.cpu_s)
        returned = await call_all("\n".join(self.lines), calls, bounds, stop_early=True)
        for (name, args, expected), one in zip(self._bug.calls, returned, strict=True):
            wanted = ast.literal_eval(expected)
            why = one.wrong or (await values.compare([("returns", wanted, [one.coded])]) or ["returned too much"])[0]
            if why:
                return f"Test failed: {_call(name, args)}: {why[:_LONGEST]}"
        return ""

    def _shown(self) -> str:
        return "\n".join(f"{i}: {line}" for i, line in enumerate(self.lines, start=1))

    def state(self) -> str:
        """Return the task, the module, and whether it is submitted."""
        return f"{self._name}/{digest(json.dumps(self.lines))}{'/submitted' if self.done else ''}"

    def possible(self) -> tuple[str, ...]:
        """Nothing can be listed: a line may be anything."""
        return ()


def _call(name: str, args: str) -> str:
    return f"{name}{args[:-2] + ')' if args.endswith(',)') else args}"


def replaced(lines: Sequence[str], action: str) -> list[str] | None:
    """The lines after `replace N: line`, N from 1, indented as before; None where it is no such action."""
    found = _REPLACE.match(action.strip())
    if found is None or not 1 <= int(found[1]) <= len(lines) or len(found[2]) > _LONGEST or "\n" in found[2]:
        return None
    old = lines[int(found[1]) - 1]
    new = old[: len(old) - len(old.lstrip())] + found[2].strip()
    return [new if i == int(found[1]) else line for i, line in enumerate(lines, start=1)]


@cache
def _calls(name: str) -> tuple[tuple[str, str, str], ...]:
    source, arguments = _LIBRARY[name]
    return tuple((name, repr(args), repr(_returned(source, name, args))) for args in arguments)


@cache
def mutants(name: str) -> tuple[tuple[str, int, str], ...]:
    """Mutants of a function: source, number of the test that fails, and its result."""
    source, tests = _LIBRARY[name]
    right = [_returned(source, name, args) for args in tests]
    found: dict[str, tuple[int, str]] = {}
    for mutant in _changed(source):
        lines = list(zip(source.splitlines(), mutant.splitlines(), strict=False))
        if sum(a != b for a, b in lines) != 1 or len(source.splitlines()) != len(mutant.splitlines()):
            continue
        got = [_returned(mutant, name, args) for args in tests]
        noticed = [i for i, (a, b) in enumerate(zip(right, got, strict=True)) if repr(a) != repr(b)]
        if noticed:
            found.setdefault(mutant, (noticed[0], repr(got[noticed[0]])[:_LONGEST]))
    return tuple((mutant, *told) for mutant, told in sorted(found.items()))


def _changed(source: str) -> Iterator[str]:
    """Yield the source with one operator, number or name changed."""
    tree = ast.parse(source)
    for place in range(sum(1 for _ in ast.walk(tree))):
        copy = deepcopy(tree)
        node = list(ast.walk(copy))[place]
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
            node.ops[0] = _SWAPPED[type(node.ops[0])]()  # type: ignore[call-overload]
        elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _SWAPPED:
            node.op = _SWAPPED[type(node.op)]()  # type: ignore[assignment]
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        elif isinstance(node, ast.Name) and node.id in _OTHER_NAME:
            node.id = _OTHER_NAME[node.id]
        else:
            continue
        yield ast.unparse(copy)


def _returned(source: str, name: str, args: tuple[Any, ...]) -> Any:
    """Result of a library function or mutant here; an error by its name."""
    scope: dict[str, Any] = {}
    exec(source, scope)  # nothing of it was written by a policy
    try:
        return scope[name](*deepcopy(args))
    except Exception as error:  # of a mutant: any
        return type(error).__name__
