"""Tools: calls in JSON, the calculator, programs in the sandbox, what is drawn and promised."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.check import check_environment
from environments.tasks.tools import Problem, Tools, ToolsEpisode, calculated, draw_for, read_call, same_number, written
from environments.tasks.tools import draw as draw_problem
from rlhf.data import Task
from tests.environments.worlds import is_shown, oracle_figures, page, play, transcript

PROBLEM = Problem(
    "What do 3 cups and 2 pens cost?",
    (("cup", 14), ("pen", 5)),
    (("lookup", "cup"), ("lookup", "pen"), ("calculator", "3 * 14 + 2 * 5")),
    52,
)


def call(*actions: str, **keys: object) -> tuple[ToolsEpisode, list[tuple[str, bool]]]:
    episode = ToolsEpisode(PROBLEM, Tools(**keys))  # type: ignore[arg-type]
    results = [episode.act(action) for action in actions]
    return episode, [(result.reply, result.valid) for result in results]


def test_a_whole_bill() -> None:
    episode, replies = call(
        written("lookup", "cup"), written("lookup", "Pens"), written("calculator", "3*14+2*5"), written("answer", 52)
    )
    assert replies == [("cup: 14", True), ("pen: 5", True), ("52", True), ("Right.", True)]
    assert (episode.score, episode.solved, episode.done) == (1, True, True)
    assert "Tools: lookup(name), calculator(expression), answer(value)." in episode.opening.reply


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("cup", "Error: no JSON object."), ('{"tool": "lookup", ', "Error: no valid JSON"),
        ('{"tool": "lookup"}', "Error: lookup takes one argument, `name`."),
        ('{"arguments": {"name": "cup"}}', "Error: the object lacks"), ('{"tool": 3}', "Error: the object lacks"),
        ('{"tool": "lookup", "arguments": ["cup"]}', "Error: the object lacks"),
        ('{"tool": "lookup", "arguments": {"name": {}}}', "Error: lookup takes one argument"),
        ('{"tool": "python", "arguments": {"code": "1"}}', "Error: no tool is called 'python'; there are lookup"),
        ('{"tool": "shell", "arguments": {}}', "Error: no tool is called 'shell'"), ("{" * 30_000, "Error: no JSON"),
        ("[" * 900 + "{" * 900, "Error: no valid JSON"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_answered_with_what_is_wrong(text: str, reply: str) -> None:
    _, [(said, valid)] = call(text)
    assert said.startswith(reply) and not valid


@pytest.mark.parametrize(
    "text",
    [
        '{"tool": "lookup", "arguments": {"name": "cup"}}', '{"name": "lookup", "arguments": {"name": "cup"}}',
        '{"name": "lookup", "parameters": "{\\"name\\": \\"cup\\"}"}', '<tool_call>{"tool": "lookup", "name": "cup"}',
        'I look. ```json {"tool": "lookup", "arguments": {"name": "cup"}} ```',
    ],
)  # fmt: skip
def test_calls_are_read_tolerantly(text: str) -> None:
    assert read_call(text) == ("lookup", "cup")


def test_a_look_up_of_what_there_is_not_is_a_call_all_the_same() -> None:
    assert call(written("lookup", "moon"))[1] == [("Error: nothing of that name.", True)]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"), ("(1 + 2) * -3", "-9"), ("7 / 2", "3.5"), ("6 / 2", "3"), ("7 // 2", "3"), ("7 % 4", "3"),
        ("2 ^ 10", "1024"), ("2 ** 0.5", "1.414213562"), ("3 x 4", "12"), ("0.1 + 0.2", "0.3"),
        ("1 / 0", "Error: division by zero."),
    ],
)  # fmt: skip
def test_the_calculator(expression: str, value: str) -> None:
    assert calculated(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')", "open('x')", "a + 1", "'a' * 9", "[1]", "True + 1", "1 if 1 else 2", "9 ** 9 ** 9", "2 **",
        "9 ** 64", "(-8) ** 0.5", "1e308 * 10", "1 < 2", "1" * 201, "(" * 150, "10 ** 39 * 10 ** 39 * 1e300", "f(1)",
        "1j", "\0", "",
    ],
)  # fmt: skip
def test_the_calculator_takes_numbers_of_a_bounded_size_alone(expression: str) -> None:
    assert calculated(expression).startswith("Error:")


@given(st.text(max_size=60))
def test_the_calculator_never_raises(text: str) -> None:
    assert calculated(text)
    assert isinstance(read_call("{" + text), str | tuple)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (52, True), ("52", True), (52.0, True), ("52.0", True), (" 52 ", True), (53, False), ("52 coins", False),
        ("", False), (True, False), ("nan", False), (10**400, False), ("1" * 5000, False),
    ],
)  # fmt: skip
def test_an_answer_is_the_number_alone(said: object, right: bool) -> None:
    assert same_number(said, 52) is right
    assert same_number("1,234", 1234)
    assert same_number("21341334000", 21341334000) and not same_number(21341334020, 21341334000)
    assert not same_number("1e999999999", 52) and not same_number("Infinity", 52)


def test_a_wrong_answer_ends_it_and_steps_run_out() -> None:
    episode, _ = call(written("answer", 51))
    assert (episode.done, episode.solved, episode.way_out()) == (True, False, None)
    assert call("x", "x", "x", max_steps=4, n_goods=2)[0].way_out() is None
    with pytest.raises(ValueError, match="a bill takes 5 steps"):
        Tools(n_goods=3, max_steps=4)
    with pytest.raises(ValueError, match="need python: true"):
        Tools(questions=("program",))


@given(seed=st.integers(0, 29_999_999), n=st.integers(1, 8))
@settings(max_examples=40)
def test_the_answer_of_a_bill_is_that_of_its_prices(seed: int, n: int) -> None:
    problem = draw_for("tools", seed, lambda rng: draw_problem(rng, "bill", n))
    prices = dict(problem.prices)
    wanted = re.findall(r"(\d+) (\w+?)s\b", problem.text)
    assert len(wanted) == n and problem.answer == sum(int(count) * prices[name] for count, name in wanted)
    assert calculated(problem.calls[-1][1]) == str(problem.answer)


# --- programs ---------------------------------------------------------------------------------------------------------

PROGRAMS = Tools(questions=("program",), python=True, max_output=40)


def test_programs_run_in_the_sandbox_and_their_errors_are_read() -> None:
    task = PROGRAMS.tasks("test")[0]
    programs = ["print(6 * 7)", "1 / 0", "pass", "print('a' * 99)"]
    results = play(PROGRAMS, task, [written("python", text) for text in programs])
    assert [result.reply for result in results[1:]] == [
        "42",
        "Error: wrong_exit. ZeroDivisionError: division by zero"[:40] + "...",
        "(no output)",
        "a" * 40 + "...",
    ]
    assert all(result.valid for result in results)


def test_the_oracles_programs_give_its_answers() -> None:
    for task in PROGRAMS.tasks("test")[:3]:
        plan = PROGRAMS.plan(task, ())
        assert plan is not None
        results = play(PROGRAMS, task, plan)
        assert results[1].reply == task.reference == str(json.loads(plan[-1])["arguments"]["value"])
        assert results[-1].success


# --- what the page says, and promises ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "label"),
    [
        (Tools(questions=("price",)), "`questions: [price]`"),
        (Tools(), "the defaults"),
        (Tools(questions=("bill",), n_goods=6), "`questions: [bill], n_goods: 6`"),
    ],
)
def test_what_the_page_says_of_the_oracle(world: Tools, label: str) -> None:
    assert oracle_figures(world, label) in page()


def test_the_transcript_of_the_page() -> None:
    world = Tools()
    task = world.tasks("test")[1]
    plan = world.plan(task, ())
    assert plan is not None and is_shown(transcript(play(world, task, plan), plan))


def test_all_promises_are_kept() -> None:
    report = check_environment(Tools())
    assert report.ok, str(report)
    assert check_environment(Tools(questions=("price", "program"), python=True), n_tasks=1, other_process=False).ok
    assert not Tools(python=True).properties.deterministic


def test_a_known_task() -> None:
    assert Tools().start(Task("tools", seed=20_000_000)).opening.reply.startswith("What does 1 cake cost?")
