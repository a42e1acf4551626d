"""The reward by unit tests: what passes, what fails, and that no program is its own judge."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.check import check_reward
from rewards.code.unit_tests import UnitTests
from rewards.sandbox.asserts import parse
from rewards.sandbox.calls import FunctionCall, call_all
from rewards.sandbox.harness import decode, encode
from rewards.sandbox.probe import probe_isolation
from rewards.sandbox.run import Bounds
from rlhf.data import Action, Outcome, Task, Trajectory, Turn, Verdict
from rlhf.errors import RewardError
from rlhf.rollout.scoring import WeightedReward, score_group
from tests.blocked_loop import standing
from tests.sandbox.attacks import in_command_lines
from tests.tiers import tiered

BOUNDS = Bounds(cpu_s=2.0, wall_s=4.0, memory_mb=256)
ADD = {"asserts": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(a=2, b=2) == 4"]}
DOUBLE = {"cases": [{"stdin": f"{i}\n", "stdout": f"{2 * i}\n"} for i in range(4)]}


def judged_in_a_group(program: str, asserts: list[str]) -> Any:
    """The verdict of a reward under its usual time limit; awaited."""

    async def verdict() -> Verdict:
        task, reward = (
            Task("t", reference=json.dumps({"asserts": asserts})),
            WeightedReward("r", 1.0, UnitTests(score="share")),
        )
        group = await score_group(task, [attempt(0, program)], {"r": reward})
        return group.scores[0].parts["r"]

    return verdict()


def judge(program: str, tests: dict[str, Any], **keys: Any) -> Verdict:
    task = Task("t", reference=json.dumps(tests))
    turns = (Turn(Action(f"Here:\n```python\n{program}\n```\nDone."), ""),)
    reward = UnitTests(**{"cpu_s": 2.0, "wall_s": 4.0, "memory_mb": 256, **keys})
    return asyncio.run(reward(task, Trajectory("t", 0, "", turns, Outcome.FAILED)))


def test_a_right_program_earns_one_and_a_wrong_one_its_share() -> None:
    right = "def add(a, b):\n    return a + b"
    assert judge(right, ADD) == Verdict(1.0, why="all 3 tests passed")
    assert judge(right, {**ADD, "calls": None, "files": None, "preamble": None}).value == 1  # as tables write a row
    # |a| + |b| is right for (1, 2) and (2, 2), and 2 where 0 is wanted: 2 of 3
    close = "def add(a, b):\n    return abs(a) + abs(b)"
    assert judge(close, ADD, score="share").value == pytest.approx(2 / 3)
    verdict = judge(close, ADD)
    assert verdict.value == 0 and "add(-1, 1) == 0: returned 2" in verdict.why


def test_a_program_that_prints_is_judged_by_what_it_prints() -> None:
    assert judge("print(2 * int(input()))", DOUBLE).value == 1
    assert judge("print(2 * int(input()), ' \\n\\n')", DOUBLE).value == 1  # white space at ends
    # 2i = i² for 0 and 2 of 0 to 3
    assert judge("print(int(input()) ** 2)", DOUBLE, score="share").value == 0.5
    assert judge("print(2 * int(input()))\nraise SystemExit(1)", DOUBLE, score="share").value == 0


def test_calls_and_assertions_and_cases_count_alike() -> None:
    tests = {
        "cases": [{"stdin": "", "stdout": "loaded"}],
        "calls": [{"call": "pair", "args": [1], "kwargs": {"b": 2}, "returns": [1, 2]},
                  {"call": "Box().get", "returns": {"1": None}}],
        "asserts": "assert pair(1, 2) == (1, 2)\nassert pair(1, 2) != [1, 2]\nassert pair(*[1]) if False else True"
        if False else "assert pair(1, 2) == (1, 2)\nassert pair(1, 2) != [1, 2]",
    }  # fmt: skip
    program = (
        "print('loaded')\ndef pair(a, b):\n    return a, b\nclass Box:\n    def get(self):\n        return {1: None}"
    )
    assert judge(program, tests, score="share") == Verdict(1.0, why="5 of 5 tests passed")


@pytest.mark.parametrize("answer", ["", "def add(a, b): return a + b", "```python\n```", "```python\nprint(1)"])
def test_an_answer_without_a_block_runs_nothing(answer: str) -> None:
    task = Task("t", reference=json.dumps(ADD))
    played = Trajectory("t", 0, "", (Turn(Action(answer), ""),), Outcome.FAILED)
    assert asyncio.run(UnitTests()(task, played)) == Verdict(0.0, why="no Python block")
    assert asyncio.run(UnitTests()(task, Trajectory("t", 0, "", (), Outcome.FAILED))).why == "no action"


# --- attacks on the judge --------------------------------------------------------------------------------------------

RIGHT_BY_NAME = "def add(a, b):\n    return {value}\n"
ATTACKS = {
    "os._exit(0) before the tests": "import os\nos._exit(0)",
    "sys.exit before the tests": "import sys\nsys.exit(0)",
    "an exit within a test": "import os\ndef add(a, b):\n    os._exit(0)",
    "an exception that says it is right": "def add(a, b):\n    raise SystemExit(0)",
    "the end of an iteration": "def add(a, b):\n    raise StopIteration",
    "overriding __eq__": """
class Right:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    __lt__ = __gt__ = __le__ = __ge__ = __eq__
    def __hash__(self): return 3
def add(*given, **more):
    return Right()
""",
    "overriding __eq__ of a number": """
class Right(int):
    def __eq__(self, other): return True
    def __hash__(self): return 3
def add(*given, **more):
    return Right(7)
""",
    "overriding __eq__ in a list": """
class Right(list):
    def __eq__(self, other): return True
def add(*given, **more):
    return Right([7])
""",
    "functions of Python's own": """
import builtins, math
builtins.abs = builtins.sorted = builtins.len = lambda *given: 3
math.isclose = lambda *given: True
builtins.AssertionError = type("Right", (BaseException,), {})
def add(*given, **more):
    return 99
""",
    "forged lines": """
import gc, json, os, sys
said = [found["token"] for found in gc.get_objects() if isinstance(found, dict) and "token" in found]
tokens = said + [frame["order"]["token"] for frame in [sys._getframe(1).f_locals] if "order" in frame]
for token in tokens + ["", None]:
    for index in range(9):
        for fd in range(1, 9):
            for verdict in ({"value": True}, {"ok": True}, {"passed": 3}, True, {"value": {"passed": 3}}):
                try:
                    os.write(fd, json.dumps([token, index, verdict]).encode() + b"\\n")
                except OSError:
                    pass
os._exit(0)
""",
    "writing the answer into every file": """
import glob, os, sys
for path in glob.glob("**", recursive=True) + glob.glob("/work/**", recursive=True) + sys.argv:
    try:
        open(path, "w").write("print('all tests passed')")
    except OSError:
        pass
def add(*given, **more):
    return "all tests passed"
""",
    "another judge in place of ours": """
import json, sys
json.dumps = lambda *given, **more: '{"passed": true}'
sys.modules["__main__"].encode = lambda value: "True"
def add(*given, **more):
    return True
""",
    "a profiler that stops the judge": """
import os, sys
sys.settrace(lambda *given: os._exit(0))
sys.setprofile(lambda *given: os._exit(0))
def add(*given, **more):
    return 3
""",
}


@pytest.mark.parametrize("program", ATTACKS.values(), ids=ATTACKS)
def test_a_program_is_not_its_own_judge(program: str) -> None:
    """Not one of three tests is passed, and not one of four cases."""
    assert judge(program, ADD, score="share").value == 0
    assert judge(program, {"cases": DOUBLE["cases"][1:]}, score="share").value == 0


def test_expected_values_are_nowhere_inside() -> None:
    """The program looks through its files, its arguments and every object in memory."""
    program = """
import gc, glob, sys
def is_there(number):
    texts = [open(path, errors="replace").read() for path in glob.glob("*")] + sys.argv
    texts += [repr(found) for found in gc.get_objects() if found is not texts]
    return any(str(number) in text for text in texts)
def seen(given):
    return is_there(given)
def seen_more(given):
    return is_there(given + 1)
"""
    number = 918273645
    calls = [{"call": "seen", "args": [number], "returns": number}]
    assert "returned True" in judge(program, {"calls": calls}).why  # what it is given it sees
    asserts = [f"assert seen_more({number - 1}) == {number}"]
    assert "returned False" in judge(program, {"asserts": asserts}).why


def test_a_call_that_ends_the_process_costs_itself_alone() -> None:
    program = """
import os
def f(x):
    if x == 1: os._exit(0)
    if x == 2: raise ValueError("no")
    if x == 4: return f
    if x == 5: os.kill(os.getpid(), 9)
    return x
"""
    found = asyncio.run(call_all(program, [FunctionCall("f", (i,)) for i in range(7)], BOUNDS))
    assert [one.value for one in found] == [0, None, None, 3, None, None, 6]
    assert [bool(one.wrong) for one in found] == [False, True, True, False, True, True, False]
    assert found[2].wrong == "ValueError: no" and found[4].wrong == "TypeError: function is not a plain value"
    early = asyncio.run(call_all(program, [FunctionCall("f", (i,)) for i in range(7)], BOUNDS, stop_early=True))
    assert [one.value for one in early] == [0] + [None] * 6


def test_a_program_that_never_loads_is_tried_once() -> None:
    found = asyncio.run(call_all("import time\ntime.sleep(60)", [FunctionCall("f")] * 9, Bounds(cpu_s=1.0, wall_s=0.5)))
    assert [one.wrong for one in found] == ["wall_limit without an answer"] * 9


# --- values and assertions -------------------------------------------------------------------------------------------

NUMBERS = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text() | st.binary()
HASHABLE = SCALARS | st.tuples(SCALARS, SCALARS)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(HASHABLE)
        | st.frozensets(HASHABLE)
        | st.dictionaries(HASHABLE, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=50)
@given(PLAIN)
def test_plain_values_come_out_as_they_went_in(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)


CODED = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.just(10**400),
    lambda inner: (
        st.builds(
            lambda kind, rest: [kind, *rest],
            st.sampled_from(["list", "tuple", "dict", "set", "frozenset", "bytes", "complex", "call", "eval"]),
            st.lists(inner, max_size=3),
        )
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(max_examples=100)
@given(CODED)
def test_whatever_a_program_sends_is_a_plain_value_or_none(coded: Any) -> None:
    try:
        found = decode(coded)
    except (ValueError, TypeError, IndexError, OverflowError):
        return
    assert decode(json.loads(json.dumps(encode(found)))) == found


def test_what_is_sent_by_hand_is_a_value_like_any_other() -> None:
    """A program that finds the channel and the token can say what its functions return, which it can anyway."""
    program = """
import os, sys
judge = sys._getframe(1).f_locals
for i, value in enumerate(('7', VALUE, '9')):
    line = '["%s", %d, {"value": %s}]' % (judge["order"]["token"], i, value)
    os.write(judge["channel"], line.encode() + b"\\n")
os._exit(0)
"""
    for value in ('["complex", 1' + "0" * 400 + "]", "[" * 5000 + "]" * 5000, '["eval", "1"]', "1" * 5000, "{}"):
        found = asyncio.run(call_all(program.replace("VALUE", repr(value)), [FunctionCall("f")] * 3, BOUNDS))
        # The second is no value, so the first process has said one thing; the second one says it of the third call.
        assert [one.value for one in found] == [7, None, 7], value[:20]


@pytest.mark.parametrize(
    ("text", "calls", "values", "holds"),
    [
        ("assert f(1, x='a') == [1]", ["f(1, x=a)"], [[1]], True),
        ("assert f(1) == [1]", ["f(1)"], [(1,)], False),
        ("assert f(1)", ["f(1)"], [0], False),
        ("assert not f(1)", ["f(1)"], [""], True),
        ("assert f(1) is None", ["f(1)"], [None], True),
        ("assert f(1) is True", ["f(1)"], [1], False),
        ("assert 1 <= f(1) < 3", ["f(1)"], [3], False),
        ("assert abs(f(2) - 0.5) < 1e-6", ["f(2)"], [0.5000001], True),
        ("assert abs(f(2) - 0.5) < 1e-6", ["f(2)"], ["a"], False),
        ("assert math.isclose(f(2), 1/3, rel_tol=1e-9)", ["f(2)"], [1 / 3], True),
        ("assert sorted(f([3, 1])) == [1, 3] and len(f([3, 1])) == 2", ["f([3, 1])"] * 2, [[3, 1], [3, 1]], True),
        ("assert f(1)[0] == 'a' and f(1)[1:] == ['b']", ["f(1)"] * 2, [["a", "b"]] * 2, True),
        ("assert f(1)[5] == 'a'", ["f(1)"], [["a"]], False),
        ("assert set(f({1: (2, -3)})) == {1, 2}", ["f({1: (2, -3)})"], [[2, 1, 1]], True),
        ("assert Solution().add(1) in (2, 3)", ["Solution().add(1)"], [3], True),
        ("assert undo(do('x')) == 'x'", ["undo(do(x))"], ["x"], True),
        ("assert f(float('inf')) != f(2 * 3)", ["f(inf)", "f(6)"], [1, 1], False),
        ("assert f(1) * f(1) > 0", ["f(1)"] * 2, [10**9999, 10**9999], False),
        ("assert f(1) == {'a': [1.0, None]}, 'a message'", ["f(1)"], [{"a": [1, None]}], True),
    ],
)
def test_an_assertion_is_reckoned_outside(text: str, calls: list[str], values: list[Any], holds: bool) -> None:
    [assertion] = parse(text, "here")
    assert [str(call) for call in assertion.calls] == calls
    assert assertion.holds(values) is holds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("assert 1 == 1", "a call of the tested program"),
        ("assert sorted([2, 1]) == [1, 2]", "a call of the tested program"),
        ("x = f(1)\nassert x == 1", "an assertion"),
        ("assert f(x) == 1", "values, comparisons and calls"),
        ("assert [f(i) for i in range(3)] == [0]", "values, comparisons and calls"),
        ("assert (lambda: f(1))() == 1", "calls by name"),
        ("assert f(*[1]) == 1", "calls by name"),
        ("assert f(1).real == 1", "values, comparisons and calls"),
        ("assert f(1) ** 9 == 1", "values, comparisons and calls"),
        ("assert f(1 + g(1)) == 1", "calls as whole arguments"),
        ("assert f('a' + 'b') == 1", "arguments that are plain values"),
        ("assert f(", "invalid Python"),
    ],
)
def test_an_assertion_that_cannot_be_judged_outside_is_refused(text: str, says: str) -> None:
    with pytest.raises(RewardError) as caught:
        parse(text, "task 7")
    assert says in str(caught.value) and "task 7" in caught.value.where


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (None, "got:      None"),
        ("42", "holds no tests"),
        ("[]", "holds no tests"),
        ('{"asserts": []}', "holds no tests"),
        ('{"asserts": {"assert f()": 1}}', "write it as a list"),
        ('{"cases": 3}', "write it as a list"),
        ('{"calls": null, "asserts": null}', "holds no tests"),
        ('{"assert": ["assert f(1)"]}', "did you mean 'asserts'?"),
        ('{"cases": [{"stdin": "1"}]}', "cases"),
        ('{"calls": [{"call": "f"}]}', "calls"),
        ('{"calls": [{"call": "f", "args": 1, "returns": 2}]}', "calls"),
    ],
)
def test_a_reference_without_tests_is_an_error_and_no_zero(reference: str | None, says: str) -> None:
    played = Trajectory("t", 0, "", (Turn(Action("```python\nx\n```"), ""),), Outcome.FAILED)
    with pytest.raises(RewardError) as caught:
        asyncio.run(UnitTests()(Task("t", reference=reference), played))
    assert says in str(caught.value)


def test_the_checker_walks_the_reward_with_its_examples() -> None:
    report = check_reward(UnitTests())
    assert report.ok, str(report)
    assert any("full marks" in finding.promise for finding in report.findings)


def test_values_of_floats_are_those_of_python() -> None:
    [one] = asyncio.run(
        call_all("def f():\n    return [0.1 + 0.2, float('nan'), -0.0, 1e308 * 10]", [FunctionCall("f")], BOUNDS)
    )
    assert one.value[0] == 0.1 + 0.2 and math.isnan(one.value[1])
    assert math.copysign(1, one.value[2]) == -1 and one.value[3] == math.inf
    assert probe_isolation().isolation.level  # and it ran in a sandbox


def collides(n: int) -> str:
    """A program whose function gives a set of numbers of one hash, and a list of them."""
    return f"m = (1 << 61) - 1\nmany = [i * m for i in range({n})]\ndef odd():\n    return many\ndef f():\n    return 1"


@pytest.mark.extended
def test_what_takes_too_long_to_compare_fails_its_tests_and_stands_nobody_in_the_way() -> None:
    stood = standing(lambda: judged_in_a_group(collides(40_000), ["assert set(odd()) == {0}", "assert f() == 1"]))
    assert stood.result.value == 0 and "too long" in stood.result.why
    assert stood.longest_s < 1.0  # comparing it here would take ten


def test_what_takes_too_long_to_read_fails_its_tests_and_stands_nobody_in_the_way() -> None:
    program = """
import os, sys
def f():
    judge = sys._getframe(2).f_locals
    said = '["set"' + ''.join(', %d' % (i * ((1 << 61) - 1)) for i in range(30_000)) + ']'
    line = '["%s", 0, {"value": %s}]' % (judge["order"]["token"], said)
    os.write(judge["channel"], line.encode() + b"\\n")
    os._exit(0)
"""
    stood = standing(lambda: judged_in_a_group(program, ["assert f() == {0}"]))
    assert stood.result.value == 0 and "too long to read" in stood.result.why
    assert stood.longest_s < 1.0  # comparing it here would take ten


# --- within a group --------------------------------------------------------------------------------------------------


def attempt(i: int, program: str) -> Trajectory:
    return Trajectory("t", i, "", (Turn(Action(f"```python\n{program}\n```"), ""),), Outcome.FAILED)


def test_a_group_is_scored_all_attempts_at_a_time() -> None:
    programs = ["def add(a, b):\n    return a + b", "while True:\n    pass", "def add(a, b):\n    return a - b"]
    reward = WeightedReward("tests", 2.0, UnitTests(score="share", cpu_s=0.5, wall_s=4.0, memory_mb=256))
    task = Task("t", reference=json.dumps({"asserts": ["assert add(1, 2) == 3", "assert add(1, 0) == 1"]}))
    attempts = [attempt(i, program) for i, program in enumerate(programs)]
    group = asyncio.run(score_group(task, attempts, {"tests": reward}))
    # a − b is right for (1, 0) alone: half of the tests, at weight 2
    assert [score.total for score in group.scores] == [2.0, 0.0, 1.0]


def test_a_program_that_takes_all_of_a_rewards_time_is_wrong_and_ended() -> None:
    token = uuid.uuid4().hex
    program = (
        f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {token!r}])"
    )
    reward = WeightedReward("tests", 1.0, UnitTests(wall_s=60.0))
    task = Task("t", reference=json.dumps(ADD))
    group = asyncio.run(score_group(task, [attempt(0, program)], {"tests": reward}, timeout_s=5.0))
    assert not group.failures and [score.total for score in group.scores] == [0.0]
    deadline = time.monotonic() + 10
    while in_command_lines(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not in_command_lines(token)


@pytest.mark.parametrize("stops", tiered(["time.sleep(60)", "while True: pass"], "time.sleep(60)"))
def test_a_program_that_answers_one_call_and_sleeps_in_the_next_keeps_its_share(stops: str) -> None:
    """It would leave its group, and escape its low score, if that could cut the reward short."""
    program = f"import time\ndef add(a, b):\n    if a % 2 == 0:\n        {stops}\n    return a + b"
    reward = WeightedReward("tests", 1.0, UnitTests(score="share", cpu_s=9.0, wall_s=1.0))
    task = Task("t", reference=json.dumps({"asserts": [f"assert add({i}, 2) == {i + 2}" for i in range(1, 25)]}))
    right = "def add(a, b):\n    return a + b"
    attempts = [attempt(0, program), attempt(1, right), attempt(2, program), attempt(3, right)]
    group = asyncio.run(score_group(task, attempts, {"tests": reward}, timeout_s=5.0))
    assert not group.failures
    slow, quick = [group.scores[i].total for i in (0, 2)], [group.scores[i].total for i in (1, 3)]
    assert quick == [1, 1] and all(1 / 24 <= total <= 12 / 24 for total in slow)
    assert (
        "no time was left" in group.scores[0].parts["tests"].why or "wall_limit" in group.scores[0].parts["tests"].why
    )


@pytest.mark.extended
def test_waiting_for_a_core_is_not_time_of_the_reward() -> None:
    program = "import time\ndef add(a, b):\n    time.sleep(9)"
    reward = WeightedReward("tests", 1.0, UnitTests(wall_s=1.0))
    n = 6 * (os.cpu_count() or 1)
    group = asyncio.run(
        score_group(Task("t", reference=json.dumps(ADD)), [attempt(i, program) for i in range(n)], {"tests": reward},
                    timeout_s=3.0)
    )  # fmt: skip
    assert not group.failures and [score.total for score in group.scores] == [0.0] * n


def test_a_repository_keeps_files_that_have_the_names_of_ours_or_of_python_s() -> None:
    files = {name: f"NAME = {name!r}\n" for name in ("main.py", "program.py", "harness.py", "types.py", "json.py")}
    files["shop.py"] = "import main, program, harness\ndef names():\n    return 0\n"
    fixed = "return [m.NAME for m in (main, program, harness)]"
    edit = f"```\n### shop.py\n<<<<<<< SEARCH\n    return 0\n=======\n    {fixed}\n>>>>>>> REPLACE\n```"
    tests = {
        "files": files,
        "program": "from shop import names\nprint(names())",
        "asserts": ["assert names() == ['main.py', 'program.py', 'harness.py']"],
        "cases": [{"stdin": "", "stdout": "['main.py', 'program.py', 'harness.py']"}],
    }
    turns = (Turn(Action(edit), ""),)
    reward = UnitTests(cpu_s=2.0, wall_s=6.0, memory_mb=256)
    found = asyncio.run(reward(Task("t", reference=json.dumps(tests)), Trajectory("t", 0, "", turns, Outcome.FAILED)))
    assert found == Verdict(1.0, why="all 2 tests passed")
