"""BFCL: text as calls, conversations, and the same verdicts as the benchmark's own checker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from environments.base import Environment, Oracle, StepResult, properties_of
from environments.check import check_environment
from environments.contrib.bfcl.apis import Apis
from environments.contrib.bfcl.calls import BfclCall, NoCall, decode
from environments.contrib.bfcl.environment import BFCL, CATEGORIES, Category, _entries, _reference
from environments.workers.pool import Processes
from rlhf.data import Task
from rlhf.errors import DataError, EnvError
from rlhf.recipe.suites import load_suite
from tests.environments.play import play, total

pytest.importorskip("bfcl_eval")

checker = pytest.importorskip("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")

BASE = BFCL()


def first(environment: BFCL = BASE) -> Task:
    return environment.tasks("test")[0]


# --- text as calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[cd(folder='document')]", ["cd(folder='document')"]),
        ("cd(folder='a'), ls()", ["cd(folder='a')", "ls()"]),
        ("```\n[ls(a=True, b=None)]\n```", ["ls(a=True, b=None)"]),
        ("f(x=-1, y=[1, 'b'], z={'k': (1, 2)})", ["f(x=-1, y=[1, 'b'], z={'k': (1, 2)})"]),
        ("f(x=2 * 3 + 1, y=name, z=true)", ["f(x=7, y='name', z='true')"]),
        ("f('dropped', x=g(y=1), z=h())", ["f(x=g(y=1), z='h()')"]),
        ("TwitterAPI.post(x=1)", ["TwitterAPI.post(x=1)"]),
        ("", []),
        ("[]", []),
    ],
)
def test_calls_are_read_by_the_benchmark_s_rules(text: str, calls: list[str]) -> None:
    assert [str(call) for call in decode(text)] == calls


@pytest.mark.parametrize(
    "text",
    [
        "I am done.", "Let me see: [ls()]", "ls() and then cd(folder='a')", "ls(", "f(**x)", "f(x=lambda: 1)",
        "(f)()()", "f(x=[i for i in y])", "f(x=9 ** 9 ** 9)", "f(x=2**70 * 2**70)", "f(x=1/0)", "f(x=not a)",
        "x" * 60_000, "(" * 300, "f(x=" + "[" * 60 + "]" * 60 + ")", "f(x=f'{a}')",
        "\x00", "é漢\u202e", "f(x={[1]: 2})", "f(x={([1],): 2})", "f(x={**a})",
    ],
)  # fmt: skip
def test_other_text_is_no_call(text: str) -> None:
    with pytest.raises(NoCall):
        decode(text)


@pytest.mark.parametrize("name", ["__import__", "eval", "print", "_load_scenario", "os.system", "self", "__class__"])
def test_what_no_object_offers_is_not_called(name: str) -> None:
    apis = Apis(["GorillaFileSystem"], {}, long_context=False)
    root = name.partition(".")[0]
    assert apis.run(BfclCall(name, {})) == f"Error during execution: name '{root}' is not defined"


def test_names_that_the_benchmark_refuses_are_refused() -> None:
    apis = Apis(["MathAPI"], {}, long_context=False)
    assert (
        apis.run(BfclCall("os.remove", {"path": "x"})) == "Error during execution: Function call remove is not allowed."
    )


def test_numbers_that_take_for_ever_are_refused_and_precision_is_put_back() -> None:
    apis = Apis(["MathAPI"], {}, long_context=False)
    assert (
        apis.run(BfclCall("power", {"base": 9, "exponent": 10**9}))
        == "Error during execution: exponent may be 5000 at most"
    )
    assert apis.run(BfclCall("power", {"base": 2, "exponent": 3})) == '{"result": 8}'
    before = apis.run(BfclCall("square_root", {"number": 2, "precision": 5}))
    apis.run(BfclCall("square_root", {"number": 2, "precision": 30}))
    assert apis.run(BfclCall("square_root", {"number": 2, "precision": 5})) == before


def test_a_call_among_the_arguments_is_made_first() -> None:
    apis = Apis(["GorillaFileSystem"], {}, long_context=False)
    assert apis.run(decode("echo(content=echo(content='a'))")[0]) == '{"terminal_output": {"terminal_output": "a"}}'


# --- tasks ---------------------------------------------------------------------------------------------------------


def test_there_is_a_test_split_and_no_other() -> None:
    assert isinstance(BASE, Environment) and isinstance(BASE, Oracle)
    assert BASE.properties.splits == ("test",)
    for split in ("train", "dev"):
        with pytest.raises(
            EnvError, match="the benchmark has test tasks only, none for training or selection"
        ) as caught:
            BASE.tasks(split)
        assert caught.value.expected == "test, the only split"
        assert caught.value.hint == "train on another environment, and evaluate on this one"


def test_ids_name_the_package_and_its_contents() -> None:
    assert first().id == "bfcl-2026.3.23-ad7f53d5/base/test/0"
    mixed = BFCL(category="all").tasks("test")
    assert len(mixed) == 800 and [task.info["category"] for task in mixed[:4]] == list(CATEGORIES)
    assert mixed[5].id == BFCL(category="miss_func").tasks("test")[1].id
    with pytest.raises(DataError, match="another environment") as caught:
        BFCL(category="miss_param").start(first())
    assert "/miss_param/test/<number>: test is the only split" in caught.value.expected


def test_a_task_of_another_is_told_the_categories_and_the_split_there_are() -> None:
    with pytest.raises(DataError, match="another environment") as caught:
        BFCL(category="all").start(Task(id="another/train/0", seed=0))
    ways = "/<base or miss_func or miss_param or long_context>/test/<number>: test is the only split"
    assert ways in caught.value.expected


# --- conversations -------------------------------------------------------------------------------------------------


def test_the_contract_is_kept() -> None:
    report = check_environment(BASE, n_tasks=2, max_steps=8)
    assert report.ok, str(report)


def test_a_conversation_goes_turn_by_turn() -> None:
    calls = ["[cd(folder='document'), ls(a=False)]", "Here is what I found.", "ls()", "That is all."]
    opening, listed, asked, again, asked_again = play(BASE, first(), calls)
    assert opening.reply.startswith("You are an expert in composing functions.") and '"name": "mkdir"' in opening.reply
    assert opening.reply.endswith("Make sure to create the directory")
    assert "'content': '{\"current_working_directory\": \"document\"}'" in listed.reply
    assert asked.reply.startswith("Perform a detailed search") and "final_report.pdf" in again.reply
    assert asked_again.reply.startswith("Upon identifying")
    assert not any(r.terminated for r in (listed, asked, again, asked_again))


def test_functions_that_come_late_are_described_when_they_come() -> None:
    environment = BFCL(category="miss_func")
    task = first(environment)  # `sort` comes in the fourth turn
    results = play(environment, task, ["-", "-", "-"])
    assert '"name": "sort"' not in results[0].reply and "'name': 'sort'" in results[3].reply
    assert results[3].reply.endswith("What about now?")


def test_the_suite_reads_a_reply_of_several_lines_and_ignores_thoughts() -> None:
    agent: Any = load_suite("bfcl").parts[0].agent
    calls = "[cd(folder='document'),\n " + ",\n ".join(f"mkdir(dir_name='folder {i}')" for i in range(20)) + "]"

    parsed = agent.read(f"<think>\nOne after another.\n</think>\n\n{calls}")

    assert parsed.error is None and len(decode(parsed.text)) == 21


def test_too_many_steps_in_a_turn_fail() -> None:
    short = BFCL(steps_per_turn=2)
    results = play(short, first(), ["pwd()"] * 5)
    assert len(results) == 4 and (results[-1].terminated, results[-1].success) == (True, False)


def test_episodes_share_nothing() -> None:
    async def go() -> tuple[str, str]:
        one, two = BASE.start(first()), BASE.start(first())
        assert one.opening.state_key == two.opening.state_key
        await one.step("mkdir(dir_name='mine')")
        told = await two.step("ls()")
        with pytest.raises(EnvError, match="over"):
            await two.close()
            await two.step("ls()")
        return told.reply, (await one.step("ls()")).reply

    theirs, mine = asyncio.run(go())
    assert "mine" in mine and "mine" not in theirs


def test_conversations_taken_in_turn_are_those_of_each_alone() -> None:
    tasks = list(BASE.tasks("test"))[::17]
    plans = [list(BASE.plan(task, ()) or ()) for task in tasks]
    alone = [play(BASE, task, plan) for task, plan in zip(tasks, plans, strict=True)]

    async def in_turn() -> list[list[StepResult]]:
        episodes = [BASE.start(task) for task in tasks]
        found = [[episode.opening] for episode in episodes]
        for i in range(max(map(len, plans))):
            for episode, plan, results in zip(episodes, plans, found, strict=True):
                if i < len(plan):
                    results.append(await episode.step(plan[i]))
        return found

    assert asyncio.run(in_turn()) == alone and all(results[-1].success for results in alone)
    assert properties_of(BASE).interleaves and Processes(environment=BASE, n_workers=2).max_episodes == 64


def test_the_oracle_goes_on_where_it_can() -> None:
    task = first()
    whole = list(BASE.plan(task, ()) or ())
    assert whole[0].startswith("[cd(folder='document'), mkdir(") and whole[1] == "Done."
    assert BASE.plan(task, whole[:3]) == whole[3:]
    looked = BASE.plan(task, ["ls()"])
    assert looked is not None and total(play(BASE, task, ["ls()", *looked])) == 1.0
    assert BASE.plan(task, ["mkdir(dir_name='nobody asked')"]) is None
    assert BFCL(steps_per_turn=1).plan(task, ["[pwd()]"]) is None  # the turn has no step left


@pytest.mark.parametrize("every", [pytest.param(10, id="some"), pytest.param(1, id="all", marks=pytest.mark.extended)])
@pytest.mark.parametrize("category", CATEGORIES)
def test_the_reference_calls_solve_every_task(category: Category, every: int) -> None:
    environment = BFCL(category=category)
    for task in environment.tasks("test")[::every]:
        path = environment.plan(task, ()) or ()
        assert play(environment, task, path)[-1].success is True, task.id
        assert len(path) <= environment.max_steps


# --- the benchmark's own checker -----------------------------------------------------------------------------------


def verdict(category: str, number: int, turns: Sequence[Sequence[str]], name: str) -> bool:
    """What the benchmark says of these actions. It evaluates text: these come from its own reference."""
    entry, answer = _entries(category)[number]  # type: ignore[arg-type]
    decoded = [[[str(call) for call in decode(action)] for action in turn] for turn in turns]
    found: dict[str, Any] = checker.multi_turn_checker(
        decoded, list(answer), dict(entry), f"multi_turn_{category}", name
    )
    return bool(found["valid"])


def test_verdicts_are_those_of_the_benchmark() -> None:
    rng, seen = random.Random(0), {True: 0, False: 0}
    for i in range(120):
        category, number = rng.choice(CATEGORIES), rng.randrange(200)
        turns = [list(turn[:-1]) for turn in _reference(category, number)]
        turns = changed(turns, rng)
        environment = BFCL(category=category)
        task = environment.tasks("test")[number]
        ours = play(environment, task, [action for turn in turns for action in (*turn, "Done.")])[-1].success
        assert ours == verdict(category, number, turns, f"changed{i}"), (category, number, turns)
        seen[bool(ours)] += 1
    assert min(seen.values()) > 15, seen


def changed(turns: list[list[str]], rng: random.Random) -> list[list[str]]:
    """Leave a call out, say it twice, move it to the turn before, add a harmless one, or leave all as it is."""
    full = [i for i, turn in enumerate(turns) if turn]
    i = rng.choice(full)
    calls = [f"[{call}]" for call in decode(turns[i][0])]
    how = rng.randrange(6)
    if how == 0:
        calls.pop(rng.randrange(len(calls)))
    elif how == 1:
        calls.insert(0, rng.choice(calls))
    elif how == 2 and i > 0:
        turns[i - 1] = [*turns[i - 1], calls.pop(0)]
    elif how == 3:
        calls.append("[nothing_of_this_name(x=1)]")
    elif how == 4:
        rng.shuffle(calls)
    turns[i] = calls
    return turns
