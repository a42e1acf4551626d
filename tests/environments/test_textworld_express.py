"""TextWorldExpress: tasks, transcripts, oracle and known scores, played in the real package."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from environments.base import Environment, Episode, Oracle, StepResult
from environments.check import check_environment
from environments.contrib.textworld_express.environment import PARAMETERS, SPLITS, Game, TextWorldExpress
from environments.contrib.textworld_express.sessions import UNKNOWN_ACTION, Session, borrowed, close_jvm
from environments.packages import version_of
from rlhf.data import Task
from rlhf.errors import DataError, EnvError, RecipeError
from tests.environments.play import play, play_at_random
from tests.environments.textworld_games import FIVE_ROOMS, seed_of

GAMES: tuple[Game, ...] = get_args(Game)
VERSION = version_of("textworld-express", "twx")


@pytest.fixture(scope="module", autouse=True)
def _end_java() -> Iterator[None]:
    yield
    close_jvm()


# --- settings ------------------------------------------------------------------------------------------------------


def test_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError) as caught:
        TextWorldExpress(game="coin", params={"numLocation": 5})
    error = caught.value
    assert error.where == "params.numLocation"
    assert error.expected == "includeDoors, limitInventorySize, numDistractorItems, numLocations"
    assert error.hint == "did you mean 'numLocations'?"


@pytest.mark.parametrize(
    ("game", "params"),
    [
        ("sorting", {"numLocations": 3}),
        ("coin", {"numLocations": 12}),
        ("coin", {"numLocations": True}),
        ("coin", {"includeDoors": 2}),
        ("twc", {"numItemsToPutAway": 0}),
        ("mapreader", {"maxDistanceApart": 0}),
    ],
)
def test_a_value_without_games_is_refused(game: Game, params: dict[str, int]) -> None:
    with pytest.raises(RecipeError):
        TextWorldExpress(game=game, params=params)


@pytest.mark.parametrize("settings", [{"game": "chess"}, {"game": "coin", "params": {"numLocations": "5"}}, {}])
def test_wrong_types_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises((ValidationError, TypeError)):
        TextWorldExpress(**settings)


@pytest.mark.parametrize("game", GAMES)
def test_the_table_of_parameters_is_the_package_s(game: Game) -> None:
    with pytest.raises(EnvError) as caught, borrowed(game, "nonsense=1"):
        pass
    # "Known properties: numLocations, numDistractorItems.", "None." for none; one game forgets a comma before "None".
    told = caught.value.got.partition("Known properties: ")[2].rstrip(". ").removesuffix("None")
    assert set(filter(None, told.split(", "))) == set(PARAMETERS[game])
    with borrowed(game, "") as session:
        session.begin(0, "train")
        values = json.loads(session.jvm.call(session._java.getGenerationPropertiesJSON))
    values = {"memorization": 0, "verbose": 0} | values  # `simonsays` tells these only when they are given
    assert {name: values[name] for name in PARAMETERS[game]} == {n: d for n, (_, _, d) in PARAMETERS[game].items()}


def test_the_ends_of_all_ranges_give_games() -> None:
    for game, parameters in PARAMETERS.items():
        for name, (low, high, _) in parameters.items():
            for value in {low, high}:
                # Some pairs allow no game for some seeds; for two rooms, 40 of 100 seeds do.
                with borrowed(game, f"{name}={value}") as session:
                    assert any(_begins(session, seed) for seed in range(30)), (game, name, value)


def _begins(session: Session, seed: int) -> bool:
    try:
        return bool(session.begin(seed, "train").text)
    except EnvError:
        return False


def test_it_is_an_environment_with_an_oracle_and_pickles() -> None:
    assert isinstance(FIVE_ROOMS, Environment)
    assert isinstance(FIVE_ROOMS, Oracle)
    assert pickle.loads(pickle.dumps(FIVE_ROOMS)) == FIVE_ROOMS


# --- tasks ---------------------------------------------------------------------------------------------------------


def test_splits_are_the_package_s_seeds_in_order() -> None:
    seeds = {split: [task.seed for task in FIVE_ROOMS.tasks(split)] for split in SPLITS}
    assert seeds["train"] == list(range(1000))
    assert seeds["dev"] == list(range(10000, 11000))
    assert seeds["test"] == list(range(20000, 21000))
    with pytest.raises(EnvError, match="no such split"):
        FIVE_ROOMS.tasks("validation")


def test_ids_name_version_game_and_the_parameters_that_differ_from_the_defaults() -> None:
    same = TextWorldExpress(game="mapreader", params={"maxDistanceApart": 2, "includeDoors": False, "numLocations": 5})
    wanted = f"textworld_express-{VERSION}/mapreader/maxDistanceApart=2,numLocations=5/test/20003"
    assert FIVE_ROOMS.tasks("test")[3].id == same.tasks("test")[3].id == wanted
    plain = TextWorldExpress(game="sorting").tasks("train")[0]
    assert plain.id == f"textworld_express-{VERSION}/sorting/default/train/0"


def test_seeds_without_a_game_are_left_out() -> None:
    environment = TextWorldExpress(game="mapreader", params={"numLocations": 5})  # four rooms apart by default
    listed = environment.tasks("test")
    assert 700 < len(listed) < 1000
    missing = min(set(range(20000, 21000)) - {task.seed for task in listed})
    unlisted = Task(id=listed[0].id.replace(str(listed[0].seed), str(missing)), seed=missing)
    with pytest.raises(EnvError, match="Java raised"):
        environment.start(unlisted)
    for task in listed[:100]:
        assert play(environment, task, ())[0].reply


def test_a_task_of_another_environment_is_refused() -> None:
    with pytest.raises(DataError, match="another environment"):
        TextWorldExpress(game="mapreader").start(FIVE_ROOMS.tasks("test")[0])


# --- episodes ------------------------------------------------------------------------------------------------------


def test_the_opening_tells_the_task() -> None:
    task = FIVE_ROOMS.tasks("test")[0]
    silent = TextWorldExpress(game="mapreader", params=FIVE_ROOMS.params, describe_task=False)
    told, bare = (play(environment, task, ())[0] for environment in (FIVE_ROOMS, silent))
    assert told.reply.startswith("Your task is to take the coin")
    assert told.reply.endswith(f"\n\n{bare.reply}")
    assert bare.reply.startswith("You are in the ")
    assert told.state_key == bare.state_key


def test_an_unknown_action_is_answered_as_the_package_does_and_costs_a_step() -> None:
    task = FIVE_ROOMS.tasks("test")[0]
    with borrowed("mapreader", FIVE_ROOMS._text) as session:
        session.begin(task.seed, "test")
        answer = json.loads(session.jvm.call(session._java.stepJSON, "Look Around"))
    assert answer["observation"] == UNKNOWN_ACTION
    opening, wrong, right = play(FIVE_ROOMS, task, ["Look Around", " look around\n"])
    assert (wrong.reply, wrong.valid, right.valid) == (UNKNOWN_ACTION, False, True)
    assert wrong.state_key == opening.state_key
    assert wrong.admissible_actions == opening.admissible_actions


def test_the_step_limit_truncates() -> None:
    environment = TextWorldExpress(game="coin", max_steps=3)
    last = play(environment, environment.tasks("train")[0], ["inventory", "no action", "inventory"])[-1]
    assert (last.truncated, last.terminated, last.success) == (True, False, False)


def test_an_episode_that_is_over_or_closed_takes_no_step() -> None:
    environment = TextWorldExpress(game="simonsays")
    task = environment.tasks("train")[0]

    async def go(close: bool) -> None:
        episode = environment.start(task)
        assert isinstance(episode, Episode)
        wrong = set(episode.opening.admissible_actions) - set(environment.plan(task, ()) or ())
        if close:
            await episode.close()
        else:
            assert (await episode.step(min(wrong))).success is False
        try:
            await episode.step("anything")
        finally:
            await episode.close()

    for close in (False, True):
        with pytest.raises(EnvError, match="over"):
            asyncio.run(go(close))


def test_rewards_are_differences_of_the_score() -> None:
    task = FIVE_ROOMS.tasks("test")[3]
    results = play(FIVE_ROOMS, task, FIVE_ROOMS.plan(task, ()) or ())
    # 0.5 for the coin, 0.5 for putting it into the box.
    assert [r.reward for r in results if r.reward] == [0.5, 0.5]
    assert results[-1].success is True and results[-1].terminated


def test_state_keys_tell_states_apart_and_know_them_again() -> None:
    task = seed_of(FIVE_ROOMS, 20002)
    there = ["move south", "move north"]
    keys = [r.state_key for r in play(FIVE_ROOMS, task, [*there, "read map", *there])]
    assert keys[0] == keys[2] == keys[3] == keys[5]
    assert keys[1] == keys[4] != keys[0]
    plan = FIVE_ROOMS.plan(task, ()) or ()
    path = play(FIVE_ROOMS, task, plan)
    # In the same rooms, before and after taking the coin: all keys differ but the two around `read map`.
    assert len({r.state_key for r in path}) == len(path) - 1


def test_state_keys_remember_how_other_rooms_were_left() -> None:
    environment = TextWorldExpress(game="coin")
    n_seen = 0
    for task in environment.tasks("train")[:40]:
        opening = play(environment, task, ())[0]
        doors = [a.split()[-1] for a in opening.admissible_actions if a.startswith("open door")]
        if len(doors) < 2:
            continue
        one, other = doors[:2]
        both = play(environment, task, [f"open door to {one}", f"open door to {other}", f"move {one}"])[-1]
        only = play(environment, task, [f"open door to {one}", f"move {one}"])[-1]
        assert both.reply == only.reply
        assert both.state_key != only.state_key
        n_seen += 1
    assert n_seen > 3


# --- determinism ---------------------------------------------------------------------------------------------------


def all_transcripts() -> list[list[StepResult]]:
    environments = [TextWorldExpress(game=game) for game in GAMES]
    tasks = [(e, task) for e in environments for task in (e.tasks("train")[7], e.tasks("test")[11])]
    return [play_at_random(environment, task, seed=i) for i, (environment, task) in enumerate(tasks)]


def test_two_machines_give_the_same_transcripts() -> None:
    first = all_transcripts()
    close_jvm()
    assert all_transcripts() == first


def test_64_games_at_once_equal_games_of_their_own() -> None:
    jobs = [
        (environment, task, seed)
        for environment in (TextWorldExpress(game=game) for game in GAMES)
        for task in environment.tasks("test")[1:3]  # four episodes of one task, as in a group
        for seed in range(4)
    ]
    alone = [play_at_random(e, task, seed, n=25) for e, task, seed in jobs]

    async def one(environment: TextWorldExpress, task: Task, seed: int) -> list[StepResult]:
        rng, episode = random.Random(seed), environment.start(task)
        results = [episode.opening]
        while len(results) <= 25 and not (results[-1].terminated or results[-1].truncated):
            await asyncio.sleep(0)  # the others' turn
            results.append(await episode.step(rng.choice(results[-1].admissible_actions)))
        await episode.close()
        return results

    async def together() -> list[list[StepResult]]:
        return await asyncio.gather(*(one(*job) for job in jobs))

    assert asyncio.run(together()) == alone
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda job: play_at_random(job[0], job[1], job[2], n=25), jobs)) == alone


def test_replaying_the_actions_is_a_snapshot() -> None:
    environment = TextWorldExpress(game="twc")
    task, actions = environment.tasks("train")[5], ["move north", "look around", "move west", "inventory"]
    again = play(environment, task, actions)
    for n in range(len(actions) + 1):
        assert play(environment, task, actions[:n])[-1] == again[n]


@pytest.mark.extended
def test_the_contract_is_kept() -> None:
    report = check_environment(TextWorldExpress(game="sorting"), n_tasks=2)
    assert report.ok, str(report)


# --- known scores --------------------------------------------------------------------------------------------------

#: Tasks solved and mean score of random admissible actions, then of the oracle, on test seeds 20000 to 20039 with 50
#: steps; random actions are drawn with `random.Random(seed of the task)`. Measured with version 1.1.0.
KNOWN: tuple[tuple[Game, dict[str, int], int, float, float], ...] = (
    ("arithmetic", {}, 1, -0.925, 4.0),
    ("coin", {"numLocations": 5}, 23, 0.575, 2.75),
    ("cookingworld", {"numLocations": 1, "numIngredients": 1}, 0, 0.1413, 6.95),
    ("mapreader", {"numLocations": 5, "maxDistanceApart": 2}, 8, 0.4, 6.1),
    ("peckingorder", {}, 0, -1.0, 8.0),
    ("simonsays", {}, 0, -1.0, 5.0),
    ("sorting", {}, 0, -0.92, 8.5),
    ("twc", {"numLocations": 1, "numItemsToPutAway": 1}, 29, 0.75, 2.3),
)


@pytest.mark.parametrize(("game", "params", "n_random", "mean_random", "mean_oracle_steps"), KNOWN)
def test_scores_are_those_of_the_pinned_version(
    game: Game, params: dict[str, int], n_random: int, mean_random: float, mean_oracle_steps: float
) -> None:
    assert VERSION == "1.1.0"
    environment = TextWorldExpress(game=game, params=params)
    tasks = environment.tasks("test")[:40]
    played = [play_at_random(environment, task, seed=task.seed) for task in tasks]
    assert sum(results[-1].success is True for results in played) == n_random
    assert sum(sum(r.reward for r in results) for results in played) / 40 == pytest.approx(mean_random, abs=1e-3)
    plans = [environment.plan(task, ()) or () for task in tasks]
    assert all(play(environment, task, plan)[-1].success for task, plan in zip(tasks, plans, strict=True))
    assert sum(map(len, plans)) / 40 == pytest.approx(mean_oracle_steps)
