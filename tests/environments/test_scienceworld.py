"""ScienceWorld: tasks, transcripts in two machines, oracle and known scores, played in the real package."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from environments.base import Environment, Oracle
from environments.check import check_environment
from environments.contrib.scienceworld.environment import SPLITS, VARIATIONS, ScienceWorld
from environments.contrib.scienceworld.sessions import AMBIGUOUS, POOL, State
from rlhf.data import Task
from rlhf.errors import DataError, EnvError, RecipeError
from tests.environments.play import play, play_at_random, total

pytest.importorskip("scienceworld")

PLANT = ScienceWorld(task="find-plant", list_actions=False)
SHORT = ScienceWorld(task="find-plant", max_steps=4)


@pytest.fixture(scope="module", autouse=True)
def _cache_of_this_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("RLHF_CACHE")
    os.environ["RLHF_CACHE"] = str(tmp_path_factory.mktemp("gold"))
    yield
    POOL.clear()
    os.environ.pop("RLHF_CACHE")
    if before is not None:
        os.environ["RLHF_CACHE"] = before


def first(environment: ScienceWorld, split: str = "test") -> Task:
    return environment.tasks(split)[0]


# --- settings and tasks --------------------------------------------------------------------------------------------


def test_a_misspelt_task_names_the_nearest() -> None:
    with pytest.raises(ValidationError, match="did you mean 'find-plant'"):
        ScienceWorld(task="find-plnat")


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"simplifications": ("eazy",)}, "simplifications[0]"),
        ({"simplifications": ("noElectricalAction",)}, "simplifications"),
        ({"task": "test-conductivity", "simplifications": ("noElectricalAction",)}, "simplifications"),
    ],
)
def test_simplifications_that_do_not_work_are_refused(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(RecipeError) as caught:
        ScienceWorld(**settings)
    assert caught.value.where == where


def test_it_is_an_environment_with_an_oracle_and_pickles() -> None:
    assert isinstance(PLANT, Environment) and isinstance(PLANT, Oracle)
    assert pickle.loads(pickle.dumps(PLANT)) == PLANT


def test_splits_are_the_package_s() -> None:
    whole = ScienceWorld()
    assert {split: len(whole.tasks(split)) for split in SPLITS} == {"train": 3592, "dev": 1796, "test": 1819}
    assert sum(VARIATIONS.values()) == 7207
    # 300 variations: two quarters, one, and the rest.
    seeds = {split: [task.seed for task in PLANT.tasks(split)] for split in SPLITS}
    assert seeds == {"train": [*range(150)], "dev": [*range(150, 225)], "test": [*range(225, 300)]}
    with pytest.raises(EnvError, match="no such split"):
        PLANT.tasks("valid")


def test_all_tasks_alternate_and_a_number_of_variations_is_kept_to() -> None:
    few = ScienceWorld(n_variations=10).tasks("test")
    assert [task.info["task"] for task in few[:30]] == list(VARIATIONS)
    # Ten of each but for four with 9 (boil and its like), two with 5 (power-component), one with 8 and two with 9
    # (chemistry-mix), and 5 and 4 (identify-life-stages).
    assert len(few) == 30 * 10 - 4 * 1 - 2 * 5 - 2 - 2 * 1 - 5 - 6


def test_ids_name_the_package_its_contents_and_the_simplifications() -> None:
    assert first(PLANT).id == "scienceworld-1.2.3-94e4efd9/easy/find-plant/test/225"
    assert first(ScienceWorld(simplifications=())).id == "scienceworld-1.2.3-94e4efd9/full/boil/test/21"
    with pytest.raises(DataError, match="another environment"):
        ScienceWorld(task="boil").start(first(PLANT))


def test_the_table_is_the_package_s() -> None:
    session = POOL.take(None)
    try:
        for name in ("boil", "identify-life-stages-2"):
            session.begin(name, 0, "easy")
            assert session.jvm.call(session._java.getTaskMaxVariations, name) == VARIATIONS[name]
            listed = session.jvm.call(session._java.getVariationsTest).toString()
            wanted = [task.seed for task in ScienceWorld(task=name).tasks("test")]
            assert [int(number) for number in str(listed).strip("[]").split(",")] == wanted
        names = session.jvm.call(lambda: session.jvm.view.java.lang.String.join(" ", session._java.getTaskNames()))
        assert set(str(names).split()) == set(VARIATIONS)
    finally:
        POOL.give_back(session)


# --- episodes ------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_the_contract_is_kept() -> None:
    environment = ScienceWorld(task="find-plant", max_steps=20)
    report = check_environment(environment, n_tasks=1, max_steps=8, call_limit_s=600)
    assert report.ok, str(report)


def test_the_gold_path_reaches_100_and_rewards_sum_to_it() -> None:
    task = first(PLANT)
    path = PLANT.plan(task, ()) or ()
    assert path[:4] == ("open door to hallway", "go to hallway", "open door to greenhouse", "go to greenhouse")
    results = play(PLANT, task, path)
    assert results[0].reply.startswith("Your task is to find a(n) plant.") and "art studio" in results[0].reply
    assert (results[-1].success, results[-1].terminated) == (True, True)
    assert total(results) == pytest.approx(1.0) and len(path) == 12
    # 8 points come with the beginning, 9 with the door of the greenhouse, 50 with the focus, and so on.
    assert [round(100 * r.reward) for r in results if r.reward] == [8, 9, 50, 8, 8, 17]


@pytest.mark.extended
def test_the_oracle_goes_on_from_where_it_can() -> None:
    task = first(PLANT)
    whole = PLANT.plan(task, ()) or ()
    assert PLANT.plan(task, whole[:5]) == whole[5:]
    late = PLANT.plan(task, ["look around", "frobnicate"])
    assert late == whole and play(PLANT, task, ["look around", "frobnicate", *late])[-1].success
    assert PLANT.plan(task, ["focus on air"]) is None  # a mistake that ends the task
    assert ScienceWorld(task="find-plant", max_steps=11).plan(task, ()) is None


def test_a_fatal_mistake_takes_all_points_and_no_more() -> None:
    results = play(PLANT, first(PLANT), ["look around", "focus on air"])
    assert [round(100 * r.reward) for r in results] == [0, 8, -8]
    assert (results[-1].terminated, results[-1].success) == (True, False)


def test_the_step_limit_truncates() -> None:
    silent = ScienceWorld(task="find-plant", max_steps=2, list_actions=False)
    last = play(silent, first(silent), ["wait", "wait", "wait"])[-1]
    assert (last.truncated, last.terminated, last.success) == (True, False, False)


HOSTILE = ("", "é" * 20, "\x00\x1b[2J", "x" * 5000, "inventory\nlook around", "quit", "'; DROP", '{"tool": ')


def test_no_text_harms_it() -> None:
    results = play(PLANT, first(PLANT), HOSTILE)
    assert {(r.reply, r.valid) for r in results[1:5]} == {("No known action matches that input.", False)}
    assert not any(r.valid or r.terminated for r in results[1:]) and len(results) == len(HOSTILE) + 1


def test_an_ambiguous_request_is_answered_by_a_number() -> None:
    task = first(PLANT)
    way = ["open door to hallway", "go to hallway", "open door"]
    results = play(PLANT, task, [*way, "1", "close door", "no number"])
    asked, answered, again, dropped = results[3:]
    assert asked.reply.startswith(AMBIGUOUS) and asked.valid and answered.valid
    assert not answered.reply.startswith(AMBIGUOUS) and asked.state_key != answered.state_key
    assert again.reply.startswith(AMBIGUOUS) and not dropped.reply.startswith(AMBIGUOUS)
    state = State(asked.reply, 0, False, "")
    assert state.choices[:2] == ("0", "1") and State("The door is open.", 0, False, "").choices == ()


@pytest.mark.extended
def test_two_machines_and_one_that_has_played_give_the_same_transcripts() -> None:
    task = first(SHORT)
    alone = play_at_random(SHORT, task, seed=1)
    assert len(alone) == 5 and len(alone[0].admissible_actions) > 100
    play(PLANT, first(PLANT, "train"), ["wait", "open door to hallway"])
    assert play_at_random(SHORT, task, seed=1) == alone
    POOL.clear()
    assert play_at_random(SHORT, task, seed=1) == alone


def test_the_key_of_a_state_knows_it_again() -> None:
    keys = [r.state_key for r in play(PLANT, first(PLANT), ["look around", "close door to hallway", "inventory"])]
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_a_machine_is_used_again_and_goes_with_its_episodes() -> None:
    async def go() -> tuple[Any, Any]:
        one = PLANT.start(first(PLANT))
        pid = one._session.jvm.pid  # type: ignore[union-attr]
        await one.close()
        await one.close()
        two = PLANT.start(first(PLANT))
        assert two._session is not None and two._session.jvm.pid == pid
        psutil.Process(pid).kill()
        with pytest.raises(EnvError, match="has exited"):
            await two.step("wait")
        await two.close()
        return pid, PLANT.start(first(PLANT))

    pid, three = asyncio.run(go())
    assert three._session.jvm.pid != pid and not psutil.pid_exists(pid)
    asyncio.run(three.close())
    folder = Path(three.opening.reply and "/proc/self/fd")
    n = len(list(folder.iterdir()))
    for _ in range(3):
        play(PLANT, first(PLANT), ["wait"])
    assert len(list(folder.iterdir())) <= n
