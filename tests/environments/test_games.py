"""The worlds drawn by seed: what all of them promise, and what the page says of random play and their oracles."""

from __future__ import annotations

import asyncio
import random
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

import pytest

from environments.base import StepResult
from environments.check import check_environment
from environments.contrib.bandit import Bandit
from environments.contrib.knights import Knights
from environments.contrib.matrix_game import MatrixGame
from environments.contrib.sat import Sat
from environments.contrib.twenty_questions import THINGS, TwentyQuestions
from environments.contrib.wordle import Wordle
from environments.contrib.wordle_words import WORDS
from environments.core.normalise import plain_words
from environments.core.procedural import Drawn, split_of
from environments.games.countdown import Countdown
from environments.games.sokoban import Sokoban
from rlhf.data import Task
from rlhf.errors import EnvError

FEW = {"n_train": 30, "n_dev": 30, "n_test": 100}


class Row(NamedTuple):
    """One line of the table in docs/environments/games.md."""

    world: Drawn
    n_tasks: int
    n_random: int
    n_oracle: int
    n_actions: int


TABLE = {
    "sokoban, one box": Row(Sokoban(**FEW), 100, 25, 100, 612),
    "sokoban, two boxes": Row(Sokoban(rows=7, columns=7, boxes=2, pulls=10, max_steps=60, **FEW), 100, 7, 100, 1282),
    "countdown, three numbers": Row(Countdown(numbers=3, **FEW), 100, 16, 100, 100),
    "countdown, four numbers": Row(Countdown(**FEW), 100, 6, 100, 100),
    "sat 3-5-15": Row(Sat(**FEW), 100, 40, 100, 100),
    "sat 3-8-30": Row(Sat(variables=8, clauses=30, **FEW), 100, 7, 100, 100),
    "knights, three": Row(Knights(**FEW), 100, 32, 100, 100),
    "knights, five": Row(Knights(people=5, **FEW), 100, 9, 100, 100),
    "wordle, 50 words": Row(Wordle(words=50, **FEW), 13, 1, 13, 31),
    "wordle, all words": Row(Wordle(**FEW), 100, 1, 100, 307),
    "twenty questions, 16 things": Row(TwentyQuestions(**FEW), 100, 15, 100, 514),
    "twenty questions, all things": Row(TwentyQuestions(things=len(THINGS), max_steps=20, **FEW), 19, 4, 19, 132),
    "bandit": Row(Bandit(**FEW), 100, 0, 100, 2000),
    "bandit, gaussian, three guests": Row(Bandit(payments="gaussian", n_contexts=3, **FEW), 100, 0, 100, 2000),
    "prisoner's dilemma": Row(MatrixGame(**FEW), 100, 8, 100, 1000),
    "stag hunt": Row(MatrixGame(game="stag_hunt", **FEW), 100, 2, 100, 1000),
    "rock paper scissors": Row(MatrixGame(game="rock_paper_scissors", **FEW), 100, 2, 100, 1000),
}


def random_action(world: Drawn, task: Task, result: StepResult, rng: random.Random) -> str:
    """Any admissible action; where none is listed, any answer of the right form."""
    if result.admissible_actions:
        return rng.choice(result.admissible_actions)
    if isinstance(world, Countdown):
        parts = [str(number) for number in world.instance(task).numbers]
        while len(parts) > 1:
            left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            parts.append(f"({left} {rng.choice('+-*/')} {right})")
        return parts[0]
    if isinstance(world, Sat):
        return "".join(rng.choice("01") for _ in range(world.variables))
    assert isinstance(world, Wordle)
    return rng.choice(WORDS)


def play_at_random(world: Drawn, task: Task) -> bool:
    rng, episode = random.Random(task.seed), world.start(task)
    result = episode.opening
    while result.success is None:
        result = asyncio.run(episode.step(random_action(world, task, result, rng)))
    return result.success


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_what_the_page_says_of_random_play_and_the_oracle(row: Row) -> None:
    tasks = row.world.tasks("test")
    plans = [row.world.plan(task, []) for task in tasks]  # type: ignore[attr-defined]
    n_random = sum(play_at_random(row.world, task) for task in tasks)
    found = [plan for plan in plans if plan is not None]
    assert Row(row.world, len(tasks), n_random, len(found), sum(map(len, found))) == row


#: One of each, the second lines of the table: the checks replay them in another process, which takes its time.
WORLDS = [row.world for row in TABLE.values()]


@pytest.mark.parametrize("world", WORLDS, ids=TABLE)
def test_all_promises_are_kept(world: Drawn) -> None:
    report = check_environment(world, other_process=False)
    assert report.ok, str(report)


def test_all_are_the_same_in_another_process() -> None:
    for world in (Sokoban(**FEW), TwentyQuestions(**FEW)):  # sets are in the game: their order hangs on the process
        report = check_environment(world, n_tasks=1)
        assert report.ok, str(report)


@pytest.mark.parametrize("world", WORLDS, ids=TABLE)
def test_no_instance_is_in_two_splits_or_twice_in_one(world: Drawn) -> None:
    contents = {
        split: [world.content(world.instance(task)) for task in world.tasks(split)]
        for split in ("train", "dev", "test")
    }
    for split, found in contents.items():
        assert len(set(found)) == len(found) > 0
        told = {split_of(world.told(world.instance(task))) for task in world.tasks(split)}
        assert told == {split}
    assert not any(set(a) & set(b) for a, b in combinations(contents.values(), 2))


def test_splits_are_named_and_bounded() -> None:
    world = Knights(n_train=3, n_dev=2, n_test=1)
    assert [len(world.tasks(split)) for split in ("train", "dev", "test")] == [3, 2, 1]
    assert world.tasks("dev")[0].id == "knights_and_knaves/3/dev/10000000"
    assert list(Knights(n_train=9).tasks("train")[:3]) == list(world.tasks("train"))  # a size changes no task
    with pytest.raises(EnvError, match="no such split"):
        world.tasks("valid")


def test_a_world_that_is_too_small_for_a_split_lists_what_there_is() -> None:
    # 10 words; a word is in one split only.
    sizes = [len(Wordle(words=10).tasks(split)) for split in ("train", "dev", "test")]
    assert sum(sizes) == 10 and all(sizes)


@pytest.mark.parametrize("world", [Countdown(**FEW), Sat(**FEW), Knights(**FEW), Wordle(**FEW)])
def test_attempts_are_counted_and_an_answer_that_is_none_costs_one(world: Drawn) -> None:
    task = world.tasks("test")[0]
    episode, limit = world.start(task), world.max_steps  # type: ignore[attr-defined]
    results = [asyncio.run(episode.step("what?")) for _ in range(limit)]
    assert not any(result.valid for result in results)
    assert len({result.state_key for result in [episode.opening, *results]}) == limit + 1
    assert (results[-1].truncated, results[-1].terminated, results[-1].success) == (False, True, False)
    assert results[-2].reply.endswith("1 attempt left.") or results[-2].reply.endswith("1 guess left.")
    with pytest.raises(EnvError, match="the episode is over"):
        asyncio.run(episode.step("what?"))
    plan = world.plan  # type: ignore[attr-defined]
    assert plan(task, ["what?"] * limit) is None
    assert plan(task, [*plan(task, []), "what?"]) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [("Go_North.", "go north"), ("  **UP**\n", "up"), ("'a' - b!", "a b"), ("", ""), ("x" * 61, "")],
)
def test_words_are_read_tolerantly(text: str, words: str) -> None:
    assert plain_words(text) == words


def test_shares_of_the_splits() -> None:
    # Half, a quarter, a quarter; 4 standard errors of a share of 4000 are 0.032 and 0.027.
    found = [split_of(str(i)) for i in range(4000)]
    shares = {split: Fraction(found.count(split), 4000) for split in ("train", "dev", "test")}
    assert abs(shares["train"] - Fraction(1, 2)) < 0.032
    assert abs(shares["dev"] - Fraction(1, 4)) < 0.027 and abs(shares["test"] - Fraction(1, 4)) < 0.027
