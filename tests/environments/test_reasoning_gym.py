"""Problems of reasoning-gym: splits, scores, feedback, and answers that are kept from scorers that evaluate."""

from __future__ import annotations

import asyncio
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

from environments.check import check_environment
from environments.contrib.reasoning_gym import (
    EVALUATED,
    NO_REFERENCE,
    PROBABILITY,
    SLOW,
    UNSTABLE,
    ReasoningGym,
    is_plain_formula,
    is_plain_list,
)
from rlhf.data import Task
from rlhf.errors import EnvError

FEW = {"n_train": 20, "n_dev": 10, "n_test": 10}


def all_generators() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def test_no_question_is_in_two_splits() -> None:
    world = ReasoningGym(**FEW)
    questions = {s: {world.instance(t)["question"] for t in world.tasks(s)} for s in ("train", "dev", "test")}
    assert [len(found) for found in questions.values()] == [20, 10, 10]
    assert not any(a & b for a, b in combinations(questions.values(), 2))
    first = world.tasks("test")[0]
    assert first.id == "reasoning_gym/0.1.25/chain_sum/test/" + str(first.seed)


def test_a_problem_with_feedback() -> None:
    world = ReasoningGym(dataset="chain_sum", max_steps=3, **FEW)
    task = world.tasks("test")[0]
    episode, right = world.start(task), world.instance(task)["answer"]
    assert episode.opening.reply.endswith("=\n3 attempts left.")
    wrong, solved = (asyncio.run(episode.step(text)) for text in ("-12345678", right))
    assert (wrong.reply, wrong.reward, wrong.success) == ("That is not right.\n2 attempts left.", 0.0, None)
    assert (solved.reply, solved.reward, solved.success) == ("Right.", 1.0, True)
    assert world.plan(task, ["0"]) == (right,) and world.plan(task, ["0"] * 3) is None


def test_scores_are_the_package_s_and_count_once() -> None:
    world = ReasoningGym(dataset="countdown", max_steps=3, reward="score", **FEW)
    task = world.tasks("test")[0]
    episode = world.start(task)
    [right] = world.plan(task, []) or ()
    # A formula that misses the target is worth 0.05 in the package; what was reached once pays no more.
    rewards = [asyncio.run(episode.step(text)).reward for text in ("1 + 1", "1 + 1", right)]
    assert rewards == pytest.approx([0.01, 0.0, 0.99], abs=0.05) and sum(rewards) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text",
    ["__import__('os').getpid()", "open('x')", "x.__class__", "9**9**9", "((9**99)**99)**99", "2**1000", "2**(3**9)",
     "lambda x: x", "1;2", "1" * 600, "1" * 200 + "!", "exp.__init__", "2***3"],
)  # fmt: skip
def test_what_could_do_harm_is_no_plain_formula(text: str) -> None:
    assert not is_plain_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "(36 - 4) * 2 / 3",
        "x**2 + 3*x - 1",
        "-2*exp(x)/3 + C",
        "3*log(x) + sqrt(2)",
        "2**10",
        "-4*(-2*x - 8)**(3/2)/3 + C",
        "x**(-2)",
    ],
)
def test_formulas_that_answer_are_plain(text: str) -> None:
    assert is_plain_formula(text)


def test_lists_that_answer_are_plain_and_calls_are_not() -> None:
    assert is_plain_list("[[0, 1], [1, 0]]") and is_plain_list("['Q', '_']") and is_plain_list('["A", "B"]')
    assert not is_plain_list("exit()") and not is_plain_list("[x for x in y]") and not is_plain_list("(1, 2)")


@pytest.mark.parametrize("dataset", sorted(EVALUATED))
def test_no_text_of_an_answer_is_run(dataset: str, tmp_path: Path) -> None:
    world, mark = ReasoningGym(dataset=dataset, **FEW), tmp_path / "was_here"
    task = Task("mine", seed=0)
    for text in (
        f"open({str(mark)!r}, 'w')",
        f"[open({str(mark)!r}, 'w')]",
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
    ):
        assert world.score(task, text) == 0.0
    assert not mark.exists()


def test_a_number_that_would_have_a_billion_digits_is_no_answer() -> None:
    world = ReasoningGym(dataset="coin_flip", **FEW)
    for i in range(10):
        task = Task("mine", seed=i)
        assert [world.score(task, text) for text in ("1e999999999", "1e-999999999", "1/1e99999999")] == [0.0] * 3
        assert world.score(task, world.instance(task)["answer"]) == 1.0
        assert world.score(task, "5e-1") == world.score(task, "0.5") == world.score(task, " 1/2 ")


@pytest.mark.parametrize(
    ("dataset", "reference", "said", "right"),
    [
        ("coin_flip", "0.193359375", "0.193359375", True),
        ("coin_flip", "0.193359375", "99/512", True),
        ("coin_flip", "0.193359375", "0.1934", True),
        ("coin_flip", "0.193359375", "0.193", False),
        ("coin_flip", "0.193359375", "0", False),
        ("coin_flip", "0.193359375", "0.1", False),
        ("coin_flip", "3.051757812e-05", "0", False),  # one of 2 ** 15
        ("coin_flip", "3.051757812e-05", "1/32768", True),
        ("complex_arithmetic", "-5.0 - 3.0i", "-5 - 3i", True),
        ("complex_arithmetic", "-5.0 - 3.0i", "nan", False),
        ("complex_arithmetic", "-5.0 - 3.0i", "nan + nani", False),
        ("complex_arithmetic", "-5.0 - 3.0i", "1e999 - 1e999i", False),
    ],
)
def test_numbers_are_compared_by_their_values(dataset: str, reference: str, said: str, right: bool) -> None:
    world = ReasoningGym(dataset=dataset, n_train=200)
    task = next(t for t in world.tasks("train") if world.instance(t)["answer"] == reference)
    assert (world.score(task, said) == 1.0) is right


#: What answers any problem or none.
CONSTANT = (
    *"01aAxXyY-_", "-1", "0.", "1.0", "1/2", "nan", "inf", "None", "True", "yes", "no", "[]", "{}", "()", "[[0]]", '""',
    ",", "0 0", "No solution", "impossible", "abcdefghijklmnopqrstuvwxyz", "0123456789", "what?",
)  # fmt: skip


@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(name, marks=[] if name in ("coin_flip", "complex_arithmetic", "gcd") else pytest.mark.extended)
        for name in all_generators()
    ],
)
def test_no_answer_solves_all_problems(dataset: str) -> None:
    world = ReasoningGym(dataset=dataset, n_train=6)
    tasks = world.tasks("train")
    references = [str(world.instance(task)["answer"]).strip().lower() for task in tasks]
    for said in CONSTANT:
        others = [task for task, right in zip(tasks, references, strict=True) if right != said.lower()]
        assert sum(world.score(task, said) == 1.0 for task in others) <= len(tasks) // 3, said


def test_anything_is_no_answer_to_whether_life_goes_on() -> None:
    world = ReasoningGym(dataset="game_of_life_halting", **FEW)
    for i in range(10):
        task = Task("mine", seed=i)
        assert world.score(task, "what?") == 0.0
        assert sorted(world.score(task, text) for text in ("True", "False")) == [0.0, 1.0]


def test_unknown_generators_and_settings_are_refused() -> None:
    with pytest.raises(EnvError, match="no such generator") as caught:
        ReasoningGym(dataset="chain_sums").tasks("train")
    assert "chain_sum" in str(caught.value)
    with pytest.raises(EnvError, match="refuses these settings"):
        ReasoningGym(params={"min_terms": -1}).tasks("train")
    assert ReasoningGym(params={"min_terms": 5}).level.startswith("0.1.25/chain_sum-")


def test_a_problem_that_is_another_one_here_is_refused() -> None:
    with pytest.raises(EnvError, match="this generator makes a different problem in this process"):
        ReasoningGym().start(Task("mine", seed=0, info={"problem": "00000000"}))


@pytest.mark.parametrize("world", [ReasoningGym(**FEW), ReasoningGym(dataset="countdown", max_steps=3, **FEW)])
def test_all_promises_are_kept(world: ReasoningGym) -> None:
    report = check_environment(world, other_process=world.max_steps == 1)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(name, marks=[] if name in ("coin_flip", "gcd", "sudoku", "n_queens") else pytest.mark.extended)
        for name in all_generators()
    ],
)
def test_every_generator_starts_and_its_references_are_right(dataset: str) -> None:
    world = ReasoningGym(dataset=dataset, n_train=4, n_dev=2, n_test=3)
    tasks = world.tasks("test")
    assert all(world.start(task).opening.reply for task in tasks)
    n_known = sum(world.plan(task, []) is not None for task in tasks)
    if dataset in NO_REFERENCE:
        assert n_known == 0
    elif dataset in EVALUATED:  # a reference may be a formula that is not plain, such as an integral left as it is
        assert n_known > 0
    else:
        assert n_known == len(tasks)


@pytest.mark.parametrize(
    ("dataset", "inline", "isolated"),
    [
        ("chain_sum", True, False),
        ("rubiks_cube", False, False),
        ("countdown", False, True),
        ("word_ladder", False, True),
    ],
)
def test_where_a_generator_is_served(dataset: str, inline: bool, isolated: bool) -> None:
    declared = ReasoningGym(dataset=dataset).properties
    assert (declared.inline, declared.isolated) == (inline, isolated)


def test_what_the_page_says_of_generators() -> None:
    assert len(all_generators()) == 105
    assert NO_REFERENCE | UNSTABLE | SLOW | PROBABILITY | set(EVALUATED) <= set(all_generators())
