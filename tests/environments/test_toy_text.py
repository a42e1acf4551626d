"""Toy texts as an environment: what is said and drawn, and an oracle held to exact values."""

from __future__ import annotations

import asyncio
import random

import pytest

from environments.check import check_environment
from environments.contrib.toy_text import ACTIONS, BlackjackEpisode, Start, ToyText, ToyTextEpisode
from tests.environments.toytext import ToyText as Exact
from tests.environments.toytext import optimal_value

FEW = {"n_train": 30, "n_dev": 20, "n_test": 100}
LAKE = Start(("SFF", "FHF", "FFG"), 0, 0)


@pytest.mark.parametrize(
    ("world", "wanted"),
    # test tasks, solved at random, solved by the oracle, actions of its plans; as docs/environments/games.md has them
    [
        (ToyText(**FEW), (100, 10, 100, 600)),
        (ToyText(slippery=True, max_steps=100, **FEW), (100, 15, 91, 2471)),
        (ToyText(size=8, max_steps=100, **FEW), (100, 1, 100, 1404)),
        (ToyText(game="taxi", **FEW), (63, 0, 63, 844)),
        (ToyText(game="cliff_walking", **FEW), (100, 0, 100, 1300)),
        (ToyText(game="blackjack", **FEW), (100, 24, 60, 93)),
    ],
    ids=["lake", "slippery lake", "large lake", "taxi", "cliff", "blackjack"],
)
def test_what_the_page_says_of_random_play_and_the_oracle(world: ToyText, wanted: tuple[int, ...]) -> None:
    tasks, n_random = world.tasks("test"), 0
    for task in tasks:
        rng, episode = random.Random(task.seed), world.start(task)
        while not episode.over:
            episode.act(rng.choice(sorted(ACTIONS[world.game])))
        n_random += episode.solved
    plans = [plan for task in tasks if (plan := world.plan(task, [])) is not None]
    assert (len(tasks), n_random, len(plans), sum(map(len, plans))) == wanted


def test_a_whole_lake() -> None:
    episode = ToyTextEpisode(ToyText(size=3), LAKE)
    results = [asyncio.run(episode.step(text)) for text in ("Down.", "go down", "hop", "right", "right")]
    assert [result.reply for result in results] == [
        "SFF\nPHF\nFFG",
        "SFF\nFHF\nPFG",
        "Unknown action. Actions: down, left, right, up.\nSFF\nFHF\nPFG",
        "SFF\nFHF\nFPG",
        "SFF\nFHF\nFFP\nThe goal!",
    ]
    assert [result.valid for result in results] == [True, True, False, True, True]
    assert (results[-1].reward, results[-1].terminated, results[-1].success) == (1.0, True, True)
    assert results[1].state_key == results[2].state_key and len({r.state_key for r in results}) == 4


def test_a_hole_ends_it() -> None:
    episode = ToyTextEpisode(ToyText(size=3), LAKE)
    asyncio.run(episode.step("right"))
    lost = asyncio.run(episode.step("down"))
    assert lost.reply == "SFF\nFPF\nFFG\nYou fell into a hole."
    assert (lost.reward, lost.terminated, lost.success) == (0.0, True, False)


def test_the_oracle_of_taxi_earns_the_optimum() -> None:
    world, exact = ToyText(game="taxi", **FEW), Exact("Taxi-v4", horizon=40)
    for task in world.tasks("test")[:20]:
        episode, plan = world.start(task), world.plan(task, [])
        assert plan is not None and isinstance(episode, ToyTextEpisode)
        first = episode.at
        assert sum(episode.act(action).reward for action in plan) == optimal_value(exact, first)


def test_the_cliff_costs_a_hundred_and_is_no_end() -> None:
    world = ToyText(game="cliff_walking")
    episode = ToyTextEpisode(world, Start((), 36, 0))
    fallen = asyncio.run(episode.step("right"))
    assert (fallen.reward, fallen.terminated, fallen.state_key) == (-100.0, False, episode.opening.state_key)
    # Up, eleven to the right, down: 13 steps of -1.
    rewards = [episode.act(text).reward for text in ["up", *["right"] * 11, "down"]]
    assert rewards == [-1.0] * 13 and episode.solved


def test_slips_hang_on_the_task_and_go_where_the_package_says() -> None:
    # From the corner, "left" stays, or slips to up (stays too) and down, each with 1/3.
    world = ToyText(size=3, slippery=True)
    ends = [ToyTextEpisode(world, Start(LAKE.rows, 0, chance)) for chance in range(900)]
    for episode in ends:
        episode.act("left")
    below = sum(episode.at == 3 for episode in ends)
    # Four standard errors of a share of 900: 4 x sqrt(2/9 x 900) = 57.
    assert abs(below - 300) < 57 and below + sum(episode.at == 0 for episode in ends) == 900


def test_blackjack_tells_both_hands_and_how_it_ends() -> None:
    world = ToyText(game="blackjack", **FEW)
    for task in world.tasks("test")[:10]:
        episode, plan = world.start(task), world.plan(task, [])
        assert isinstance(episode, BlackjackEpisode) and "The dealer shows" in episode.opening.reply
        for action in plan or ("stick",):
            last = asyncio.run(episode.step(action))
        assert last.reply.endswith(("You win.",) if plan else ("You lose.", "A draw."))
        assert last.success is (plan is not None)


def test_a_lake_is_in_one_split() -> None:
    world = ToyText(size=3, n_train=50, n_dev=50, n_test=50)
    rows = {split: {world.instance(task).rows for task in world.tasks(split)} for split in ("train", "dev", "test")}
    assert not rows["train"] & rows["test"] and not rows["train"] & rows["dev"] and not rows["dev"] & rows["test"]


@pytest.mark.parametrize(
    "world", [ToyText(**FEW), *(ToyText(game=g, slippery=True, max_steps=150, **FEW) for g in ACTIONS)]
)
def test_all_promises_are_kept(world: ToyText) -> None:
    report = check_environment(world, other_process=world.game == "taxi")
    assert report.ok, str(report)
