"""Subtasks of mending software: F_β of what is named, for files, functions, lines and edits."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.check import check_reward
from rewards.contrib.subtasks import Subtask
from rewards.verified import is_verifier
from rlhf.errors import RewardError

SUBTASKS = ("file", "function", "line", "edit")


def fenced(text: str, told: str = "I think:\n") -> str:
    return f"{told}```\n{text}\n```"


def edit(search: str, replace: str, file: str = "a.py") -> str:
    return f"### {file}\n<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n"


def score(subtask: str, answer: str, reference: str, **keys: float) -> float:
    return Subtask(subtask=subtask, **keys)(fenced(answer), reference).value


@pytest.mark.parametrize(
    ("beta", "value"),
    # P = 1/3 and R = 1/2: (1 + β²) / 6 / (β²/3 + 1/2), which is 2/6 / (5/6), 5/6 / (11/6), and 1.25/6 / (7/12)
    [(1.0, 0.4), (2.0, 5 / 11), (0.5, 0.357143)],
)
def test_files_earn_the_f_score_of_their_set(beta: float, value: float) -> None:
    assert score("file", "a.py\nb.py\n./src/c.py", "a.py\nd.py", beta=beta) == pytest.approx(value, abs=1e-5)
    # named twice is named once, and the order does not matter
    assert score("file", "src/c.py\na.py\nb.py\na.py", "d.py\na.py", beta=beta) == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(
    ("subtask", "answer", "reference", "value"),
    [
        ("file", "a.py", "./a.py", 1.0),
        ("file", "b.py", "a.py", 0.0),
        ("function", "a.py::A.run\na.py: stop()", "a.py::A.run", 2 / 3),  # P = 1/2, R = 1
        ("function", "a.py::run", "b.py::run", 0.0),
        ("line", "a.py:10-14", "a.py:12-15", 2 / 3),  # 12 to 14 of 5 named and 4 wanted: P = 3/5, R = 3/4
        ("line", "a.py:1\na.py:1-2", "a.py:1-2", 1.0),
        # − y = 2 and + y = 3 are wanted; + y = 4 is not: P = R = 1/2
        ("edit", edit("x = 1\ny = 2\n", "x = 1\ny = 4\n"), edit("y = 2\n", "y = 3\n"), 0.5),
        ("edit", edit("y = 2  \n", "y = 3\n"), edit("x = 1\ny = 2\n", "x = 1\ny = 3\n"), 1.0),
        ("edit", edit("y = 2\n", "y = 3\n", "b.py"), edit("y = 2\n", "y = 3\n"), 0.0),
        # of two lines "z" one is wanted: P = 1/2, R = 1
        ("edit", edit("", "z\nz\n"), edit("", "z\n"), 2 / 3),
        ("edit", edit("", "z\n") + edit("w\n", "", "b.py"), edit("", "z\n") + "\n" + edit("w\n", "", "b.py"), 1.0),
    ],
)
def test_each_subtask_compares_what_it_names(subtask: str, answer: str, reference: str, value: float) -> None:
    assert score(subtask, answer, reference) == pytest.approx(value)


@pytest.mark.parametrize(
    ("subtask", "answer"),
    [
        ("file", ""),
        ("file", "a.py and b.py"),
        ("function", "a.py"),
        ("function", "a.py::1x"),
        ("line", "a.py"),
        ("line", "a.py:9-3"),
        ("line", "a.py:1-9999999"),
        ("edit", "y = 3"),
        ("edit", edit("y = 2\n", "y = 2 \n")),  # it changes nothing
        ("edit", edit("y = 2\n", "y = 3\n") + "and so on"),
        ("edit", "### a.py\n<<<<<<< SEARCH\ny\n=======\nz\n"),
    ],
)
def test_what_cannot_be_read_earns_nothing(subtask: str, answer: str) -> None:
    reference = Subtask(subtask=subtask).examples[0][1]
    verdict = Subtask(subtask=subtask)(fenced(answer), reference)
    assert verdict.value == 0 and "no block that can be read" in verdict.why
    assert Subtask(subtask=subtask)(reference, reference).why == "no block"


def test_the_last_block_is_the_answer() -> None:
    assert Subtask(subtask="file")(f"{fenced('b.py')}\nno:\n{fenced('a.py')}\n", "a.py").value == 1


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_a_reference_may_hold_all_subtasks(subtask: str) -> None:
    every = json.dumps({name: Subtask(subtask=name).examples[0][1] for name in SUBTASKS})
    [(answer, _)] = Subtask(subtask=subtask).examples
    assert Subtask(subtask=subtask)(answer, every).value == 1
    for reference in ("", "{", '{"other": "a.py"}', "a.py is\nnot what is meant"):
        with pytest.raises(RewardError, match="has nothing to compare"):
            Subtask(subtask=subtask)(answer, reference)


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_the_checker_walks_it_as_a_verifier(subtask: str) -> None:
    reward = Subtask(subtask=subtask)
    assert is_verifier(reward)
    report = check_reward(reward)
    assert report.ok, str(report)


FILES = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)


@given(FILES, FILES, st.floats(0.1, 10))
def test_a_score_is_between_its_precision_and_its_recall(named: list[str], right: list[str], beta: float) -> None:
    both = len(set(named) & set(right))
    value = score("file", "\n".join(named), "\n".join(right), beta=beta)
    low, high = sorted((both / len(named), both / len(right)))
    assert low - 1e-9 <= value <= high + 1e-9
    if both:
        assert abs(score("file", "\n".join(named), "\n".join(right), beta=100.0) - both / len(right)) < 1e-2


@pytest.mark.parametrize("subtask", SUBTASKS)
@pytest.mark.parametrize(
    "text",
    [
        "```python\n" * 20_000,
        "### a.py\n<<<<<<< SEARCH\n=======\n" * 5_000,
        edit("x\n" * 900, "x\n" * 901) + "z\n" * 20_000,
        "a.py:1-9000\n" * 5_000,
        "```\n" + " " * 200_000 + "\n```",
    ],
    ids=["openings", "half an edit", "alike lines", "ranges", "spaces"],
)
def test_a_long_answer_takes_no_long_time(subtask: str, text: str) -> None:
    reward = Subtask(subtask=subtask)
    reference = reward.examples[0][1]
    begun = time.process_time()  # 0.1 s at most; backtracking or quadratic work would take minutes
    reward(text, reference)
    reward(fenced(text), reference)
    assert time.process_time() - begun < 20.0
