"""Tests that are a Python text, such as HumanEval's and MBPP's, run apart from the program that they test.

The text runs in a sandbox of its own (`rewards.sandbox.tester`), where functions of the program are remote calls. The
program makes them in another, and the text is run again with their results: once where each assertion is of calls
with known arguments, once more for each call whose arguments depend on another one. Neither sees the other's code.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rewards.sandbox.calls import NO_TIME, FunctionCall, call_all, program_s
from rewards.sandbox.level import Isolation
from rewards.sandbox.run import Bounds, Sandbox, run
from rlhf.errors import RewardError

#: Times that the text is run: calls whose arguments depend on one another more often are given up.
_MOST_ROUNDS = 12
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class GivenTests:
    """Tests of a task, as a Python text.

    Attributes:
        text: assertions, and whatever they need; or a function `check(candidate)` that has them.
        entry_point: name of the function that `check` is given.
        own: names of Python's own functions that are functions of the program here, such as a `sum` to be written.
    """

    text: str
    entry_point: str = ""
    own: tuple[str, ...] = ()


def names_like_own(solution: str) -> tuple[str, ...]:
    """Functions of a right program that have the name of one of Python's own; the tests mean those of the program.

    >>> names_like_own("def sum(a, b): return a + b")
    ('sum',)
    """
    try:
        tree = ast.parse(solution)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return tuple(sorted(defined & set(dir(builtins))))


@dataclass(frozen=True)
class _Coded(FunctionCall):
    """Call whose arguments are coded already."""

    order: Mapping[str, Any] = field(default_factory=dict)

    def coded(self) -> dict[str, Any]:
        """The call as JSON."""
        return dict(self.order)

    def __str__(self) -> str:
        return self.name


def refuse_unusable(tests: GivenTests, where: str) -> None:
    """Raise RewardError for a text that is no Python, tests nothing, or tests what nothing names."""
    try:
        tree = ast.parse(tests.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unusable("the tests are no Python", where, f"{error}: {tests.text[:120]}") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise _unusable("the tests assert nothing", where, tests.text[:120])
    has_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    if has_check and not tests.entry_point and "check(" not in tests.text.partition("def check(")[2]:
        raise _unusable("the tests are of a function that nothing names", where, "check without entry_point")


async def failures(
    tests: GivenTests,
    program: str,
    bounds: Bounds,
    isolation: Isolation | Sandbox | None,
    where: str,
    *,
    files: Mapping[str, bytes] | None = None,
    stop_early: bool = False,
) -> list[str]:
    """Why each test fails, or an empty text where it holds: each assertion that was reached, each function `test_...`.

    All fail where the text ends before its end: a program that raises would leave out those that it fails.
    A call is made once, however many assertions have it: what a function returns may depend on its arguments alone.

    Args:
        tests: of the task.
        program: Python text that is tested.
        bounds: of each process.
        isolation: at which level, or in which sandbox.
        where: names the task, for errors.
        files: what the program's folder holds besides, by relative path.
        stop_early: ask no more of a program once a call has ended its process.

    Raises:
        RewardError: the tests fail by themselves or end, before the program was asked for anything.
        SandboxError: a process could not be run.
    """
    known: dict[str, tuple[Any, str]] = {}
    for _ in range(_MOST_ROUNDS):
        found, wrong = await _run_tester(tests, known, bounds, isolation)
        if found is None or (found["error"] and not found["calls"]):
            wrong = wrong or str(found and found["error"])
            if not known and wrong != NO_TIME:
                raise _unusable("the tests fail by themselves, without a program", where, wrong)
            why = f"the tests end: {wrong}"
            return [before or why for before in (*_read(found), why)]
        if not known and not found["calls"]:
            what = "the tests ask for nothing of the program" if found["events"] else "the tests reach no assertion"
            raise _unusable(what, where, next(filter(None, _read(found)), tests.text[:120]))
        if not found["calls"]:
            return _read(found) or ["the tests reach no assertion"]
        calls = [_Coded(str(order["name"]), order=order) for order in found["calls"]]
        answers = await call_all(program, calls, bounds, isolation, files=files, stop_early=stop_early)
        for call, said in zip(calls, answers, strict=True):
            known[json.dumps(call.order)] = (json.loads(said.coded) if not said.wrong else None, said.wrong)
    return [*_read(found), f"the tests ask for what depends on other calls more than {_MOST_ROUNDS} times"]


async def _run_tester(
    tests: GivenTests, known: Mapping[str, Any], bounds: Bounds, isolation: Isolation | Sandbox | None
) -> tuple[dict[str, Any] | None, str]:
    """Output of one run of the tests; None and the reason where it has none."""
    left_s = program_s(bounds.wall_s)
    if not left_s:
        return None, NO_TIME
    order = {"tests": tests.text, "entry_point": tests.entry_point, "own": tests.own, "known": known}
    finished = await run(
        ("python", "tester.py"),
        stdin=json.dumps(order).encode(),
        files=_code(),
        bounds=replace(bounds, wall_s=left_s),
        isolation=isolation,
    )
    if not finished.ok:
        last = finished.stderr.decode(errors="replace").rstrip().rpartition("\n")[2][:200]
        return None, f"{finished.ending}: {last}" if last else str(finished.ending)
    return json.loads(finished.stdout), ""


def _read(found: Mapping[str, Any] | None) -> list[str]:
    events: Sequence[Sequence[str]] = found["events"] if found else ()
    return [f"{text}: {why}" if why else "" for text, why in events]


@cache
def _code() -> dict[str, bytes]:
    return {name: (_HERE / name).read_bytes() for name in ("tester.py", "harness.py")}


def _unusable(what: str, where: str, got: str) -> RewardError:
    return RewardError(
        what,
        where=where,
        got=got,
        expected="assertions about functions of the program, or check(candidate) with them and an entry_point",
        hint="fix the tests, or take the task out; see docs/sandbox.md",
    )
