"""Ladders: which rung a task is drawn at, what is remembered, and what tasks must say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Task
from rlhf.errors import RecipeError
from rlhf.tasks.contrib.ladder import Ladder, LadderTasks
from tests.tasks.groups import group


def started(n: int = 1, **keys: Any) -> LadderTasks:
    tasks = [Task(f"{level}/{i}", info={"level": level}) for level in (1, 2, 3) for i in range(n)]
    return Ladder(**keys).start(tasks, 0)


def drawn(source: LadderTasks, *right: Sequence[float]) -> list[str]:
    """Tasks of a step in which the attempts at each come to so much."""
    tasks = source.draw(len(right))
    source.learn([group(task.id, values) for task, values in zip(tasks, right, strict=True)])
    return [task.id for task in tasks]


def test_a_failed_task_is_made_easier_until_it_is_solved() -> None:
    source = started()
    none, one, three = [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]
    steps = [none, three, one, none, none, none, three, three, three]
    #        3/0   2/0    3/0: stays  3/0, 2/0, 1/0: the lowest stays 1/0
    assert [drawn(source, values)[0][0] for values in steps] == ["3", "2", "3", "3", "2", "1", "1", "2", "3"]
    assert drawn(started(climb_share=0.25), [0, 0, 0, 0]) == ["3/0"]


def test_each_hard_task_has_a_ladder_of_its_own() -> None:
    source = started(3)
    first = drawn(source, [0.0], [1.0], [0.0])
    assert sorted(first) == ["3/0", "3/1", "3/2"]
    again = drawn(source, [1.0], [1.0], [1.0])
    expected = {name if i == 1 else name.replace("3/", "2/") for i, name in enumerate(first)}
    assert set(again) == expected and set(drawn(source, [1.0], [1.0], [1.0])) == set(first)


def test_a_task_that_is_drawn_twice_in_a_step_moves_by_one_rung() -> None:
    source = started()
    assert drawn(source, [0.0, 0.0], [0.0, 0.0]) == ["3/0", "3/0"]  # attempts at one rung
    assert drawn(source, [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]) == ["2/0"] * 3  # three of six
    assert drawn(source, [0.0], []) == ["3/0"] * 2


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2), max_size=12), st.integers(0, 12))
def test_it_remembers(steps: list[list[bool]], stopped: int) -> None:
    whole, resumed = started(2), started(2)
    for i, right in enumerate(steps):
        if i == stopped:
            again = started(2)
            again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
            resumed = again
        assert drawn(whole, *[[float(x)] for x in right]) == drawn(resumed, *[[float(x)] for x in right])


def test_tasks_without_levels_are_refused() -> None:
    with pytest.raises(RecipeError, match="have no level"):
        Ladder().start([Task("a")], 0)
