"""Programming tasks of public forms: from a file of rows to a run that their unit tests judge."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from environments.check import check_environment
from environments.tasks.dataset import Dataset
from rewards.code.unit_tests import UnitTests
from rlhf.build.reference_trial import try_references
from rlhf.build.train import train
from rlhf.data import Action, Outcome, Task, Trajectory, Turn, Verdict
from rlhf.errors import EnvError, RecipeError
from rlhf.recipe import load
from tests.environments.test_dataset import lines, recipe
from tests.training import runs


def humaneval(n: int) -> dict[str, Any]:
    """A row in the form of HumanEval: the beginning of a program, its end, and a function that checks it."""
    stub = f'from math import floor\n\n\ndef add_{n}(x: float) -> int:\n    """Add {n} to the floor of x."""\n'
    loop = f"    for i in range(3):\n        assert candidate(i + 0.5) == i + {n}\n"
    check = f"\n\nMETADATA = {{}}\n\n\ndef check(candidate):\n{loop}"
    row = {"task_id": f"HumanEval/{n}", "prompt": stub, "canonical_solution": f"    return floor(x) + {n}\n"}
    return row | {"test": check, "entry_point": f"add_{n}"}


def mbpp(n: int, *, sanitized: bool = False) -> dict[str, Any]:
    """A row in the form of MBPP: a sentence, a program, and assertions that name its function."""
    said = {"prompt" if sanitized else "text": f"Write a function that adds {n} to a number."}
    tests = [f"assert math.isclose(plus_{n}({i}), {i + n})" for i in range(3)]
    setup = {"test_imports": ["import math"]} if sanitized else {"test_setup_code": "import math"}
    return {"task_id": n, "code": f"def plus_{n}(x):\r\n    return x + {n}", "test_list": tests, **said, **setup}


FORMS = {
    "humaneval": [humaneval(n) for n in range(9)],
    "mbpp": [mbpp(n) for n in range(9)],
    "mbpp_sanitized": [mbpp(n, sanitized=True) for n in range(9)],
}


def judged(task: Task, reply: str) -> Verdict:
    attempt = Trajectory(task.id, 0, "", (Turn(Action(reply, reply_text=reply), ""),), Outcome.FAILED)
    return asyncio.run(UnitTests()(task, attempt))


@pytest.mark.parametrize("preset", FORMS)
def test_a_preset_needs_a_path_and_nothing_else(tmp_path: Path, preset: Any) -> None:
    world = Dataset(train=lines(tmp_path / "a.jsonl", FORMS[preset]), preset=preset)
    task = world.tasks("train")[3]
    [reply] = world.plan(task, ()) or ()
    assert judged(task, reply) == Verdict(1.0, why="all 3 tests passed")
    assert judged(task, reply.replace("+ 3", "+ 4")).value == 0
    prompt = str(task.info["prompt"])
    assert ("def add_3" in prompt) if preset == "humaneval" else ("plus_3(0)" in prompt and "plus_3(1)" not in prompt)
    shown = json.dumps(dict(task.info))
    assert "return" not in shown and "plus_3(2)" not in shown and "candidate(" not in shown  # nothing is given away


def test_the_beginning_of_the_prompt_need_not_be_said_again(tmp_path: Path) -> None:
    [task] = Dataset(train=lines(tmp_path / "a.jsonl", [humaneval(3)]), preset="humaneval").tasks("train")
    assert judged(task, "```python\ndef add_3(x):\n    return floor(x) + 3\n```").value == 1  # floor is in the prompt


def test_columns_of_ones_own_and_the_forms_of_the_reward(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"q": "Add.", "t": {"calls": [{"call": "add", "args": [1, 2], "returns": 3}]}},
        {"q": "Double.", "t": '{"cases": [{"stdin": "4", "stdout": "8"}]}'},
        {"q": "Halve.", "t": "assert half(4) == 2", "solution": "def half(x):\n    return x / 2"},
    ]
    path = lines(tmp_path / "a.jsonl", [{"solution": None, **row} for row in rows])
    world = Dataset(train=path, prompt="q", tests="t")
    first, second, third = world.tasks("train")
    assert judged(first, "```python\ndef add(a, b):\n    return a + b\n```").value == 1
    assert judged(second, "```python\nprint(2 * int(input()))\n```").value == 1
    assert [world.plan(task, ()) for task in (first, second)] == [None, None]  # no program is known
    assert judged(third, (world.plan(third, ()) or ("",))[0]).value == 1


def test_a_column_of_objects_may_have_nulls_where_a_row_lacks_a_form(tmp_path: Path) -> None:
    call = {"call": "one", "args": None, "kwargs": None, "returns": 1}
    forms: list[dict[str, Any]] = [
        {"asserts": ["assert one() == 1"]},
        {"calls": [call]},
        {"calls": [{"call": "nothing", "args": [2], "returns": None}]},
        {
            "program": "from a import one",
            "files": {"a.py": "def one():\n    return 1"},
            "asserts": ["assert one() == 1"],
        },
        {
            "program": "from b import one",
            "files": {"b.py": "def one():\n    return 1"},
            "asserts": ["assert one() == 1"],
        },
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": str(i), "test": form} for i, form in enumerate(forms)]), path)
    assert pq.read_table(path).to_pylist()[0]["test"]["calls"] is None
    first, second, third, *repositories = Dataset(train=path, tests="test").tasks("train")
    assert judged(first, "```python\ndef one():\n    return 1\n```").value == 1
    assert judged(second, "```python\ndef one():\n    return 1\n```").value == 1
    assert judged(third, "```python\ndef nothing(x):\n    return None\n```").value == 1
    assert judged(third, "```python\ndef nothing(x):\n    return x\n```").value == 0
    assert [list(json.loads(str(task.reference))["files"]) for task in repositories] == [["a.py"], ["b.py"]]


def test_it_keeps_the_contract(tmp_path: Path) -> None:
    report = check_environment(Dataset(path=lines(tmp_path / "a.jsonl", [mbpp(n) for n in range(60)]), preset="mbpp"))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("row", "keys", "where", "says"),
    [
        (humaneval(1), {"preset": "humaneval", "tests": "tset"}, "environment.tests", "did you mean 'test'"),
        (humaneval(1), {"preset": "humaneval", "entry_point": "entrypoint"}, "entry_point", "mean 'entry_point'"),
        (mbpp(1), {"preset": "mbpp_sanitized"}, "environment", "no such column"),
        (mbpp(1), {"prompt": "{text} {test_lists[0]}", "tests": "test_list"}, "prompt", "did you mean 'test_list'"),
        (mbpp(1), {"prompt": "text", "tests": "test_list", "reference": "cod"}, "reference", "did you mean 'code'"),
        ({**mbpp(1), "test_list": []}, {"preset": "mbpp"}, "a.jsonl:1", "cannot be filled"),
        ({**mbpp(1), "test_list": ["assert ("]}, {"preset": "mbpp"}, "a.jsonl:1", "no Python"),
        ({**mbpp(1), "test_list": ["x = 1"]}, {"preset": "mbpp"}, "a.jsonl:1", "assert nothing"),
        ({**mbpp(1), "test_list": [3]}, {"preset": "mbpp"}, "a.jsonl:1", "no text of a program"),
        ({"prompt": "a", "test": {"asserts": ["x"]}}, {"tests": "test"}, "a.jsonl:1", "cannot be judged outside"),
        ({"prompt": "a", "test": {"asserts": {"x": 1}}}, {"tests": "test"}, "a.jsonl:1, asserts", "holds no tests"),
        ({"prompt": "a", "test": {"cases": 3}}, {"tests": "test"}, "a.jsonl:1, cases", "holds no tests"),
        ({"prompt": "a", "test": {"calls": "f()"}}, {"tests": "test"}, "a.jsonl:1, calls", "holds no tests"),
        ({"prompt": "a", "test": {"calls": None}}, {"tests": "test"}, "a.jsonl:1", "no text of a program"),
        ({"prompt": "a", "s": "import math", "test": {"asserts": ["assert f() == 1"]}},
         {"tests": "test", "test_setup": "s"}, "test_setup", "test_setup needs tests that are Python source"),
        ({**humaneval(1), "entry_point": ""}, {"preset": "humaneval"}, "a.jsonl:1", "nothing names"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, Any], where: str, says: str
) -> None:
    with pytest.raises(EnvError) as refused:
        Dataset(train=lines(tmp_path / "a.jsonl", [row]), **keys).tasks("train")
    assert where in str(refused.value.where) and says in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("keys", "where", "says"),
    [
        ({"entry_point": "f"}, "entry_point", "belongs to tests"),
        ({"preset": "humaneval", "choices": "c"}, "choices", "tests are for programs"),
        ({"preset": "gsm8k", "tests": "t"}, "answer_pattern", "tests are for programs"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as refused:
        Dataset(path=Path("a.jsonl"), **keys)
    assert refused.value.where == where


def test_a_run_imitates_the_programs_and_is_judged_by_the_tests(tmp_path: Path) -> None:
    path = recipe(
        tmp_path, {"right": {"kind": "unit_tests"}}, path=None, train="a.jsonl", test="b.jsonl", preset="mbpp"
    )
    lines(tmp_path / "a.jsonl", FORMS["mbpp"][:2])
    lines(tmp_path / "b.jsonl", FORMS["mbpp"][6:])
    said: list[str] = []
    asyncio.run(try_references(load(path), said.append))
    assert not [line for line in said if "caution" in line], said  # every program passes its tests
    short = ["policy.max_context=512", "limits.max_tokens=60", "evaluation.n_tasks=3", "policy.hidden_size=64"]
    stages = ["stages.0.n_demonstrations=2", "stages.0.epochs=90", "stages.1.steps=1", "stages.1.tasks_per_step=2"]
    done = train(load(path, [*short, *stages]), tmp_path / "run")
    [worth], [success] = (runs.curve(Path(done["run"]), name) for name in ("reward/right", "rollout/success"))
    assert worth == success > 0  # of 8 attempts by a model that knows 2 programs by heart
