"""Keyhole: how houses are drawn, what is said and understood, what is promised, and what its oracle finds."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.base import StepResult
from environments.check import check_environment
from environments.games.key_door import WAYS, Cell, House, Keyhole, KeyholeEpisode, direction, draw, read_action
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.recipe import load
from rlhf.recipe.checks import cautions

ROOT = Path(__file__).resolve().parents[2]

#: Attic, Bedroom
#:          |
#: Dairy -- Cellar    with the start in the attic, the key in the dairy and the door in the bedroom; the attic leads
#: south to the dairy, and nowhere else.
SMALL = House(
    rooms={(0, 0): "attic", (0, 1): "bedroom", (1, 0): "dairy", (1, 1): "cellar"},
    exits={
        (0, 0): {"south": (1, 0)},
        (0, 1): {"south": (1, 1)},
        (1, 0): {"east": (1, 1), "north": (0, 0)},
        (1, 1): {"north": (0, 1), "west": (1, 0)},
    },
    start=(0, 0),
    key=(1, 0),
    door=(0, 1),
)
SOLUTION = ("go south", "take key", "go east", "go north", "open door")

houses = st.builds(
    draw,
    seed=st.integers(0, 30_000_000),
    rows=st.integers(2, 5),
    columns=st.integers(2, 5),
    n_loops=st.integers(0, 20),
)


def do(episode: KeyholeEpisode, actions: Sequence[str]) -> list[StepResult]:
    """Opening and answers."""
    return [episode.opening, *(asyncio.run(episode.step(action)) for action in actions)]


def small(max_steps: int = 16, *, compass: bool = True) -> KeyholeEpisode:
    return KeyholeEpisode(SMALL, compass=compass, max_steps=max_steps)


def distance(house: House, origin: Cell, goal: Cell) -> int:
    """Passages of a shortest walk, by flooding: another way than the one under test."""
    reached, edge = {origin: 0}, deque([origin])
    while edge:
        cell = edge.popleft()
        for target in house.exits[cell].values():
            if target not in reached:
                reached[target] = reached[cell] + 1
                edge.append(target)
    return reached[goal]


# --- houses ----------------------------------------------------------------------------------------------------------


@given(houses)
def test_a_house_is_one_whole_and_every_way_leads_back(house: House) -> None:
    back = {"east": "west", "west": "east", "north": "south", "south": "north"}
    for cell, exits in house.exits.items():
        assert list(exits) == sorted(exits)
        for way, target in exits.items():
            assert target == (cell[0] + WAYS[way][0], cell[1] + WAYS[way][1])
            assert house.exits[target][back[way]] == cell
        distance(house, house.start, cell)  # a room out of reach would be missing
    assert len({house.start, house.key, house.door}) == 3
    assert len(set(house.rooms.values())) == len(house.rooms)


@pytest.mark.parametrize(
    ("rows", "columns", "loops", "n_passages"),
    # A tree over n rooms has n - 1 passages; a grid has rows x (columns - 1) + columns x (rows - 1) of them at most.
    [(4, 4, 0, 15), (4, 4, 6, 21), (4, 4, 9, 24), (4, 4, 10, 24), (2, 2, 0, 3), (2, 5, 2, 11), (5, 5, 16, 40)],
)
def test_loops_are_passages_beside_those_of_a_tree(rows: int, columns: int, loops: int, n_passages: int) -> None:
    exits = draw(3, rows, columns, loops).exits
    assert sum(map(len, exits.values())) == 2 * n_passages


@given(houses, st.randoms(use_true_random=False))
def test_a_path_is_a_shortest_walk(house: House, rng: random.Random) -> None:
    origin, goal = rng.choice(list(house.rooms)), rng.choice(list(house.rooms))
    path = house.path(origin, goal)
    cell = origin
    for way in path:
        cell = house.exits[cell][way]
    assert cell == goal
    assert len(path) == distance(house, origin, goal)


def test_splits_are_ranges_of_seeds_that_never_meet() -> None:
    environment = Keyhole(n_train=3, n_dev=2, n_test=1)
    seeds = {split: [task.seed for task in environment.tasks(split)] for split in ("train", "dev", "test")}
    assert seeds == {"train": [0, 1, 2], "dev": [10_000_000, 10_000_001], "test": [20_000_000]}
    assert environment.tasks("dev")[1].id == "keyhole-2/4x4+6/dev/10000001"
    with pytest.raises(EnvError, match="no such split"):
        environment.tasks("valid")
    with pytest.raises(ValueError, match="less than or equal to 5"):
        Keyhole(rows=6)


def test_no_house_is_in_two_splits() -> None:
    environment = Keyhole(n_train=1000, n_test=1000)
    train, test = (
        {environment.start(task).opening.state_key for task in environment.tasks(split)} for split in ("train", "test")
    )
    assert len(train) == len(test) == 1000 and not train & test


def test_opening_of_a_known_task() -> None:
    environment = Keyhole()
    assert environment.start(environment.tasks("test")[0]).opening == StepResult(
        "Find the key and open the door.\nBedroom. Ways: east, west. The key is east.",
        state_key="4a38a25f/bedroom/no key",
        admissible_actions=("go east", "go west"),
    )


# --- what is said ----------------------------------------------------------------------------------------------------


def test_a_whole_game() -> None:
    replies = [result.reply for result in do(small(), SOLUTION)]
    assert replies == [
        "Find the key and open the door.\nAttic. Ways: south. The key is south.",
        "Dairy. Ways: east, north. The key is here.",
        "Dairy. Ways: east, north. The door is north east.",
        "Cellar. Ways: north, west. The door is north.",
        "Bedroom. Ways: south. A locked door is here.",
        "The door opens.",
    ]


def test_without_a_compass_only_what_is_here_is_said() -> None:
    replies = [result.reply for result in do(small(compass=False), SOLUTION)]
    assert replies[0] == "Find the key and open the door.\nAttic. Ways: south."
    assert replies[1:5] == [
        "Dairy. Ways: east, north. The key is here.",
        "Dairy. Ways: east, north.",
        "Cellar. Ways: north, west.",
        "Bedroom. Ways: south. A locked door is here.",
    ]


@pytest.mark.parametrize(
    ("before", "action", "says"),
    [
        ((), "go east", "No way there. Attic."),
        ((), "take key", "No key to take. Attic."),
        (("go south", "take key"), "take key", "No key to take. Dairy."),
        ((), "open door", "No door to open. Attic."),
        (("go south", "go east", "go north"), "open door", "It is locked. Bedroom."),
    ],
)
def test_what_is_impossible_costs_a_step_and_changes_nothing(before: Sequence[str], action: str, says: str) -> None:
    episode = small(max_steps=len(before) + 1)
    *_, here, answer = do(episode, [*before, action])
    assert answer.reply.startswith(says) and answer.reply.endswith(here.reply.rpartition("\n")[2])
    assert answer.state_key == here.state_key and answer.valid
    assert (answer.reward, answer.truncated, answer.success) == (0.0, True, False)


def test_what_is_not_understood_is_invalid_and_says_what_there_is() -> None:
    opening, answer = do(small(), ["dance"])
    assert not answer.valid and answer.state_key == opening.state_key
    assert answer.reply.startswith(
        "Unknown action. Actions: go east, go north, go south, go west, open door, take key.\nAttic."
    )


def test_admissible_are_the_actions_that_change_something() -> None:
    shown = [result.admissible_actions for result in do(small(), SOLUTION)]
    assert shown == [
        ("go south",),
        ("go east", "go north", "take key"),
        ("go east", "go north"),
        ("go north", "go west"),
        ("go south", "open door"),
        (),
    ]


@pytest.mark.parametrize(
    ("goal", "words"),
    [((0, 2), "north"), ((0, 4), "north east"), ((4, 0), "south west"), ((2, 0), "west"), ((2, 2), "")],
)
def test_directions(goal: Cell, words: str) -> None:
    assert direction((2, 2), goal) == words


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("go north", "go north"), ("North.", "go north"), ("  GO_west\n", "go west"), ("**take-key**", "take key"),
        ("unlock the door", "open door"), ("", None), ("go", None), ("go up", None), ("north and east", None),
        ("n" * 41, None),
    ],
)  # fmt: skip
def test_actions_are_read_tolerantly(text: str, action: str | None) -> None:
    assert read_action(text) == action


# --- ends, rewards and states ----------------------------------------------------------------------------------------


def test_the_opened_door_alone_is_rewarded() -> None:
    results = do(small(), SOLUTION)
    assert [r.reward for r in results] == [0, 0, 0, 0, 0, 1]
    assert [r.terminated for r in results] == [False] * 5 + [True]
    assert [r.success for r in results] == [None] * 5 + [True]
    assert not any(r.truncated for r in results)


def test_the_last_step_may_still_solve_it() -> None:
    assert do(small(max_steps=5), SOLUTION)[-1].success
    cut = do(small(max_steps=4), SOLUTION[:4])[-1]
    assert (cut.truncated, cut.terminated, cut.success) == (True, False, False)


def test_a_step_after_the_end_is_refused() -> None:
    episode = small(max_steps=1)
    do(episode, ["go south"])
    with pytest.raises(EnvError, match="the episode is over"):
        asyncio.run(episode.step("go north"))


def test_a_move_that_is_taken_back_leads_to_a_state_already_seen() -> None:
    walk = ["go south", "go north", "go south", "take key", "go east", "go west"]
    keys = [result.state_key for result in do(small(), walk)]
    assert keys[0] == keys[2] and keys[1] == keys[3] and keys[4] == keys[6]
    assert len(set(keys)) == 4  # attic, dairy, dairy with the key, cellar with the key


# --- the oracle ------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), rng=st.randoms(use_true_random=False), n=st.integers(0, 10))
@settings(max_examples=50)
def test_the_oracle_goes_the_shortest_way_from_anywhere(seed: int, rng: random.Random, n: int) -> None:
    environment, task = Keyhole(max_steps=60), Task("keyhole", seed=seed)
    taken = [rng.choice(["go east", "go north", "go south", "go west", "take key", "dance"]) for _ in range(n)]
    episode, house = environment.start(task), draw(seed, 4, 4, 6)
    here = do(episode, taken)[-1]
    plan = environment.plan(task, taken)
    assert plan is not None
    assert do(environment.start(task), [*taken, *plan])[-1].success
    cell = next(c for c, name in house.rooms.items() if f"/{name}/" in str(here.state_key))
    to_key = 0 if str(here.state_key).endswith("/key") else distance(house, cell, house.key) + 1
    last = cell if to_key == 0 else house.key
    assert len(plan) == to_key + distance(house, last, house.door) + 1


def test_no_plan_where_too_few_steps_are_left() -> None:
    environment = Keyhole()
    task = environment.tasks("test")[0]
    plan = environment.plan(task, [])
    assert plan is not None
    hasty = Keyhole(max_steps=len(plan))
    assert hasty.plan(task, []) == plan
    assert hasty.plan(task, ["dance"]) is None
    assert hasty.plan(task, plan) == ()  # solved already
    assert Keyhole(max_steps=len(plan) - 1).plan(task, []) is None


def test_what_the_page_says_of_random_play_and_the_oracle() -> None:
    environment = Keyhole()
    n_random, lengths = 0, []
    for task in environment.tasks("test")[:200]:
        plan = environment.plan(task, [])
        assert plan is not None
        lengths.append(len(plan))
        rng, episode = random.Random(task.seed), environment.start(task)
        result = episode.opening
        while result.success is None:
            result = asyncio.run(episode.step(rng.choice(result.admissible_actions)))
        n_random += result.success
    assert n_random == 1
    assert sum(lengths) == 1586  # 7.9 actions each


# --- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment", [Keyhole(n_train=50), Keyhole(rows=2, columns=5, loops=0, compass=False, max_steps=40, n_test=9)]
)
def test_all_promises_are_kept(environment: Keyhole) -> None:
    report = check_environment(environment)
    assert report.ok, str(report)


def test_a_step_limit_that_no_plan_keeps_is_cautioned() -> None:
    def said(**keys: int) -> list[str]:
        world = ", ".join(["kind: keyhole", *(f"{key}: {value}" for key, value in keys.items())])
        found = cautions(load(ROOT / "recipes/keyhole/keyhole-grpo.yaml", [f"environment={{{world}}}"]))
        return [text for text in found if "houses" in text]

    world = Keyhole(rows=5, columns=5, loops=0)
    lengths = [len(world.start(task).way_out()) for task in world.tasks("train")[:100]]
    n = sum(length > 16 for length in lengths)
    assert n and said(rows=5, columns=5, loops=0) == [
        f"environment.max_steps is 16, and {n} of the first 100 houses take more, up to {max(lengths)}: "
        "nobody can solve them"
    ]
    assert said() == said(rows=5, columns=5, loops=0, max_steps=max(lengths)) == []
