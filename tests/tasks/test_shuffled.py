"""Tasks in a shuffled order: every pass complete, every step a function of the seed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import ScoredGroup, Task
from rlhf.errors import DataError, RecipeError
from rlhf.tasks.shuffled import Shuffled, ShuffledTasks, drawn_apart


def tasks(n: int) -> list[Task]:
    return [Task(str(i)) for i in range(n)]


def ids(drawn: list[Task]) -> list[str]:
    return [task.id for task in drawn]


def groups(drawn: list[Task]) -> list[ScoredGroup]:
    return [ScoredGroup(task.id, (), ()) for task in drawn]


def steps(source: ShuffledTasks, n: int, n_steps: int) -> list[list[str]]:
    """What is drawn in steps of `n` tasks that are all finished."""
    found = []
    for _ in range(n_steps):
        drawn = source.draw(n)
        source.learn(groups(drawn))
        found.append(ids(drawn))
    return found


@given(total=st.integers(1, 12), n=st.integers(1, 30), seed=st.integers(0, 2**31), n_steps=st.integers(1, 8))
def test_each_task_comes_once_before_any_comes_again(total: int, n: int, seed: int, n_steps: int) -> None:
    drawn = [task for step in steps(ShuffledTasks(tasks(total), seed), n, n_steps) for task in step]
    assert len(drawn) == n * n_steps
    for begin in range(0, len(drawn), total):
        lap = drawn[begin : begin + total]
        assert len(set(lap)) == len(lap)
        assert len(lap) < total or set(lap) == set(map(str, range(total)))


@given(total=st.integers(1, 12), n=st.integers(1, 12), at=st.integers(0, 10))
def test_a_source_goes_on_where_another_stood(total: int, n: int, at: int) -> None:
    whole = steps(ShuffledTasks(tasks(total), 3), n, 12)
    first, second = ShuffledTasks(tasks(total), 3), ShuffledTasks(tasks(total), 3)
    begun = steps(first, n, at)
    first.draw(n)  # a step that is not finished changes nothing
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + steps(second, n, 12 - at) == whole


@given(total=st.integers(1, 12), n=st.integers(1, 12), m=st.integers(1, 12))
def test_a_second_round_goes_on_behind_the_first(total: int, n: int, m: int) -> None:
    source = ShuffledTasks(tasks(total), 3)
    assert ids(source.draw(n) + source.draw(m, n)) == ids(source.draw(n + m))


@given(total=st.integers(0, 12), n=st.integers(1, 15), n_draws=st.integers(1, 8))
def test_a_draw_has_none_twice_and_none_before_all_others(total: int, n: int, n_draws: int) -> None:
    drawn = [drawn_apart(total, 3, n, number) for number in range(n_draws)]
    assert all(len(set(found)) == len(found) == min(n, total) for found in drawn)
    flat = [i for found in drawn for i in found]
    for begin in range(0, len(flat), total or 1):
        lap = flat[begin : begin + total]
        assert len(set(lap)) == len(lap)


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(lap) for seed in range(3) for lap in steps(ShuffledTasks(tasks(20), seed), 20, 3)}
    assert len(orders) == 9
    assert list(map(str, range(20))) not in [list(order) for order in orders]


def test_every_task_is_as_likely_to_come_first() -> None:
    # 600 draws of 1 in 6: the mean is 100, the deviation sqrt(600 · 1/6 · 5/6) = 9.1; 45 is five deviations.
    first = Counter(ids(ShuffledTasks(tasks(6), seed).draw(1))[0] for seed in range(600))
    assert len(first) == 6 and all(abs(count - 100) < 45 for count in first.values())


def test_no_tasks_are_refused() -> None:
    with pytest.raises(DataError, match="no tasks to draw from"):
        ShuffledTasks([], 0)


def test_a_stage_draws_one_part_of_a_mixture() -> None:
    tasks = [Task(f"{part}/{i}") for part in ("maths", "words") for i in range(3)]
    source = Shuffled(only="words/*").start(tasks, 0)
    assert {task.id for task in source.draw(3)} == {"words/0", "words/1", "words/2"}
    with pytest.raises(RecipeError, match="no task id matches this pattern"):
        Shuffled(only="word").start(tasks, 0)
