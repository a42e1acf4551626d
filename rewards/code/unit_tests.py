"""A reward for programs: the share of hidden tests that they pass."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from rewards.answers.text import last_reply
from rewards.code.edits import edited
from rewards.code.sandboxed_reward import Sandboxed, program_of
from rewards.sandbox import given_tests, values
from rewards.sandbox.asserts import Assertion, parse
from rewards.sandbox.calls import NO_TIME, FunctionCall, Returned, call_all, program_s
from rewards.sandbox.harness import PROGRAM
from rewards.sandbox.level import Isolation
from rewards.sandbox.run import ExitReason, Finished, Sandbox, run
from rlhf.data import Task, Trajectory, Verdict
from rlhf.errors import RewardError, nearest
from rlhf.settings import STRICT

#: Programs of one answer that are started at a time; the sandbox queues those of all answers.
_AT_A_TIME = 4
_TEXTS = ("program", "tests", "entry_point", "preamble", "solution")
_KINDS = ("cases", "calls", "asserts", "files", *_TEXTS)
_ADD = '{"asserts": ["assert add(1, 2) == 3"], "calls": [{"call": "add", "args": [2, 2], "returns": 4}]}'
_CHECK = '{"tests": "def check(f):\\n    for i in range(3):\\n        assert f(i) == 2 * i", "entry_point": "double"}'
_DOUBLE = '{"cases": [{"stdin": "4\\n", "stdout": "8\\n"}]}'


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UnitTests(Sandboxed):
    r"""Share of a task's unit tests that a program passes, or 1 only for all of them.

    The program is the last Python block of the last reply; an answer without one earns 0. The tests are in the task's
    reference, which is JSON with one or more of

    - `cases`: what the program prints for an input, `{"stdin": "4\n", "stdout": "8\n"}`. It has to end with exit code
      0; white space at the end of a line and empty lines at the end do not matter.
    - `calls`: what a function returns, `{"call": "add", "args": [2, 2], "returns": 4}`; tuples count as lists.
    - `asserts`: a list of assertions such as `assert add(1, 2) == 3`, or a text with one on each line. They have to be
      made of calls of the program, plain values, comparisons, and a few functions of Python's own.
    - `tests`: any Python text with assertions, as HumanEval and MBPP have it; with `entry_point`, the function that its
      `check(candidate)` is given, or with functions `test_...`, as pytest has them. It runs in a sandbox of its own
      and sees plain values of the program alone.

    `preamble` is put before the program, such as imports that the question shows; `solution`, for demonstrations, is a
    program that is right. With `files`, a text for each path, the task is a repository to mend: the answer edits its
    files (`rewards.code.edits`), and `program` is what the tests run or call, such as `from shop.cart import total`.

    Tests are never in reach of the program: it gets inputs and arguments, what it prints and returns comes out as text,
    and is compared outside. A test that ends the process is failed, by an exit, a crash or a limit; so are all of them
    where the program ends by itself before the first. Of 4 tests of which 3 are passed: 0.75, and 0 with `score: all`.
    """

    score: Literal["all", "share"] = "all"
    """`all` is 1 for a program that passes every test and else 0; `share` is the share of tests passed."""

    needs_reference: ClassVar[bool] = True
    examples: ClassVar[Sequence[tuple[str, str]]] = (
        ("```python\ndef add(a, b):\n    return a + b\n```", _ADD),
        ("```python\ndef double(x):\n    return 2 * x\n```", _CHECK),
        ("So:\n```python\nprint(2 * int(input()))\n```", _DOUBLE),
    )

    async def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Judge the last reply. Raises RewardError where the reference holds no tests, or the sandbox fails."""
        where = f"unit_tests, task {task.id}"
        tests = _tests(task.reference, where)
        if not trajectory.turns:
            return Verdict(0.0, why="no action")
        reply = last_reply(trajectory)
        held, refused = edited(tests.files, reply) if tests.files else ({}, "")
        program = tests.program if tests.files else program_of(reply)
        if refused or program is None:
            return Verdict(0.0, why=refused or "no Python block")
        files = {path: text.encode(errors="replace") for path, text in held.items()}
        program = f"{tests.preamble}\n\n{program}" if tests.preamble else program
        isolation = await asyncio.to_thread(self.isolation, where)
        wrong, n = await self._wrong(program, files, tests, isolation), tests.n
        if tests.given is not None and not (self.score == "all" and any(wrong)):
            stop_early = self.score == "all"
            found = await given_tests.failures(
                tests.given, program, self.bounds, isolation, where, files=files, stop_early=stop_early
            )
            wrong, n = wrong + found, n + len(found)
        n_passed = sum(not why for why in wrong)
        value = n_passed / n if self.score == "share" else float(n_passed == n)
        first = next((why for why in wrong if why), "")
        if self.score == "all":
            return Verdict(value, why=f"a test failed: {first}" if first else f"all {n} tests passed")
        return Verdict(value, why=f"{n_passed} of {n} tests passed" + (f"; failed: {first}" if first else ""))

    async def _wrong(
        self, program: str, files: Mapping[str, bytes], tests: _Tests, isolation: Isolation | Sandbox
    ) -> list[str]:
        """Failure of each test that was looked at, or an empty text; `all` stops at the first failure."""
        wrong: list[str] = []
        for begin in range(0, len(tests.cases), _AT_A_TIME):
            some = tests.cases[begin : begin + _AT_A_TIME]
            wrong += await asyncio.gather(*(self._case(program, files, case, isolation) for case in some))
            if self.score == "all" and any(wrong):
                return wrong
        calls = [call for test in tests.functions for call in test.calls]
        if calls:
            stop_early = self.score == "all"
            returned = await call_all(program, calls, self.bounds, isolation, files=files, stop_early=stop_early)
            wrong += await _compared(tests.functions, returned)
        return wrong

    async def _case(
        self, program: str, files: Mapping[str, bytes], case: tuple[str, str], isolation: Isolation | Sandbox
    ) -> str:
        typed, expected = case
        left_s = program_s(self.wall_s)
        if not left_s:
            return f"input {typed[:80]!r}: {NO_TIME}"
        bounds = replace(self.bounds, wall_s=left_s)
        files = {**files, PROGRAM: program.encode(errors="replace")}
        finished = await run(("python", PROGRAM), stdin=typed.encode(), files=files, bounds=bounds, isolation=isolation)
        return _why(finished, typed, expected)


async def _compared(tests: Sequence[_Returns | Assertion], returned: Sequence[Returned]) -> list[str]:
    """Return for each test why it is failed, or an empty text."""
    wrong, open_tests, rest = [], {}, list(returned)
    for i, test in enumerate(tests):
        mine, rest = rest[: len(test.calls)], rest[len(test.calls) :]
        wrong.append(next((one.wrong for one in mine if one.wrong), ""))
        if not wrong[i]:
            kind, wanted = ("returns", test.expected) if isinstance(test, _Returns) else ("assert", test.text)
            open_tests[i] = (kind, wanted, [one.coded for one in mine])
    found = await values.compare(list(open_tests.values())) if open_tests else []
    for i, why in zip(open_tests, found or ["returned what takes too long to compare"] * len(open_tests), strict=True):
        wrong[i] = why
    return [f"{test.text}: {why}" if why else "" for test, why in zip(tests, wrong, strict=True)]


@dataclass(frozen=True)
class _Returns:
    """A call that is to return a value."""

    text: str
    calls: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True)
class _Tests:
    """Tests in the reference of a task."""

    cases: tuple[tuple[str, str], ...]
    functions: tuple[Any, ...]
    files: Mapping[str, str]
    program: str
    given: given_tests.GivenTests | None
    preamble: str

    @property
    def n(self) -> int:
        return len(self.cases) + len(self.functions)


@lru_cache(maxsize=1024)
def _tests(reference: str | None, where: str) -> _Tests:
    given = _object(reference, where)
    asserts = given.get("asserts", [])
    text = asserts if isinstance(asserts, str) else "\n".join(map(str, asserts))
    cases = tuple(_case_of(case, where) for case in given.get("cases", ()))
    functions: list[_Returns | Assertion] = [_call_of(call, where) for call in given.get("calls", ())]
    functions += parse(text, where)
    for name in _TEXTS:
        if not isinstance(given.get(name, ""), str):
            raise _no_tests(f"{where}, {name}", repr(given[name])[:200], "write it as one text")
    own = given_tests.names_like_own(given.get("solution", ""))
    tests = given_tests.GivenTests(given["tests"], given.get("entry_point", ""), own) if given.get("tests") else None
    if tests is not None:
        given_tests.refuse_unusable(tests, where)
    if not cases and not functions and tests is None:
        raise _no_tests(where, repr(reference)[:200])
    files, program = given.get("files", {}), given.get("program", "")
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise _no_tests(f"{where}, files", repr(files)[:200])
    if bool(files) != bool(program):
        raise _no_tests(where, "files without program" if files else "program without files")
    return _Tests(cases, tuple(functions), files, program, tests, given.get("preamble", ""))


def _object(reference: str | None, where: str) -> dict[str, Any]:
    """The object of a reference, without nulls; its keys are known."""
    try:
        given = json.loads(reference or "")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not given:
        raise _no_tests(where, repr(reference)[:200])
    for name in given:
        if name not in _KINDS:
            raise _no_tests(where, name, nearest(name, _KINDS))
    given = without_nulls(given)
    for name in ("cases", "calls", "asserts"):
        if not isinstance(given.get(name, []), list) and not (name == "asserts" and isinstance(given[name], str)):
            raise _no_tests(f"{where}, {name}", repr(given[name])[:200], "write it as a list")
    return given


def without_nulls(tests: dict[str, Any]) -> dict[str, Any]:
    """Tests without the keys that a table of objects fills with null where a row lacks them; `returns` may be null."""
    made = {key: value for key, value in tests.items() if value is not None}
    if isinstance(files := made.get("files"), dict):
        made["files"] = {path: text for path, text in files.items() if text is not None}
    if isinstance(calls := made.get("calls"), list):
        made["calls"] = [_call_without_nulls(call) if isinstance(call, dict) else call for call in calls]
    return made


def _call_without_nulls(call: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call.items() if value is not None or key == "returns"}


def refuse_unusable(reference: str, where: str) -> None:
    """Raise RewardError, about the place `where`, if a reference holds no tests that can be run."""
    _tests(reference, where)


def solution_of(reference: str | None) -> str | None:
    r"""Reply that solves a programming task, by the `solution` in its reference; None where there is none.

    >>> solution_of('{"tests": "assert one() == 1", "solution": "def one(): return 1"}')
    '```python\ndef one(): return 1\n```'
    """
    try:
        given = json.loads(reference or "")
        program = given.get("solution") if isinstance(given, dict) else None
    except (ValueError, RecursionError):
        return None
    return f"```python\n{program.strip()}\n```" if isinstance(program, str) and program.strip() else None


def _case_of(case: Any, where: str) -> tuple[str, str]:
    typed = isinstance(case, dict) and set(case) == {"stdin", "stdout"}
    if not typed or not all(isinstance(text, str) for text in case.values()):
        raise _no_tests(f"{where}, cases", repr(case)[:200])
    return case["stdin"], case["stdout"]


def _call_of(call: Any, where: str) -> _Returns:
    known = isinstance(call, dict) and {"call", "returns"} <= set(call) <= {"call", "args", "kwargs", "returns"}
    args, kwargs = (call.get("args", []), call.get("kwargs", {})) if known else (None, None)
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not isinstance(call["call"], str):
        raise _no_tests(f"{where}, calls", repr(call)[:200])
    made = FunctionCall(call["call"], tuple(args), kwargs)
    return _Returns(str(made), (made,), call["returns"])


def _why(finished: Finished, typed: str, expected: str) -> str:
    """Return why a case is failed, or an empty text."""
    if not finished.ok:
        last = finished.stderr.decode(errors="replace").rstrip().rpartition("\n")[2][:200]
        said = (
            f"{finished.ending}: {last}" if finished.ending is ExitReason.WRONG_EXIT and last else str(finished.ending)
        )
    else:
        printed = finished.stdout.decode(errors="replace")
        if _lines(printed) == _lines(expected):
            return ""
        said = f"printed {printed[:80]!r}"
    return f"input {typed[:80]!r}: {said}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _no_tests(where: str, got: str, hint: str = "") -> RewardError:
    return RewardError(
        "the task's reference holds no tests that can be run",
        where=where,
        got=got,
        expected='JSON such as {"asserts": ["assert add(1, 2) == 3"]}, with cases, calls, asserts or tests',
        hint=hint or "see docs/sandbox.md for the four forms",
    )
