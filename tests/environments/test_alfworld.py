"""ALFWorld's form: games made from the package's assets, official games read from a folder, the script, and play.

What needs the engine is skipped without fast-downward-textworld, which has to be compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from environments.base import Environment, Oracle
from environments.contrib.alfworld import data
from environments.contrib.alfworld.environment import ALFWorld
from environments.contrib.alfworld.generate import TASK_TYPES, TREATMENTS, make, type_of
from environments.contrib.alfworld.oracle import Goal, State, names_of, plan
from rlhf.data import Task
from rlhf.errors import DataError, EnvError
from tests.environments.play import play, play_at_random, total

if importlib.util.find_spec("alfworld") is None:  # not imported: that makes a folder in the home directory
    pytest.skip("alfworld is not installed; docs/environments/alfworld.md has how to", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ALFWorld(games="generated")
plays = pytest.mark.skipif(
    importlib.util.find_spec("fast_downward") is None,
    reason="fast-downward-textworld is not installed; docs/environments/alfworld.md has how to",
)


def first(i: int = 0, split: str = "test") -> Task:
    return GENERATED.tasks(split)[i]


# --- a scene drawn by hand -----------------------------------------------------------------------------------------

#: A mug in a closed cabinet, a pan in a fridge that is closed too; the mug shall be cool and on the shelf.
KITCHEN = [
    ("atLocation", "agent1", "loc_0"),
    ("receptacleType", "cabinet_bar_1", "CabinetType"), ("receptacleAtLocation", "cabinet_bar_1", "loc_1"),
    ("receptacleType", "fridge_bar_1", "FridgeType"), ("receptacleAtLocation", "fridge_bar_1", "loc_2"),
    ("receptacleType", "shelf_bar_1", "ShelfType"), ("receptacleAtLocation", "shelf_bar_1", "loc_3"),
    ("receptacleType", "shelf_bar_2", "ShelfType"), ("receptacleAtLocation", "shelf_bar_2", "loc_4"),
    ("openable", "cabinet_bar_1"), ("openable", "fridge_bar_1"),
    ("objectType", "mug_bar_1", "MugType"), ("inReceptacle", "mug_bar_1", "cabinet_bar_1"),
    ("objectType", "pan_bar_1", "PanType"), ("inReceptacle", "pan_bar_1", "fridge_bar_1"),
    ("canContain", "ShelfType", "MugType"), ("canContain", "CabinetType", "PanType"),
]  # fmt: skip
COOL = Goal("pick_cool_then_place_in_recep", "mugtype", "shelftype", "")


def test_the_script_fetches_treats_and_puts_down() -> None:
    # To cool with a closed fridge is possible in the domain; the first shelf by id is shelf 2, for numbers count down.
    assert plan(State.of(KITCHEN), COOL) == [
        "go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1",
        "go to fridge 1", "cool mug 1 with fridge 1", "go to shelf 2", "move mug 1 to shelf 2",
    ]  # fmt: skip


def test_the_script_puts_away_what_is_not_wanted_and_goes_on_from_where_it_is() -> None:
    held = [fact for fact in KITCHEN if fact != ("inReceptacle", "pan_bar_1", "fridge_bar_1")]
    held = [*held[1:], ("atLocation", "agent1", "loc_1"), ("holds", "agent1", "pan_bar_1"), ("opened", "cabinet_bar_1")]
    found = plan(State.of(held), Goal("pick_and_place_simple", "mugtype", "shelftype", ""))
    assert found == [
        "move pan 1 to cabinet 1", "take mug 1 from cabinet 1", "go to shelf 2", "move mug 1 to shelf 2",
    ]  # fmt: skip


def test_where_there_is_no_such_thing_there_is_no_plan() -> None:
    assert plan(State.of(KITCHEN), Goal("pick_and_place_simple", "appletype", "shelftype", "")) is None
    assert plan(State.of(KITCHEN), Goal("pick_two_obj_and_place", "mugtype", "shelftype", "")) is None
    assert plan(State.of(KITCHEN), Goal("look_at_obj_in_light", "mugtype", "", "desklamptype")) is None


def test_names_count_down_in_the_order_of_ids_and_sinks_are_basins() -> None:
    ids = ["drawer_bar__plus_2", "drawer_bar__plus_1", "sink_bar__plus_0_bar_sinkbasin", "mug_bar_9"]
    assert names_of(ids) == {
        "drawer_bar__plus_1": "drawer 2",
        "drawer_bar__plus_2": "drawer 1",
        "mug_bar_9": "mug 1",
        "sink_bar__plus_0_bar_sinkbasin": "sinkbasin 1",
    }


def test_names_are_those_of_the_package(tmp_path: Path) -> None:
    ids = sorted(State.of(_facts(make("test", 2).game["pddl_problem"])).types)
    code = f"""
from types import SimpleNamespace
from alfworld.agents.utils.misc import Demangler
ids = {ids!r}
found = Demangler(game_infos={{one: SimpleNamespace(id=one) for one in ids}})
import json
print(json.dumps({{one: found.demangle_alfred_name(one) for one in ids}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, data.VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == names_of(ids) and len(ids) > 20


def _facts(problem: str) -> list[list[str]]:
    held = problem.split("(:init")[1].split("(:goal")[0]
    return [
        line.strip().strip("()").split()
        for line in held.splitlines()
        if line.strip().startswith("(") and "=" not in line
    ]


# --- games that are made -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_made_game_has_the_official_form(seed: int, tmp_path: Path) -> None:
    made = make("train", seed)
    made.write(tmp_path / "made")
    game, told = (json.loads((tmp_path / "made" / n).read_text()) for n in ("game.tw-pddl", "traj_data.json"))
    assert set(game) == {"pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough"} and game["solvable"]
    assert told["task_type"] == TASK_TYPES[seed] == type_of(seed)
    parameters = told["pddl_params"]
    assert set(parameters) == {"object_target", "parent_target", "toggle_target", "mrecep_target", "object_sliced"}
    problem = game["pddl_problem"]
    assert problem.count("(") == problem.count(")") and "#" not in problem and "(:domain alfred)" in problem
    assert f"{parameters['object_target']}Type" in problem.split("(:goal")[1]
    assert "UNKNOWN GOAL" not in game["grammar"]
    assert parameters["object_target"].lower() in game["grammar"].split("Your task is to: ")[1].split(".")[0]
    assert plan(State.of(_facts(problem)), Goal.of(told)) == game["walkthrough"]


def test_no_game_is_won_at_its_start_and_all_have_a_way() -> None:
    for split in ("train", "dev", "test"):
        for seed in range(60):
            walkthrough = make(split, seed).game["walkthrough"]
            assert walkthrough and 3 <= len(walkthrough) <= 12, (split, seed)


def test_scenes_are_those_of_the_split_and_rooms_those_of_the_task() -> None:
    numbers = {split: {make(split, i).trajectory["scene"]["scene_num"] for i in range(90)} for split in ("dev", "test")}
    assert {n % 100 <= 6 for n in numbers["test"]} == {True} and {n % 100 > 6 for n in numbers["dev"]} == {True}
    for seed in range(60):
        if type_of(seed) in TREATMENTS and type_of(seed) != "pick_clean_then_place_in_recep":
            assert make("train", seed).trajectory["scene"]["scene_num"] <= 30  # kitchens


def test_a_seed_is_one_game_in_every_process() -> None:
    module = "environments.contrib.alfworld.generate"
    code = f"from {module} import *; print(*(fingerprint(make('test', i).game) for i in range(3)))"
    shown = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert shown == {"a868be7d 56e9e5d5 1560667c\n"}


def test_generated_tasks_never_look_like_alfworld_s() -> None:
    few = ALFWorld(games="generated", n_train=7, n_dev=2, n_test=3, task_types=("look_at_obj_in_light",))
    assert [t.seed for t in few.tasks("train")] == [1, 7, 13, 19, 25, 31, 37]
    assert all(
        t.id.startswith("alfworld-generated-0.4.2-0c36d811/") for s in few.properties.splits for t in few.tasks(s)
    )
    assert first().id == "alfworld-generated-0.4.2-0c36d811/test/pick_clean_then_place_in_recep/20000000"
    assert "not ALFWorld's" in GENERATED.properties.package
    assert {s: len(GENERATED.tasks(s)) for s in ("train", "dev", "test")} == {"train": 3000, "dev": 140, "test": 134}


# --- official games ------------------------------------------------------------------------------------------------


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the official one, with made games in it; three of `valid_unseen` are to be skipped."""
    root = tmp_path / "json_2.1.1"
    for split, n in (("train", 2), ("valid_seen", 1), ("valid_unseen", 3)):
        for seed in range(n):
            make("train", seed).write(root / split / f"{type_of(seed)}-Mug-None-Shelf-{seed}" / f"trial_T{seed}")
    folder = root / "valid_unseen"
    make("train", 0).write(folder / "pick_and_place_with_movable_recep-1" / "trial_T9")
    unsolvable = folder / "pick_and_place_simple-Mug-None-Shelf-9" / "trial_T9"
    make("train", 0).write(unsolvable)
    game = json.loads((unsolvable / "game.tw-pddl").read_text())
    (unsolvable / "game.tw-pddl").write_text(json.dumps({**game, "solvable": False}))
    missing = folder / "pick_and_place_simple-Mug-None-Shelf-8" / "trial_T8"
    make("train", 0).write(missing)
    (missing / "game.tw-pddl").unlink()
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    return root


def test_official_games_are_read_where_the_variable_is_set(official: Path) -> None:
    environment = ALFWorld()
    tasks = environment.tasks("test")
    assert [t.id.rsplit("-", 1)[0] for t in tasks] == [
        "alfworld-0.4.2/valid_unseen/look_at_obj_in_light/look_at_obj_in_light-Mug-None-Shelf-1.trial_T1",
        "alfworld-0.4.2/valid_unseen/pick_and_place_simple/pick_and_place_simple-Mug-None-Shelf-0.trial_T0",
        "alfworld-0.4.2/valid_unseen/pick_clean_then_place_in_recep/"
        "pick_clean_then_place_in_recep-Mug-None-Shelf-2.trial_T2",
    ]
    assert environment.properties.package == "alfworld 0.4.2"
    assert [len(environment.tasks(s)) for s in ("train", "dev")] == [2, 1]
    assert len(ALFWorld(task_types=("look_at_obj_in_light",), n_test=5).tasks("test")) == 1
    assert ALFWorld(games="generated").tasks("test")[0].id.startswith("alfworld-generated-")


def test_an_official_game_that_has_changed_is_refused(official: Path) -> None:
    environment = ALFWorld(games="official")
    task = environment.tasks("dev")[0]
    [game] = (official / "valid_seen").rglob("game.tw-pddl")
    game.write_text(game.read_text().replace("mug", "cup").replace("Your task", "Their task"))
    with pytest.raises(DataError, match="the game file has changed since it was listed"):
        environment.start(task)


def test_without_official_games_the_message_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(data.VARIABLE, raising=False)
    with pytest.raises(EnvError, match="alfworld-download"):
        ALFWorld(games="official").tasks("test")
    assert ALFWorld().tasks("test")[0].id.startswith("alfworld-generated-")
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    with pytest.raises(EnvError, match="there are no ALFWorld games in this folder"):
        ALFWorld().tasks("test")


def test_settings_are_checked_and_it_pickles() -> None:
    assert isinstance(GENERATED, Environment) and isinstance(GENERATED, Oracle)
    assert pickle.loads(pickle.dumps(GENERATED)) == GENERATED
    with pytest.raises(ValidationError, match="task_types"):
        ALFWorld(task_types=("pick_and_throw",))  # type: ignore[arg-type]
    with pytest.raises(EnvError, match="no such split"):
        GENERATED.tasks("valid_seen")
    with pytest.raises(DataError, match="of another environment"):
        GENERATED.start(Task(id="alfworld-0.4.2/train/look_at_obj_in_light/x-12345678", seed=1))


def test_without_the_planner_a_game_says_what_to_install() -> None:
    # None in sys.modules is how Python itself marks a module that must not be imported.
    code = """
import sys
sys.modules["fast_downward"] = None
from environments.contrib.alfworld.environment import ALFWorld
from rlhf.errors import MissingPackageError
environment = ALFWorld(games="generated")
try:
    environment.start(environment.tasks("test")[0])
except MissingPackageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "the package fast-downward-textworld is missing" in done.stdout
    assert "pip install 'rlhf-agents[alfworld]'" in done.stdout


# --- play ----------------------------------------------------------------------------------------------------------


def told(results: list[Any]) -> list[Any]:
    return [(r.reply, r.reward, r.state_key, r.admissible_actions, r.success) for r in results]


@plays
@pytest.mark.parametrize("i", [0, 1, *(pytest.param(i, marks=pytest.mark.extended) for i in range(2, 6))])
def test_walkthroughs_and_plans_win(i: int) -> None:
    task = first(i)
    walkthrough = make("test", task.seed).game["walkthrough"]
    results = play(GENERATED, task, walkthrough)
    assert (
        results[0].reply.startswith("-= Welcome to TextWorld, ALFRED! =-") and "Your task is to: " in results[0].reply
    )
    assert results[-1].success and results[-1].terminated and total(results) == 1.0
    assert all(result.valid for result in results)
    assert GENERATED.plan(task, ()) == walkthrough
    taken = [*walkthrough[:2], "help", "dance"]
    rest = GENERATED.plan(task, taken) or ()
    assert play(GENERATED, task, [*taken, *rest])[-1].success


@plays
def test_a_game_goes_the_same_way_again_after_others_in_its_engine() -> None:
    before = told(play_at_random(GENERATED, first(1), 3, 12))
    play_at_random(GENERATED, first(2), 4, 5)
    assert told(play_at_random(GENERATED, first(1), 3, 12)) == before


@plays
def test_what_is_not_possible_costs_a_step_and_looking_does_not_change_the_state() -> None:
    short = ALFWorld(games="generated", max_steps=3)
    results = play(short, first(), ["sing", "look", "inventory"])
    assert [r.valid for r in results] == [True, False, True, True] and results[1].reply == "Nothing happens."
    assert len({r.state_key for r in results}) == 1
    assert results[-1].truncated and results[-1].success is False and total(results) == 0.0
    assert short.plan(first(), ()) is None  # its way has more than three actions


@plays
def test_official_games_are_played(official: Path) -> None:
    environment = ALFWorld(games="official")
    task = environment.tasks("test")[0]
    found = environment.plan(task, ())
    assert found and play(environment, task, found)[-1].success
