"""TextWorld: games made once, tasks, transcripts, oracle and known scores, played in the real package."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from environments.base import Environment, Oracle
from environments.check import check_environment
from environments.contrib.textworld import generate
from environments.contrib.textworld.environment import PARAMETERS, TextWorld
from environments.contrib.textworld.game import NOT_UNDERSTOOD, POOL, Play, clean, readable
from environments.workers.pool import SHARED
from rlhf.data import Task
from rlhf.errors import DataError, EnvError, RecipeError
from tests.environments.play import play, play_at_random, total

pytest.importorskip("textworld")

COOKING = TextWorld(params={"cook": True, "cut": True})
COIN = TextWorld(game="coin_collector", params={"level": 5}, max_steps=20)
COIN_50 = TextWorld(game="coin_collector", params={"level": 5})
TREASURE = TextWorld(game="treasure_hunter", params={"level": 10})
SIMPLE = TextWorld(game="simple", params={"rewards": "balanced", "goal": "brief"})


@pytest.fixture(scope="module", autouse=True)
def _games_of_this_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("RLHF_CACHE")
    os.environ["RLHF_CACHE"] = str(tmp_path_factory.mktemp("games"))
    yield
    POOL.clear()
    os.environ.pop("RLHF_CACHE")
    if before is not None:
        os.environ["RLHF_CACHE"] = before


def first(environment: TextWorld, split: str = "test") -> Task:
    return environment.tasks(split)[0]


# --- settings ------------------------------------------------------------------------------------------------------


def test_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError) as caught:
        TextWorld(params={"recipes": 1})
    error = caught.value
    assert (error.where, error.expected) == ("params.recipes", "recipe, take, go, open, cook, cut, drop")
    assert error.hint == "did you mean 'recipe'?"


@pytest.mark.parametrize(
    ("game", "params", "expected"),
    [
        ("cooking", {"go": 7}, "1, 6, 9, 12"),
        ("cooking", {"cook": 1}, "false, true"),
        ("cooking", {"take": 2}, "set take to at most recipe"),
        ("coin_collector", {"level": 160}, "1 to 150, 201 to 233"),
        ("treasure_hunter", {"level": True}, "1 to 30"),
        ("simple", {"goal": "short"}, "'detailed', 'brief', 'none'"),
    ],
)
def test_a_value_without_games_is_refused(game: Any, params: dict[str, Any], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        TextWorld(game=game, params=params)
    assert caught.value.expected == expected


@pytest.mark.parametrize("settings", [{"game": "zork"}, {"params": {"go": 6.0}}, {"max_steps": 0}])
def test_wrong_types_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TextWorld(**settings)


def test_the_tables_hold_what_the_package_accepts() -> None:
    # More rooms than 100 do not fit into the package's file format; level 151 has 2 x 51, level 234 has 3 x 34.
    levels = PARAMETERS["coin_collector"]["level"]
    rooms = [((level - 1) // 100 + 1) * ((level - 1) % 100 + 1) for level in levels]
    assert max(rooms) == 100 and len(levels) == 150 + 33


def test_it_is_an_environment_with_an_oracle_and_pickles() -> None:
    assert isinstance(COOKING, Environment) and isinstance(COOKING, Oracle)
    assert pickle.loads(pickle.dumps(COOKING)) == COOKING


# --- tasks ---------------------------------------------------------------------------------------------------------


def test_ids_name_the_package_its_contents_the_game_and_what_differs_from_the_defaults() -> None:
    same = TextWorld(params={"cut": True, "recipe": 1, "cook": True})
    wanted = "textworld-1.7.0-99b922f9/cooking/cook=1,cut=1/test/20000000"
    assert first(COOKING).id == first(same).id == wanted
    goal = TextWorld(game="simple", instructions="goal").tasks("train")[5].id
    assert goal == "textworld-1.7.0-99b922f9/simple/instructions=goal/train/5"


def test_splits_are_ranges_of_seeds_and_nothing_else_is_one() -> None:
    seeds = {split: [task.seed for task in COIN.tasks(split)] for split in COIN.properties.splits}
    assert seeds["train"] == list(range(1000))
    assert (seeds["dev"][0], seeds["test"][0], len(seeds["test"])) == (10_000_000, 20_000_000, 200)
    with pytest.raises(EnvError, match="no such split"):
        COIN.tasks("valid")


def test_a_task_of_another_environment_is_refused() -> None:
    with pytest.raises(DataError, match="another environment"):
        TREASURE.start(first(COIN))


# --- games ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "fingerprint"),
    [
        pytest.param(COOKING, "344835c6009f4f00", id="cooking"),
        pytest.param(COIN, "832ebf8c58959408", id="coin_collector"),
        pytest.param(TREASURE, "972929542934209f", id="treasure_hunter", marks=pytest.mark.extended),
        pytest.param(SIMPLE, "8bd556a19a495e58", id="simple", marks=pytest.mark.extended),
    ],
)
def test_a_seed_makes_the_game_it_always_made(environment: TextWorld, fingerprint: str) -> None:
    assert environment._made(first(environment)).fingerprint == fingerprint


def test_the_cooking_splits_are_the_package_s() -> None:
    task = first(COOKING)
    noted = json.loads(COOKING._made(task).path.with_suffix(".json").read_text())["metadata"]
    assert noted["settings"]["split"] == "test" and noted["settings"]["recipe_seed"] == 0
    assert noted["settings"]["cook"] is True and noted["settings"]["go"] == 1


def test_a_game_is_made_once_and_a_damaged_one_again() -> None:
    made = COIN._made(first(COIN))
    written = made.path.stat().st_mtime_ns
    assert COIN._made(first(COIN)) == made and made.path.stat().st_mtime_ns == written
    made.path.write_bytes(made.path.read_bytes()[:1000])
    POOL.clear()
    again = COIN._made(first(COIN))
    assert again == made and again.path.stat().st_size > 100_000
    assert [path.name for path in made.path.parent.parent.iterdir()] == [made.path.parent.name]  # nothing half made


def test_what_the_generator_says_is_in_the_message() -> None:
    with pytest.raises(EnvError, match="cannot be generated") as caught:
        generate.game("coin_collector", {"level": 999}, {}, 0)
    assert "Expected level to be within" in caught.value.got
    assert not list(Path(os.environ["RLHF_CACHE"]).rglob(".making-*"))


# --- episodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment", [COIN, *(pytest.param(one, marks=pytest.mark.extended) for one in (COOKING, TREASURE, SIMPLE))]
)
@pytest.mark.extended
def test_the_contract_is_kept(environment: TextWorld) -> None:
    report = check_environment(environment, n_tasks=1, call_limit_s=300)
    assert report.ok, str(report)


def test_the_opening_has_no_banner_and_no_answer_a_status_line() -> None:
    results = play_at_random(COOKING, first(COOKING), seed=0, n=30)
    assert results[0].reply.startswith("You are hungry! Let's cook a delicious meal.")
    for result in results:
        assert not any(mark in result.reply for mark in ("$$", "\n>", "\n\n\n", "RESTART"))
        assert result.reply == result.reply.strip() != ""


def test_the_end_is_told_without_the_menu() -> None:
    last = play(COOKING, first(COOKING), COOKING.plan(first(COOKING), ()) or ())[-1]
    assert last.reply.endswith("*** The End ***\n\nYou scored 5 out of a possible 5, in 10 turns.")
    assert (last.terminated, last.success, last.admissible_actions) == (True, True, ())


def test_rewards_are_shares_of_the_points_or_one_for_winning() -> None:
    task = first(COOKING)
    path = COOKING.plan(task, ()) or ()
    # Five points: hold the potato, roast it, slice it, hold the meal, eat the meal.
    assert [round(r.reward, 3) for r in play(COOKING, task, path) if r.reward] == [0.2] * 5
    sparse = TextWorld(params=COOKING.params, reward="success")
    assert [r.reward for r in play(sparse, task, path) if r.reward] == [1.0]


def test_state_keys_are_of_the_facts_and_the_points() -> None:
    task = first(COOKING)
    keys = [r.state_key for r in play(COOKING, task, ["look", "dance", "take knife from table", "drop knife"])]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert len({keys[0], keys[3], keys[4]}) == 3  # on the floor is not on the table
    back = [r.state_key for r in play(COOKING, task, ["take knife from table", "put knife on table"])]
    assert back[2] == back[0]


HOSTILE = (
    "quit", "RESTART", "undo", "save", "restore game.sav", "script", "tw-extra-infos score", "tw-trace-actions",
    "take knife. eat meal", "take knife then drop knife", "look\nquit", "\x00", "take \x1b[2J", "é" * 50, "a" * 5000,
    '"', "take knife; quit", "oops knife", "again", "", "   ", "q",
)  # fmt: skip


def test_no_text_reaches_what_is_not_the_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = play(COOKING, first(COOKING), HOSTILE)
    assert len(results) == len(HOSTILE) + 1
    assert {(r.reply, r.valid, r.state_key, r.terminated) for r in results[1:]} == {
        (NOT_UNDERSTOOD, False, results[0].state_key, False)
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["take the red hot pepper", "examine Cooking (3rd Ed.", "open Bob's door", "x 2"])
def test_plain_lines_reach_the_game(text: str) -> None:
    assert readable(text) == ("." not in text)


def test_what_the_game_cannot_read_is_not_valid_and_what_fails_is() -> None:
    results = play(COOKING, first(COOKING), ["frobnicate knife", "take unicorn", "go up", "get knife"])
    assert [r.valid for r in results[1:]] == [False, False, True, True]
    assert results[4].reply.startswith("You take the knife")


def test_blank_lines_and_the_prompt_are_taken_away() -> None:
    text = "\n-= Pantry =-\nHere.\n\n\n\nThere.\n\n>        -= Pantry =-0/3"
    assert clean(text) == "-= Pantry =-\nHere.\n\nThere."
    assert clean("Done.\n\n> 3/4\n") == "Done."


def test_the_step_limit_truncates_and_an_episode_that_is_over_takes_no_step() -> None:
    short = TextWorld(params=COOKING.params, max_steps=2)
    last = play(short, first(short), ["look", "look", "look"])[-1]
    assert (last.truncated, last.terminated, last.success) == (True, False, False)
    game = Play(COOKING._made(first(COOKING)))
    with pytest.raises(EnvError, match="over"):
        game.step("look")
    game.close()


def test_episodes_in_threads_equal_those_alone() -> None:
    jobs = [(COOKING, first(COOKING), seed) for seed in range(6)] + [(COIN, first(COIN), seed) for seed in range(2)]
    alone = [play_at_random(*job, n=15) for job in jobs]
    POOL.clear()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda job: play_at_random(*job, n=15), jobs)) == alone


def test_as_many_loaded_games_are_kept_as_a_worker_has_under_way() -> None:
    POOL.clear()
    game = COIN._made(first(COIN))
    taken = [POOL.take(game) for _ in range(SHARED)]
    for one in taken:
        one.begin()  # one that was never begun is not kept
        POOL.give_back(one)
    again = [POOL.take(game) for _ in range(SHARED)]
    try:
        assert {id(one) for one in again} == {id(one) for one in taken}
    finally:
        for one in again:
            one.close()


def test_episodes_leave_nothing_open() -> None:
    process, task = psutil.Process(), first(COIN)

    def attempt(seed: int) -> None:
        play(COIN, task, random.Random(seed).choices(["go south", "look", "go north"], k=2))

    for seed in range(10):
        attempt(seed)
    gc.collect()
    before = (process.num_fds(), process.memory_info().rss)
    for seed in range(60):
        attempt(seed)
    gc.collect()
    assert process.num_fds() - before[0] < 10  # a file left open by each attempt would be 60
    assert process.memory_info().rss - before[1] < 20 * 2**20


# --- oracle and known scores ---------------------------------------------------------------------------------------


def test_the_walkthrough_is_followed_from_anywhere_on_it() -> None:
    task = first(COOKING)
    whole = COOKING.plan(task, ()) or ()
    assert whole[:3] == ("inventory", "examine cookbook", "take yellow potato from counter") and len(whole) == 9
    for n in range(len(whole)):
        assert COOKING.plan(task, whole[:n]) == whole[n:]


def test_off_the_walkthrough_it_is_planned_again() -> None:
    task = first(COOKING)
    taken = ["dance", "take knife from table", "look"]
    path = COOKING.plan(task, taken)
    assert path is not None and play(COOKING, task, [*taken, *path])[-1].success
    wandered = ["go south", "go north", "go south"]
    assert COIN.plan(first(COIN), wandered) == ("go east", "go north", "go west", "take coin")


def test_where_there_is_no_way_there_is_no_plan() -> None:
    task = first(COOKING)
    whole = list(COOKING.plan(task, ()) or ())
    wrong = [*whole[:3], "cook yellow potato with stove"]  # fried, and the recipe says roasted: lost
    assert play(COOKING, task, wrong)[-1].success is False
    assert COOKING.plan(task, wrong) is None
    short = TextWorld(params=COOKING.params, max_steps=8)
    assert short.plan(task, ()) is None  # nine actions do not fit into eight steps


@pytest.mark.parametrize(
    ("environment", "n_actions", "n_won", "mean"),
    [
        pytest.param(COOKING, 9, 0, 0.30, id="cooking"),
        pytest.param(COIN_50, 5, 9, 0.90, id="coin_collector"),
        pytest.param(TREASURE, 5, 4, 0.40, id="treasure_hunter", marks=pytest.mark.extended),
        pytest.param(SIMPLE, 12, 0, 0.025, id="simple", marks=pytest.mark.extended),
    ],
)
def test_scores_are_those_of_the_pinned_version(
    environment: TextWorld, n_actions: int, n_won: int, mean: float
) -> None:
    task = first(environment)
    path = environment.plan(task, ()) or ()
    assert len(path) == n_actions and total(play(environment, task, path)) == pytest.approx(1.0)
    results = [play_at_random(environment, task, seed) for seed in range(10)]
    assert sum(r[-1].success is True for r in results) == n_won
    assert sum(map(total, results)) / 10 == pytest.approx(mean, abs=0.005)
