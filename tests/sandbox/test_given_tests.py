"""Tests that come as a Python text: forms of public data, values that depend on one another, and no way to cheat."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rewards.check import check_reward
from rewards.code.unit_tests import UnitTests, solution_of
from rlhf.data import Action, Outcome, Task, Trajectory, Turn, Verdict
from rlhf.errors import RewardError
from tests.sandbox.test_unit_tests import ATTACKS

ROUND_TRIP = """
import random

def check(candidate):
    for _ in range(20):
        text = "".join(random.choice("abc") for _ in range(9))
        coded = turn(text)
        assert candidate(coded) == text, "comes back"
    assert candidate("") == ""
    assert True
"""
TURN = "def turn(text):\n    return text[1:] + text[:1]\n"
BACK = "def back(text):\n    return text[-1:] + text[:-1]\n"


def judge(program: str, tests: str, score: str = "all", **keys: Any) -> Verdict:
    task = Task("t", reference=json.dumps({"tests": tests, **keys}))
    turns = (Turn(Action(f"```python\n{program}\n```"), ""),)
    reward = UnitTests(cpu_s=2.0, wall_s=6.0, memory_mb=256, score=score)  # type: ignore[arg-type]
    return asyncio.run(reward(task, Trajectory("t", 0, "", turns, Outcome.FAILED)))


def test_a_check_with_a_loop_and_calls_that_depend_on_others_counts_each_assertion() -> None:
    right = judge(TURN + BACK, ROUND_TRIP, "share", entry_point="back")
    assert right == Verdict(1.0, why="21 of 21 tests passed")  # 20 texts and the empty one; `assert True` tests nothing
    # what changes nothing is right of the empty text, and of turned texts that are the same as before: none of these
    wrong = judge(TURN + "def back(text):\n    return text\n", ROUND_TRIP, "share", entry_point="back")
    assert wrong.value == pytest.approx(1 / 21) and "candidate(coded) == text: returned" in wrong.why


def test_assertions_alone_name_their_functions_and_need_imports_of_their_own() -> None:
    tests = "import math\nassert math.isclose(half(3), 1.5)\nassert set(parts('ab')) == {'a', 'b'}"
    program = "def half(x):\n    return x / 2\ndef parts(text):\n    return list(text)"
    assert judge(program, tests).value == 1
    assert judge(f"import math\n{program}", tests.removeprefix("import math\n")).value == 1  # by the program's import
    found = judge(program.replace("x / 2", "x // 2"), tests, "share")
    assert found.value == 0.5 and "math.isclose(half(3), 1.5): returned 1" in found.why


HALF = "def half(x):\n    return x / 2"


@pytest.mark.parametrize(
    "tests",
    ["x = half(3)\nassert x == 1.5", "def check(candidate):\n    x = candidate(3)\n    y = x + 1\n    assert y == 2.5"],
)
def test_a_result_that_is_kept_before_its_assertion_counts(tests: str) -> None:
    assert judge(HALF, tests, entry_point="half") == Verdict(1.0, why="all 1 tests passed")
    wrong = judge(HALF.replace("/", "//"), tests, entry_point="half")
    assert wrong.value == 0 and "returned 1" in wrong.why


def test_kept_results_count_as_much_when_they_are_right_as_when_they_are_wrong() -> None:
    tests = "r = f(1)\nassert r == 1\nr = f(2)\nassert r == 2\nassert f(3) == 4"
    found = judge("def f(x):\n    return x", tests, "share")
    assert found == Verdict(2 / 3, why="2 of 3 tests passed; failed: f(3) == 4: returned 3")


PYTEST = """
import math

def test_half():
    assert half(3) == 1.5
    assert half(4) == 2

def test_of_nothing(x=0):
    assert half(x) == 0

def test_close():
    assert math.isclose(half(1), 0.5)

def test_fixture(tmp_path):
    assert half(tmp_path)
"""


@pytest.mark.parametrize(
    ("call", "n"), [("", 3), ("\nif __name__ == '__main__':\n    test_half()\n", 3), ("\ntest_half()\n", 4)]
)
def test_functions_of_the_form_of_pytest_are_called_once_and_one_test_each(call: str, n: int) -> None:
    assert judge(HALF, PYTEST + call, "share") == Verdict(1.0, why=f"{n} of {n} tests passed")
    fails_at_0 = "def half(x):\n    return x // 2 if x else 1 / x"
    found = judge(fails_at_0, PYTEST + call, "share")  # an exception fails one test, and the next function is called
    assert found.value == (n - 3) / n and "half(3) == 1.5: returned 1" in found.why
    kept = judge(
        fails_at_0, "def test_a():\n    x = half(0)\n    assert x == 0\ndef test_b():\n    assert half(4) == 2", "share"
    )
    assert kept == Verdict(0.5, why="1 of 2 tests passed; failed: test_a: ZeroDivisionError: division by zero")


def test_a_program_that_raises_fails_no_fewer_tests_than_one_that_is_wrong() -> None:
    squares = "assert f(0) == 0\nfor i in range(1, 9):\n    r = f(i)\n    assert r == i * i"
    loop = "for i in range(1, 9):\n        r = f(i)\n        assert r == i * i"
    parts = f"def test_a():\n    assert f(0) == 0\ndef test_b():\n    {loop}"
    wrong = "def f(x):\n    return x"
    raises = "def f(x):\n    if x > 1:\n        raise ValueError\n    return x"
    assert judge(wrong, squares, "share").value == 2 / 9 > judge(raises, squares, "share").value == 0
    assert judge(wrong, parts, "share").value == judge(raises, parts, "share").value == 0.5


@pytest.mark.parametrize(
    "expected", ["all(map(lambda i: add(i, i) == 9, range(3)))", "list(map(add, (1,), (2,))) == []"]
)
@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration"])
def test_no_program_ends_an_iteration_of_the_tests(error: str, expected: str) -> None:
    found = judge(f"def add(a, b):\n    raise {error}", f"assert {expected}", "share")
    assert found.value == 0 and f"{expected}: {error}" in found.why


def test_a_preamble_is_there_for_the_program_and_for_functions_that_the_tests_name() -> None:
    assert judge(BACK, ROUND_TRIP, entry_point="back", preamble=f"from typing import List\n{TURN}").value == 1
    program = "def one(x):\n    return floor(x) - 6"
    assert "NameError" in judge(program, "assert one(7.5) == 1").why
    assert judge(program, "assert one(7.5) == 1", preamble="from math import floor").value == 1


def test_a_function_with_the_name_of_one_of_pythons_own_is_meant_where_the_solution_has_it() -> None:
    program = "def sum(a, b):\n    return a + b\n"
    assert judge(program, "assert sum(1, 2) == 3", solution=program).value == 1
    with pytest.raises(RewardError, match="ask for nothing of the program"):  # the solution alone says what is its own
        judge(program, "assert sum(1, 2) == 3")
    cheat = "def sorted(x):\n    return [7]\ndef parts():\n    return [7, 8]"
    assert judge(cheat, "assert sorted(parts()) == [7]", solution="def parts():\n    return [7]").value == 0


def test_an_expected_exception_is_seen_and_what_is_no_value_fails() -> None:
    tests = "try:\n    root(-1)\n    assert root(-1) is None\nexcept ValueError:\n    pass\nassert root(4) == 2"
    program = "def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5"
    assert judge(program, tests, "share") == Verdict(1.0, why="1 of 1 tests passed")
    careless = program.replace("if x < 0", "if False").replace("** 0.5", "")
    assert judge(careless, tests).value == 0
    tree = "root = Node(1)\nroot.left = Node(2)\nassert depth(root) == 2"
    assert "Node is not a plain value" in judge("class Node:\n    def __init__(self, x):\n        self.x = x", tree).why
    assert "not a plain value" in judge("def made():\n    return object()", "assert made() == 1").why


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_no_program_judges_itself(name: str) -> None:
    tests = "def check(candidate):\n    for i in (1, 2):\n        assert candidate(i, 2) == i + 2, 'sum'"
    verdict = judge(ATTACKS[name], tests, "share", entry_point="add")
    assert verdict.value == 0, verdict.why


def test_the_tests_are_not_where_the_program_is() -> None:
    looks = "import os\ndef held():\n    return sorted(os.listdir('.'))"
    assert judge(looks, "assert held() == ['_rlhf_harness.py', '_rlhf_program.py']").value == 1


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"tests": "assert ("}, "no Python"),
        ({"tests": "x = 1"}, "assert nothing"),
        ({"tests": "def check(candidate):\n    assert candidate(1)"}, "nothing names"),
        ({"tests": "import nothing_of_that_name\nassert f(1)"}, "fail by themselves"),
        ({"tests": "if __name__ == '__main__':\n    assert f(1) == 1"}, "reach no assertion"),
        ({"tests": "def test_f(x):\n    assert f(x) == x"}, "reach no assertion"),
        ({"tests": "class TestF:\n    def test_f(self):\n        assert f(1) == 1"}, "reach no assertion"),
        ({"tests": "f = lambda x: x\nassert f(1) == 1"}, "ask for nothing of the program"),
        ({"tests": "def test_f():\n    assert nothing.of.that.name(1)\nnothing = 1"}, "ask for nothing of the program"),
        ({"tests": ["assert f(1)"]}, "no tests that can be run"),
        ({"test": "assert f(1)"}, "did you mean 'tests'"),
    ],
)
def test_tests_that_cannot_be_run_are_an_error_and_no_zero(keys: dict[str, Any], says: str) -> None:
    task = Task("t", reference=json.dumps(keys))
    played = Trajectory("t", 0, "", (Turn(Action("```python\ndef f(x):\n    return x\n```"), ""),), Outcome.FAILED)
    with pytest.raises(RewardError, match=says):
        asyncio.run(UnitTests()(task, played))


def test_values_that_depend_on_one_another_without_end_are_given_up() -> None:
    tests = "x = 0\nfor _ in range(40):\n    x = next_of(x) + 0\nassert x == 40"
    verdict = judge("def next_of(x):\n    return x + 1", tests)
    assert verdict.value == 0 and "more than 12 times" in verdict.why


def test_the_examples_of_the_reward_pass_and_a_solution_is_a_reply() -> None:
    report = check_reward(UnitTests())
    assert report.ok, str(report)
    assert solution_of('{"solution": " x = 1\\n"}') == "```python\nx = 1\n```"
    assert all(solution_of(text) is None for text in (None, "7", "[", '{"tests": "x"}', '{"solution": " "}'))


@pytest.mark.parametrize(
    "tests",
    [
        "from solution import half\n\ndef test_half():\n    assert half(3) == 1.5",
        "from solution import half as h\nassert h(3) == 1.5",
        "from solution import *\nassert half(3) == 1.5",
        "import solution\nassert solution.half(3) == 1.5",
        "def test_half():\n    from solution import half\n    assert half(3) == 1.5",
    ],
)
def test_tests_may_import_the_program_as_solution(tests: str) -> None:
    assert judge(HALF, tests) == Verdict(1.0, why="all 1 tests passed")
    assert judge(HALF.replace("/", "//"), tests).value == 0
