"""MiniHack in words: levels of the package, what is told, games that go the same way again, and the explorer."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from environments.base import Environment, can_demonstrate, max_concurrent_episodes
from environments.contrib.minihack.environment import EXPLORED, FAMILIES, LEVELS, MiniHack, read_action
from environments.contrib.minihack.game import POOL, Cells, View, name_of
from environments.contrib.minihack.oracle import is_frontier, mark_visited, shortest_path, surroundings
from environments.transcript import awaited
from environments.workers.pool import SHARED, Processes
from rlhf.data import Task
from rlhf.errors import DataError, EnvError
from tests.environments.play import play, play_at_random, total

pytest.importorskip("nle")
pytest.importorskip("minihack")

ROOM = MiniHack()
DARK = MiniHack(level="Room-Dark-5x5")
MONSTER = MiniHack(level="Room-Monster-15x15", max_steps=60)
MAZE = MiniHack(level="MazeWalk-9x9")
CORRIDOR = MiniHack(level="Corridor-R2")
DOORS = MiniHack(level="MultiRoom-N2")
WHOLE = MiniHack(level="NetHack-Staircase", max_steps=500)
WORDS = MiniHack(level="NetHack-Staircase", max_steps=500, shown="words")


def first(environment: MiniHack, i: int = 0) -> Task:
    return environment.tasks("test")[i]


def told(results: list[Any]) -> list[Any]:
    return [(r.reply, r.reward, r.state_key, r.admissible_actions, r.success) for r in results]


# --- levels and tasks ----------------------------------------------------------------------------------------------


def test_a_misspelt_level_names_the_nearest() -> None:
    with pytest.raises(ValidationError, match="did you mean 'Room-Dark-5x5'"):
        MiniHack(level="Room-Drak-5x5")
    assert MiniHack(level="MiniHack-Room-Dark-5x5-v0") == DARK


def test_levels_and_their_limits_are_those_of_the_package() -> None:
    registered = __import__("gymnasium").registry
    assert all(name_of(name) in registered for name in LEVELS) and len(LEVELS) == 72
    some = ("Room-Ultimate-15x15", "Corridor-R5", "HideNSeek-Big", "MultiRoom-N2", "KeyRoom-S15", "Memento-F2")
    for name in (*some, "NetHack-Staircase", "NetHack-StaircasePet"):
        made = __import__("gymnasium").make(name_of(name), disable_env_checker=True).unwrapped
        assert made._max_episode_steps == LEVELS[name]
        made.close()


def test_it_is_an_environment_that_pickles_and_demonstrates_where_exploring_helps() -> None:
    assert isinstance(ROOM, Environment) and pickle.loads(pickle.dumps(ROOM)) == ROOM
    assert can_demonstrate(ROOM) and not can_demonstrate(MiniHack(level="River"))
    assert set(FAMILIES) >= EXPLORED and ROOM.properties.package == "minihack 1.0.2, nle 1.3.0"


def test_splits_are_ranges_of_seeds() -> None:
    few = MiniHack(n_train=3, n_dev=2, n_test=1)
    assert {s: [t.seed for t in few.tasks(s)] for s in ("train", "dev", "test")} == {
        "train": [0, 1, 2],
        "dev": [10_000_000, 10_000_001],
        "test": [20_000_000],
    }
    assert few.tasks("test")[0].id == "minihack-1.0.2-nle-1.3.0/Room-Random-5x5/test/20000000"
    with pytest.raises(EnvError, match="no such split"):
        few.tasks("valid")
    with pytest.raises(DataError, match="of another environment"):
        DARK.start(first(ROOM))


# --- what is told --------------------------------------------------------------------------------------------------


def test_a_view_is_the_message_the_map_and_the_things_by_distance() -> None:
    # Drawn by hand: the agent at (5, 3), a boulder next to it, two jackals of which the nearer is two cells away.
    words = ("human rogue", "boulder", "jackal", "jackal", "staircase down", "floor of a room")
    seen = Cells((5, 6, 5, 9, 4, 5), (3, 3, 1, 4, 4, 4), "@0dd>.", words)
    view = View("You hear a door.", seen, (5, 3), (7, 12), (), False, b"")
    assert len(view.cells) == 6 and view.cells[9, 4] == ("d", "jackal")
    assert view.text == (
        "You hear a door.\n d\n\n @0\n>.   d\n"
        "You see: boulder 1 east; staircase down 1 south 1 west; jackal 2 north and 1 more.\nHP 7 of 12."
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("north", 0),
        ("Go North.", 0),
        ("north-east", 1),
        ("move north east", 1),
        ("pickup", 2),
        ("far north-east", 3),
        ("run far North East", 3),
        ("run northeast", 3),
        ("yes", None),
        ("k", None),
    ],
)
def test_directions_are_read_in_several_ways(text: str, number: int | None) -> None:
    assert read_action(text, {"north": 0, "northeast": 1, "pick up": 2, "far northeast": 3}) == number


def test_the_first_room_is_told_and_solved_in_three_steps() -> None:
    # The map of seed 20000000: the staircase is three columns to the east and one row up.
    results = play(ROOM, first(ROOM), ["East", "go east", "northeast"])
    assert results[0].reply.splitlines()[2:] == [
        ".....", ".....", "....>", ".@...", ".....", "You see: staircase down 1 north 3 east.", "HP 12 of 12.",
    ]  # fmt: skip
    assert results[-1].reply == "Solved." and results[-1].success and results[-1].terminated
    assert total(results) == 1.0 and results[-1].admissible_actions == ()


def test_words_in_place_of_the_map_tell_exits_and_the_frontier() -> None:
    # Drawn by hand: the agent in a door at (5, 3), entered from the west; a wall to the south, floor to the northeast.
    words = ("human rogue", "floor of a room", "corridor", "corridor", "wall", "floor of a room")
    view = View("", Cells((5, 4, 6, 7, 5, 6), (3, 3, 3, 2, 4, 2), "@.##-.", words), (5, 3), (7, 12), (), False, b"")
    visited = {(4, 3): "floor of a room", (5, 3): "open door"}
    assert surroundings(view, visited) == "Exits: east, west.\nUnexplored: 1 east."
    assert surroundings(view, {**visited, (5, 3): "doorway"}).startswith("Exits: east, west, northeast.")
    # One that has been there goes further, and by a diagonal, which the door does not allow.
    visited |= {(6, 3): "corridor", (6, 2): "floor of a room"}
    assert shortest_path(view, visited, is_frontier) == ["east", "northeast"]
    assert surroundings(view, visited) == "Exits: east, west.\nUnexplored: 1 north 2 east."
    assert surroundings(view, {**visited, (7, 2): ""}) == "Exits: east, west."
    results = play(WORDS, first(WORDS, 1), WORDS.plan(first(WORDS, 1), ()) or ())
    assert results[-1].success and all("\n-" not in r.reply and "Exits: " in r.reply for r in results[:-1])
    assert results[0].reply.count("\n") == 5 and "Unexplored: " in results[0].reply and "map" not in results[0].reply
    # The frontier is part of the state, and nothing else of a game depends on how it is shown.
    mapped = play(WHOLE, first(WHOLE, 1), WORDS.plan(first(WORDS, 1), ()) or ())
    assert [str(r.state_key).split()[0] for r in results] == [r.state_key for r in mapped]


def test_cells_that_a_run_crosses_are_visited_with_their_terrain() -> None:
    # Drawn by hand: a corridor of three cells and a door; a jackal stands on the second cell.
    def view(at: tuple[int, int], second: tuple[str, str] = ("#", "corridor"), level: int = 1) -> View:
        cells = Cells((1, 2, 3, 4), (1, 1, 1, 1), f"#{second[0]}#|", ("corridor", second[1], "corridor", "open door"))
        return View("", cells, at, (7, 12), (), False, b"", level=(0, level))

    visited = {(1, 1): "", (2, 1): "corridor"}
    mark_visited(visited, view((1, 1), ("d", "jackal")), view((4, 1)))
    assert visited == {(1, 1): "", (2, 1): "corridor", (3, 1): "corridor", (4, 1): "open door"}
    mark_visited(visited, view((4, 1)), view((4, 1)))
    assert len(visited) == 4
    mark_visited(visited, view((4, 1)), view((3, 1), level=2))  # through a trap door
    assert visited == {(3, 1): ""}


def test_a_run_leads_as_far_as_steps_and_leaves_the_same_state() -> None:
    # From the chest in the second column from the east to the wall in the west, five columns away.
    run, steps = play(WORDS, first(WORDS), ["west", "far west"])[-1], play(WORDS, first(WORDS), ["west"] * 6)[-1]
    assert run.state_key == steps.state_key and "a chest 5 east" in run.reply and "Unexplored: " in run.reply
    assert not play(ROOM, first(ROOM), ["far west"])[-1].valid  # MiniHack's levels have none


def test_text_that_is_no_action_costs_a_step_and_changes_nothing() -> None:
    short = MiniHack(max_steps=2)
    results = play(short, first(short), ["fly away", "\x1b[2J"])
    assert [r.valid for r in results] == [True, False, False]
    assert results[1].state_key == results[0].state_key and "Unknown action. Actions: east, north" in results[1].reply
    assert results[2].truncated and results[2].success is False


def test_the_package_s_reward_charges_for_walking_into_walls() -> None:
    # The agent stands in the second column; the second step west is into the wall and takes no time.
    paid = MiniHack(reward="package")
    assert [r.reward for r in play(paid, first(paid), ["west", "west"])] == [0.0, 0.0, -0.01]
    assert total(play(ROOM, first(ROOM), ["west", "west"])) == 0.0


def test_a_kick_asks_for_a_direction() -> None:
    results = play(CORRIDOR, first(CORRIDOR), ["kick", "search", "north"])
    assert "direction" in results[1].reply and "search" not in results[1].admissible_actions
    assert [r.valid for r in results] == [True, True, False, True]
    assert "search" in results[-1].admissible_actions


def test_a_question_for_an_object_offers_objects_and_a_way_out() -> None:
    asked, refused, left = play(WHOLE, first(WHOLE), ["eat", "yes", "cancel"])[1:]
    assert "What do you want to eat?" in asked.reply and "cancel: none" in asked.reply
    assert "cancel" in asked.admissible_actions and "yes" not in asked.admissible_actions
    assert not refused.valid and left.valid and "search" in left.admissible_actions
    letters = set(asked.admissible_actions) - {"cancel"}
    assert all(f"{letter}: " in asked.reply for letter in letters)


# --- the same again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment", [MONSTER, MAZE, DOORS, MiniHack(level="HideNSeek-Lava"), WHOLE], ids=lambda e: e.level
)
def test_a_game_goes_the_same_way_again_after_others_in_its_world(environment: MiniHack) -> None:
    task = first(environment, 1)
    before = told(play_at_random(environment, task, 5, 40))
    play_at_random(environment, first(environment, 2), 6, 15)
    assert told(play_at_random(environment, task, 5, 40)) == before
    POOL.clear()
    assert told(play_at_random(environment, task, 5, 40)) == before


def test_another_seed_is_another_game() -> None:
    assert len({play(ROOM, task, [])[0].reply for task in ROOM.tasks("test")[:20]}) > 10
    assert len({play(DOORS, task, [])[0].reply for task in DOORS.tasks("test")[:5]}) == 5  # rooms made by minigrid


# --- several games in one process ----------------------------------------------------------------------------------


async def in_turn(games: Sequence[tuple[Any, Task]], n_steps: int = 40) -> list[list[Any]]:
    """Play all games at a time, one step of each after another; actions are drawn as `play_at_random` draws them."""

    async def game(number: int, environment: Any, task: Task) -> list[Any]:
        rng, episode = random.Random(number), await awaited(environment.start(task))
        results = [episode.opening]
        while len(results) <= n_steps and not (results[-1].terminated or results[-1].truncated):
            await asyncio.sleep(0)
            results.append(await episode.step(rng.choice(results[-1].admissible_actions)))
        await episode.close()
        return told(results)

    return await asyncio.gather(*(game(i, *one) for i, one in enumerate(games)))


def alone(games: Sequence[tuple[Any, Task]], n_steps: int = 40) -> list[list[Any]]:
    return [told(play_at_random(environment, task, i, n_steps)) for i, (environment, task) in enumerate(games)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where games make their folders, here and in workers; empty, with no world loaded."""
    POOL.clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


BESIDE = [
    *("Room-Ultimate-15x15", "NetHack-Staircase"),
    *("MultiRoom-N2", "HideNSeek-Lava", "ExploreMaze-Easy", "Memento-Short-F2"),
]
LEVELS_BESIDE = [
    pytest.param(BESIDE, id="some"),
    pytest.param([level for level in LEVELS if "KeyRoom" not in level], id="all", marks=pytest.mark.extended),
]


@pytest.mark.parametrize("levels", LEVELS_BESIDE)
def test_games_in_turn_go_as_they_go_alone_and_again(levels: Sequence[str]) -> None:
    made = [MiniHack(level=level) for level in levels]
    games = [(environment, first(environment, i)) for i in range(3) for environment in made]
    before = alone(games)
    assert asyncio.run(in_turn(games)) == before, "which are fifteen at a time of five levels, or more"
    assert asyncio.run(in_turn(games)) == before, "in worlds that others have played in"
    POOL.clear()


def test_many_games_in_turn_leave_nothing_and_do_not_grow(place: Path) -> None:
    gc.collect()
    process = psutil.Process()
    n_files = process.num_fds()
    games = [(MONSTER, task) for task in MONSTER.tasks("train")[:36]]
    for _ in range(2):
        asyncio.run(in_turn(games, 5))
    held, kept = process.memory_info().rss, len(list(place.iterdir()))
    assert kept == SHARED, "the shelf has as many worlds as a worker has games, and the others are closed"
    for _ in range(4):
        asyncio.run(in_turn(games, 5))
    assert process.memory_info().rss - held < 60 * 2**20, "where worlds that stayed would be 4 x 36 of 2 MB"
    POOL.clear()
    gc.collect()
    assert not list(place.iterdir()) and process.num_fds() <= n_files + 2


def test_a_worker_plays_many_games_at_a_time_and_leaves_nothing(place: Path) -> None:
    pool = Processes(environment=MONSTER, n_workers=1)
    games = [(MONSTER, task) for task in MONSTER.tasks("test")[:8]]
    try:
        assert max_concurrent_episodes(pool) == SHARED
        served = [(pool, task) for _, task in games]
        assert asyncio.run(in_turn(served)) == alone(games)
        pids = pool._pool().pids()
        assert len(pids) == 1
    finally:
        POOL.clear()
        pool.close()
    assert not list(place.iterdir()) and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_level_in_which_an_action_may_hang_has_a_worker_to_itself() -> None:
    assert max_concurrent_episodes(Processes(environment=MiniHack(level="KeyRoom-S5"), n_workers=3)) == 3


# --- the explorer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "lengths"),
    [
        *((ROOM, [3, 4, 4, 3, 1]), (DARK, [8, 4, 6, 3, 1]), (MAZE, [8, 29, 4, 31, 3]), (DOORS, [5, 6, 4, 5, 5])),
        (WHOLE, [114, 115, 167]),
    ],
    ids=lambda value: getattr(value, "level", ""),
)
def test_plans_are_those_of_the_pinned_version_and_solve(environment: MiniHack, lengths: list[int]) -> None:
    # Of the first whole game the staircase is behind a wall that hides its door.
    tasks = environment.tasks("test")[environment is WHOLE :][: len(lengths)]
    plans = [environment.plan(task, ()) or () for task in tasks]
    assert [len(plan) for plan in plans] == lengths
    for task, plan in zip(tasks, plans, strict=True):
        assert play(environment, task, plan)[-1].success


def test_a_plan_goes_on_from_where_one_is() -> None:
    # Two steps to the west and south are made good: the staircase is then five columns away instead of three.
    task, taken = first(ROOM), ["west", "nonsense", "southwest"]
    plan = ROOM.plan(task, taken) or ()
    assert len(plan) == 4 and play(ROOM, task, [*taken, *plan])[-1].success
    whole = WHOLE.plan(first(WHOLE, 1), ()) or ()
    assert [WHOLE.plan(first(WHOLE, 1), whole[:n]) == whole[n:] for n in (1, 10, 40)] == [True] * 3


def test_where_the_steps_are_too_few_or_the_staircase_is_behind_a_river_there_is_no_plan() -> None:
    short, river = MiniHack(max_steps=2), MiniHack(level="River-Narrow", max_steps=60)
    assert short.plan(first(short), ()) is None and river.plan(first(river), ()) is None
