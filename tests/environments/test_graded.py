"""Environments as levels of one: tasks that say their level, and episodes that are those of the level."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from environments.base import Episode, Properties, can_demonstrate, properties_of
from environments.check import check_environment
from environments.workers.pool import Processes
from environments.wrappers.difficulty_levels import Graded
from rlhf.data import Task
from rlhf.errors import EnvError
from tests.training.words import Words


@dataclass(frozen=True)
class Plain:
    """Declares little, demonstrates nothing, and may say a level of its own."""

    max_steps: int = 7
    has_level: bool = False

    properties = Properties(splits=("test", "train"))

    def tasks(self, split: str) -> list[Task]:
        return [Task("plain/0", info={"level": 3} if self.has_level else {"hue": "red"})]

    def start(self, task: Task) -> Episode:
        assert task == self.tasks("train")[0]
        return Words().start(Task("words/0"))


class Alone(Plain):
    properties = Properties(isolated=True)


def made(*levels: Any) -> Graded:
    return Graded(levels=levels)


def test_levels_alternate_and_tasks_say_theirs() -> None:
    tasks = made(Words(n_turns=1, n_tasks=2), Words(n_turns=2, n_tasks=4)).tasks("train")
    assert [(t.id, t.info["level"]) for t in tasks] == [
        ("level0/words/0", 0),
        ("level1/words/0", 1),
        ("level0/words/1", 0),
        ("level1/words/1", 1),
        ("level1/words/2", 1),  # the first level has two
        ("level1/words/3", 1),
    ]


def test_an_episode_is_that_of_its_level() -> None:
    graded = made(Words(n_turns=1), Words(n_turns=3), Plain())
    for task in graded.tasks("train")[:3]:
        level = task.info["level"]
        if level < 2:
            answers = graded.plan(task, ())
            assert answers is not None and len(answers) == (1, 3)[level]
            episode, results = graded.start(task), []
            for answer in answers:
                results.append(asyncio.run(episode.step(answer)))
            assert results[-1].success
        else:
            graded.start(task)  # given the very task that it listed
            assert graded.plan(task, ()) is None


def test_it_demonstrates_where_a_level_does_and_each_task_where_its_own_does() -> None:
    some = made(Words(n_tasks=1), Plain())
    assert can_demonstrate(some) and not can_demonstrate(made(Plain(), Plain()))
    shown = {task.id: can_demonstrate(some, task) for task in some.tasks("train")}
    assert shown == {"level0/words/0": True, "level1/plain/0": False}
    within = Processes(environment=some, n_workers=0)
    assert [can_demonstrate(within, task) for task in within.tasks("train")] == [True, False]
    words, plain = within.tasks("train")
    assert within.plan(words, ()) == some.plan(words, ())
    assert within.plan(plain, ()) is None


def test_promises_are_those_that_all_levels_make() -> None:
    both = properties_of(made(Words(), Plain()))
    assert (both.deterministic, both.inline, both.oracle) == (False, False, False)
    assert both.splits == ("train", "test") and both.package == "words 1"
    words = properties_of(made(Words(n_turns=1), Words()))
    assert words.deterministic and words.oracle and words.package == "words 1"
    # One level that is not safe beside others suffices.
    assert not both.isolated and properties_of(made(Words(), Alone())).isolated
    assert made(Words(), Plain()).max_steps == 7 and made(Words(), Words(n_turns=1)).max_steps is None


@pytest.mark.parametrize(
    "task", [Task("words/0"), Task("level1/words/0", info={"level": 0}), Task("level5/words/0", info={"level": 5})]
)
def test_a_task_of_another_environment_is_refused(task: Task) -> None:
    with pytest.raises(EnvError, match="of another environment"):
        made(Words(), Words(n_turns=1)).start(task)


def test_a_level_with_levels_of_its_own_is_refused() -> None:
    with pytest.raises(EnvError, match="have a level already") as refused:
        made(Words(), Plain(has_level=True)).tasks("train")
    assert refused.value.where == "levels[1]"


def test_it_keeps_the_contract() -> None:
    report = check_environment(made(Words(n_turns=1), Words(n_turns=2)))
    assert [f for f in report.findings if not f.ok] == []
