"""The oracle of TextWorldExpress: it solves, briefly, always the same way, and from where others have led it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import get_args

import pytest

from environments.contrib.textworld_express import oracle
from environments.contrib.textworld_express.environment import Game, TextWorldExpress
from environments.contrib.textworld_express.sessions import borrowed, close_jvm
from tests.environments.play import play
from tests.environments.textworld_games import FIVE_ROOMS, seed_of
from tests.tiers import tiered

GAMES: tuple[Game, ...] = get_args(Game)


@pytest.fixture(scope="module", autouse=True)
def _end_java() -> Iterator[None]:
    yield
    close_jvm()


@pytest.mark.parametrize("game", GAMES)
def test_the_oracle_solves_every_game(game: Game) -> None:
    environment = TextWorldExpress(game=game)
    for task in environment.tasks("test")[:20]:
        plan = environment.plan(task, ())
        assert plan is not None, task.id
        assert play(environment, task, plan)[-1].success, task.id


def test_plans_have_no_needless_action() -> None:
    task = seed_of(FIVE_ROOMS, 20004)
    with borrowed("mapreader", FIVE_ROOMS._text) as session:
        session.begin(task.seed, "test", gold=True)
        gold = session.gold_path()
    there, back = ("move east", "move south"), ("move north", "move west")
    assert gold == ("look around", "task", "read map", *there, "take coin", *back, "put coin in box")
    assert FIVE_ROOMS.plan(task, ()) == gold[2:]
    blind = TextWorldExpress(game="mapreader", params=FIVE_ROOMS.params, oracle_reads=False)
    assert blind.plan(task, ()) == gold[3:]


@pytest.mark.parametrize("game", tiered(["coin", "twc", "cookingworld"], "coin"))
def test_plans_are_the_same_in_every_machine(game: Game) -> None:
    environment = TextWorldExpress(game=game)
    tasks = environment.tasks("train")[20:30]
    plans = [environment.plan(task, ()) for task in tasks]
    close_jvm()
    oracle.walkthrough.cache_clear()
    oracle._from_the_start.cache_clear()
    assert [environment.plan(task, ()) for task in tasks] == plans
    assert all(plan is not None and len(plan) <= 45 for plan in plans)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_oracle_recovers_from_detours(share: float) -> None:
    for i, task in enumerate(FIVE_ROOMS.tasks("train")[:40]):
        rng, taken, plan = random.Random(i), list[str](), FIVE_ROOMS.plan(task, ()) or ()
        results = play(FIVE_ROOMS, task, ())
        for action in plan[: 1 + i % 5]:
            taken.append(rng.choice(results[-1].admissible_actions) if rng.random() < share else action)
            results = play(FIVE_ROOMS, task, taken)
        rest = FIVE_ROOMS.plan(task, taken)
        assert rest is not None, (task.id, taken)
        assert play(FIVE_ROOMS, task, [*taken, *rest])[-1].success, (task.id, taken, rest)


def test_the_oracle_mends_what_was_put_in_a_wrong_place() -> None:
    environment = TextWorldExpress(game="twc", params={"numLocations": 1, "numItemsToPutAway": 1})
    n_mended = 0
    for task in environment.tasks("test")[:20]:
        take, *_ = (a for a in environment.plan(task, ()) or () if a.startswith("take "))
        puts = [a for a in play(environment, task, [take])[-1].admissible_actions if a.startswith("put ")]
        wrong = next((a for a in puts if a not in (environment.plan(task, ()) or ())), None)
        if wrong is not None:
            taken = [take, wrong]
            rest = environment.plan(task, taken)
            assert rest is not None and rest[0] == take
            assert play(environment, task, [*taken, *rest])[-1].success
            n_mended += 1
    assert n_mended >= 10


def test_the_oracle_gives_up_where_nothing_can_be_mended() -> None:
    environment = TextWorldExpress(game="peckingorder")
    task = environment.tasks("test")[0]
    plan = environment.plan(task, ()) or ()
    last_first = [action for action in plan if action.startswith("take ")][-1:]
    assert environment.plan(task, last_first) is None
    assert environment.plan(task, plan) == ()
    short = TextWorldExpress(game="peckingorder", max_steps=len(plan) - 1)
    assert short.plan(task, ()) is None


def test_what_a_cook_is_about_is_said_in_the_same_words_until_it_is_done() -> None:
    kitchen = TextWorldExpress(game="cookingworld", params={"numLocations": 3, "numIngredients": 2}, max_steps=60)
    for task in kitchen.tasks("train")[:10]:
        plan = kitchen.plan(task, ()) or ()
        said = [kitchen.subgoal(task, plan[:n]) for n in range(len(plan) + 1)]
        runs = list(dict.fromkeys(said))
        assert len(runs) == 4 and said == sorted(said, key=runs.index), "three subgoals, one after the other, and none"
        read, recipe, meal, nothing = runs
        assert (read, meal, nothing) == ("read cookbook", "prepare meal and eat meal", "")
        assert plan[said.index(recipe) - 1] == read and plan[said.index(meal) :][-2:] == ("prepare meal", "eat meal")
        made = dict(part.split(": ") for part in recipe.split("; "))
        assert len(made) == 2 and all(f"take {thing}" in plan for thing in made)
        deeds = {action for action in plan if action.startswith(("chop", "dice", "slice", "cook"))}
        assert len(deeds) == sum(deed != "take" for deeds in made.values() for deed in deeds.split(", "))
        away = [*plan[:1], "look around", "take cookbook"]
        assert kitchen.subgoal(task, away) == recipe, "also after a detour"


def test_elsewhere_a_subgoal_is_the_next_deed_beside_walking() -> None:
    task = FIVE_ROOMS.tasks("test")[0]
    plan = FIVE_ROOMS.plan(task, ()) or ()
    deeds = [action for action in plan if not action.startswith(("move", "open"))]
    said = [FIVE_ROOMS.subgoal(task, plan[:n]) for n in range(len(plan))]
    assert list(dict.fromkeys(said)) == deeds and len(deeds) < len(plan)
