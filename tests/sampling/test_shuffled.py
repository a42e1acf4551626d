"""Tasks in a shuffled order: every pass complete, every step a function of seed and step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Task
from rlhf.errors import DataError
from rlhf.sampling.shuffled import ShuffledTasks


def tasks(n: int) -> list[Task]:
    return [Task(str(i)) for i in range(n)]


def ids(drawn: list[Task]) -> list[str]:
    return [task.id for task in drawn]


@given(total=st.integers(1, 12), n=st.integers(1, 30), seed=st.integers(0, 2**31), n_steps=st.integers(1, 8))
def test_each_task_comes_once_before_any_comes_again(total: int, n: int, seed: int, n_steps: int) -> None:
    sampler = ShuffledTasks(tasks(total), seed)
    drawn = [task for step in range(n_steps) for task in ids(sampler.draw(step, n))]
    assert len(drawn) == n * n_steps
    for begin in range(0, len(drawn), total):
        lap = drawn[begin : begin + total]
        assert len(set(lap)) == len(lap)
        assert len(lap) < total or set(lap) == set(map(str, range(total)))


@given(total=st.integers(1, 12), n=st.integers(1, 12), steps=st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_a_step_needs_no_earlier_step(total: int, n: int, steps: list[int]) -> None:
    everything = ShuffledTasks(tasks(total), 3)
    one_by_one = {step: ids(everything.draw(step, n)) for step in range(41)}
    for step in steps:
        assert ids(ShuffledTasks(tasks(total), 3).draw(step, n)) == one_by_one[step]


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(ids(ShuffledTasks(tasks(20), seed).draw(lap, 20))) for seed in range(3) for lap in range(3)}
    assert len(orders) == 9
    assert list(map(str, range(20))) not in [list(order) for order in orders]


def test_every_task_is_as_likely_to_come_first() -> None:
    # 600 draws of 1 in 6: the mean is 100, the deviation sqrt(600 · 1/6 · 5/6) = 9.1; 45 is five deviations.
    first = Counter(ids(ShuffledTasks(tasks(6), seed).draw(0, 1))[0] for seed in range(600))
    assert len(first) == 6 and all(abs(count - 100) < 45 for count in first.values())


def test_no_tasks_are_refused() -> None:
    with pytest.raises(DataError, match="no tasks to draw from"):
        ShuffledTasks([], 0)
