"""Splits: which seeds they have, whose their tasks are, and what a world that draws its tasks has to say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from environments.base import Properties, StepResult
from environments.check import check_environment
from environments.check_splits import kept_apart
from environments.contrib.collaborate import Collaborate
from environments.contrib.composite_tasks import Objectives
from environments.contrib.long_memory import LongMemory
from environments.contrib.search_qa import SearchQA
from environments.contrib.shop import Shop
from environments.contrib.text_to_sql import TextToSql
from environments.core.procedural import Drawn
from environments.core.seed_splits import Seeded, split_in, split_of_seed
from environments.tasks.tools import Tools
from rlhf.catalog import CATALOG
from rlhf.data import Task
from rlhf.data.report import ContractChecker
from rlhf.errors import DataError, EnvError
from rlhf.recipe.builder import build_part
from rlhf.registry import resolve

ROOT = Path(__file__).resolve().parents[2]
#: Worlds that are drawn here, by no package of games, in well under a second for some hundred tasks.
DRAWN = tuple(
    kind
    for kind, entry in CATALOG["environment"].items()
    if entry.extra in (None, "search") and issubclass(resolve("environment", kind, base=ROOT), Seeded)
)


def settings_of_drawn_worlds() -> list[dict[str, Any]]:
    """Defaults, and what recipes and suites make of them."""
    found: list[dict[str, Any]] = [{"kind": kind} for kind in DRAWN]

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("kind") in DRAWN:
                found.append({k: v for k, v in value.items() if k not in ("n_train", "n_dev", "n_test")})
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    for path in (*sorted((ROOT / "recipes").rglob("*.yaml")), *sorted((ROOT / "suites").glob("*.yaml"))):
        walk(yaml.safe_load(path.read_text(encoding="utf-8")))
    return [json.loads(text) for text in dict.fromkeys(json.dumps(values, sort_keys=True) for values in found)]


def test_splits_are_ranges_and_their_tasks_tell_whose_they_are() -> None:
    some = Seeded(n_train=2, n_dev=1, n_test=1)
    assert [task.id for task in some.listed("dev", "a/b")] == ["a/b/dev/10000000"]
    assert [split_of_seed(task.seed) for task in (*some.listed("train", "a"), *some.listed("test", "a"))] == [
        *["train"] * 2,
        "test",
    ]
    assert split_in(some.listed("test", "a")[0], "a", "here") == "test"
    for task in (Task("a/test/1", seed=2), Task("b/test/20000000", seed=20_000_000), Task("a/tset/1", seed=1)):
        with pytest.raises(DataError, match="of another environment"):
            split_in(task, "a", "here")
    with pytest.raises(EnvError, match="no such split"):
        some.seeds("valid")


def test_a_drawn_world_has_to_say_what_it_draws() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Drawn()  # type: ignore[abstract]


@pytest.mark.parametrize("values", settings_of_drawn_worlds(), ids=lambda v: "-".join(map(str, v.values())))
def test_no_two_splits_tell_the_same_and_are_solved_by_the_same(values: dict[str, Any]) -> None:
    if values.get("environment") is not None:
        pytest.skip("chains tasks of another world, which is here by itself")
    world = build_part("environment", values, "environment", base=ROOT)
    checker = ContractChecker("splits", 600)
    n = 400 if len(values) == 1 and values["kind"] in ("tools", "shop", "keyhole", "bandit", "matrix_game") else 80
    drawn = {split: list(world.tasks(split))[:n] for split in ("train", "dev", "test")}

    async def start(task: Task) -> Any:
        return world.start(task)

    report = checker.run(lambda: kept_apart(checker, world, start, drawn, 600))
    assert report.ok, str(report)
    assert not world.properties.repeats and all(len(tasks) > 20 for tasks in drawn.values())


def drawn_in(opening: StepResult, task: Task) -> str:
    """Content of a task: the first part of the state key that it opens with."""
    return opening.state_key.partition("/")[0]


#: Small worlds whose splits draw from few contents, tasks of each split, and what is the content of a task.
SMALL: dict[str, tuple[Any, int, Callable[[StepResult, Task], Any]]] = {
    "collaborate": (Collaborate(n_points=1, n_told=0, n_free=0), 400, drawn_in),
    "long_memory": (
        LongMemory(abilities=("retrieval",), n_questions=1, n_facts=1, n_changes=0, n_places=2, distance=0),
        400,
        drawn_in,
    ),
    "objectives": (Objectives(k=1, n_people=2), 300, drawn_in),
    "search_qa": (SearchQA(n_train=60, n_dev=60, n_test=60), 60, lambda opening, task: (opening.reply, task.reference)),
    "shop": (Shop(n_products=4), 40, drawn_in),
    "tools": (Tools(questions=("price",)), 1000, lambda opening, task: opening.state_key),
    **{
        f"text_to_sql-{kind}": (
            TextToSql(questions=(kind,), n_rows=4),
            200,
            lambda opening, task: opening.reply.partition("\n")[0],
        )
        for kind in ("filter", "aggregate", "join", "group")
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_no_content_is_in_two_splits_even_where_there_is_little(name: str) -> None:
    world, n, content = SMALL[name]
    drawn = [
        {content(world.start(task).opening, task) for task in list(world.tasks(split))[:n]}
        for split in ("train", "dev", "test")
    ]
    assert all(drawn) and not any(one & other for one, other in combinations(drawn, 2))
    with pytest.raises(EnvError, match="no such split"):
        world.tasks("valid")


@dataclasses.dataclass(frozen=True)
class Riddles:
    """A world whose test tasks have other ids and seeds, and are those of the train split all the same."""

    told: bool = False

    @property
    def properties(self) -> Properties:
        return Properties(splits=("train", "test"), repeats=self.told)

    def tasks(self, split: str) -> list[Task]:
        first = {"train": 0, "test": 1000}[split]
        return [Task(f"riddles/{split}/{i}", seed=first + i, reference=str(i % 7)) for i in range(20)]

    def start(self, task: Task) -> Any:
        class Riddle:
            opening = StepResult(f"Which is it, {task.seed % 10}?")

            async def step(self, action: str) -> StepResult:
                return StepResult("Yes.", terminated=True, success=action == task.reference)

            async def close(self) -> None: ...

        return Riddle()


def test_the_check_finds_tasks_of_two_splits_that_are_one_to_the_agent() -> None:
    broken = str(check_environment(Riddles(), other_process=False))
    assert "BROKEN  tasks(): what is told first and what solves it are of one split" in broken
    assert "20 of 20 different tasks of 'train' are among 20 of 'test'" in broken and "riddles/train/0" in broken
    assert "BROKEN  tasks(): what is told" not in str(check_environment(Riddles(told=True), other_process=False))
