"""A curriculum: when the next level begins, how much of the earlier ones comes again, and what tasks must say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.data import ScoredGroup, Task
from rlhf.errors import RecipeError
from rlhf.tasks.contrib.curriculum import Curriculum, CurriculumTasks
from tests.tasks.groups import group


def tasks(*levels: Any, n: int = 6, key: str = "level") -> list[Task]:
    return [Task(f"{level}/{i}", info={key: level}) for level in levels for i in range(n)]


def started(*levels: Any, seed: int = 0, **keys: Any) -> CurriculumTasks:
    return Curriculum(**keys).start(tasks(*levels), seed)


def finish(source: CurriculumTasks, n: int, success: float) -> tuple[list[str], dict[str, float]]:
    """A step in which so many of four attempts at each task succeed. Returns the levels drawn and what is logged."""
    drawn = source.draw(n)
    values = [float(i < round(4 * success)) for i in range(4)]
    logged = source.learn([group(task.id, values) for task in drawn])
    return [task.id.partition("/")[0] for task in drawn], dict(logged)


def test_the_next_level_begins_when_the_window_is_full_and_good_enough() -> None:
    source = started(1, 2, 3, window=8, threshold=0.75, review=0)
    assert finish(source, 4, 1.0) == (
        ["1"] * 4,
        {"sampling/level": 0.0, "sampling/n_review_tasks": 0.0, "sampling/level_mean": 1.0},
    )
    # Mean of the last eight tasks: (4 · 1 + 4 · .5) / 8 = .75.
    assert finish(source, 4, 0.5)[1]["sampling/level_mean"] == 0.75
    assert finish(source, 4, 0.5)[0] == ["2"] * 4
    # The window begins afresh: eight tasks of the new level, of which the first four no longer count after twelve.
    assert finish(source, 4, 0.5)[0] == ["2"] * 4
    assert finish(source, 4, 1.0)[1]["sampling/level_mean"] == 0.75
    assert finish(source, 4, 1.0)[0] == ["3"] * 4
    for _ in range(5):
        assert finish(source, 4, 1.0)[0] == ["3"] * 4  # the last one stays


def test_a_level_may_be_a_column_of_the_data_set() -> None:
    rows = [Task(str(i), info={"row": i, "columns": {"difficulty": level}}) for i, level in enumerate((2, 1, 2, 1))]
    assert [t.id for t in sorted(Curriculum(key="difficulty").start(rows, 0).draw(2), key=lambda t: t.id)] == ["1", "3"]
    with pytest.raises(RecipeError, match=r"4 of 4 without 'level'.*difficulty"):
        Curriculum().start(rows, 0)


def test_a_share_of_each_step_goes_back_over_earlier_levels() -> None:
    source = started(1, 2, 3, window=4, review=0.25)
    assert finish(source, 4, 1.0)[0] == ["1"] * 4  # there is nothing earlier yet
    levels, logged = finish(source, 4, 0.0)
    assert sorted(levels) == ["1", "2", "2", "2"] and logged["sampling/n_review_tasks"] == 1.0
    # Only tasks of the present level count: the review's failure is not among the three.
    assert source.lately == [0.0] * 3


def test_every_earlier_level_is_gone_over() -> None:
    source = started(1, 2, 3, review=0.5)
    source.level = 2
    levels, _ = finish(source, 200, 0.0)
    counts = {level: levels.count(level) for level in "123"}
    # 100 of 200 are review, evenly over two levels: 50 each, deviation √(100 · ¼) = 5.
    assert counts["3"] == 100 and abs(counts["1"] - 50) < 25


def test_attempts_that_all_failed_say_nothing() -> None:
    source = started(1, 2, window=2)
    logged = source.learn([ScoredGroup(task.id, (), ()) for task in source.draw(4)])
    assert source.lately == [] and "sampling/level_mean" not in logged


@pytest.mark.parametrize(
    ("levels", "keys", "order"),
    [
        ((3, 1, 2), {}, [1, 2, 3]),
        # SATURN's estimate of how hard it is to satisfy l clauses of n literals over k variables is a level like any
        # other: log2 k + 2 log2 l − n + k / n. Of n = 3, k = 5 and 5, 6, 15 clauses: 2.321928 + 1.666667 − 3 and twice
        # 2.321928, 2.584963, 3.906891.
        ((8.802376, 5.632451, 6.158520), {}, [5.632451, 6.158520, 8.802376]),
        ((0.5, 1), {}, [0.5, 1]),
        (("easy", "hard"), {"levels": ("easy", "hard")}, ["easy", "hard"]),
        ((1, 2, 3), {"levels": (3, 1)}, [3, 1]),  # those of level 2 are left out
    ],
)
def test_levels_come_in_order(levels: Sequence[Any], keys: dict[str, Any], order: list[Any]) -> None:
    by_level = started(*levels, **keys).by_level
    assert [row[0].info["level"] for row in by_level] == order and all(len(row) == 6 for row in by_level)


@pytest.mark.parametrize(
    ("given", "keys", "where", "says"),
    [
        ([Task("a"), Task("b")], {}, "sampler.key", "have no level.*nothing.*kind: graded"),
        (tasks(1, 2, key="levels"), {}, "sampler.key", "did you mean 'levels'"),
        ([*tasks(1, 2), Task("a")], {}, "sampler.key", "some tasks have no level"),
        (tasks("easy", "hard"), {}, "sampler.levels", r"not numbers.*levels: \[easy, hard\]"),
        (tasks(1, 2), {"levels": (1, 5)}, "sampler.levels", "no task has this level.*5.*1, 2"),
        (tasks(1), {}, "sampler.levels", "all tasks have the same level.*shuffled"),
        ([], {}, "sampler.key", "have no level"),
    ],
)
def test_tasks_without_levels_are_refused(given: list[Task], keys: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(RecipeError, match="(?s)" + says) as refused:
        Curriculum(**keys).start(given, 0)
    assert refused.value.where == where


def test_a_level_named_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="named twice"):
        Curriculum(levels=(1, 2, 1))


def run(source: CurriculumTasks, n_steps: int, n: int = 3) -> list[list[str]]:
    """Steps whose outcomes are a function of the task."""
    found = []
    for _ in range(n_steps):
        drawn = source.draw(n)
        found.append([task.id for task in drawn])
        source.learn([group(task.id, [float(int(task.id[-1]) % 4 > i) for i in range(2)]) for task in drawn])
    return found


@given(at=st.integers(0, 10), seed=st.integers(0, 9))
def test_a_source_goes_on_where_another_stood(at: int, seed: int) -> None:
    keys = {"window": 4, "threshold": 0.5, "review": 0.3}
    whole = run(started(1, 2, 3, seed=seed, **keys), 10)
    first, second = (started(1, 2, 3, seed=seed, **keys) for _ in range(2))
    begun = run(first, at)
    first.draw(5)  # a step that is not finished changes nothing
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + run(second, 10 - at) == whole
    assert len({name[0] for step in whole for name in step}) > 1


@given(n=st.integers(1, 9), m=st.integers(1, 9), seed=st.integers(0, 9))
def test_a_second_round_goes_on_behind_the_first(n: int, m: int, seed: int) -> None:
    source = started(1, 2, seed=seed, window=2, threshold=0.0)
    run(source, 3)
    assert source.level == 1
    assert source.draw(n) + source.draw(m, n) == source.draw(n + m)


@given(n_steps=st.integers(1, 8), n=st.integers(1, 7))
def test_within_a_level_each_task_comes_once_before_any_comes_again(n_steps: int, n: int) -> None:
    source = started(1, 2, window=5, threshold=0.0, review=0.4)
    names = [name for step in run(source, n_steps, n) for name in step]
    for level in "12":
        of_level = [name for name in names if name[0] == level]
        for begin in range(0, len(of_level), 6):
            assert len(set(of_level[begin : begin + 6])) == len(of_level[begin : begin + 6])


def test_the_state_of_other_levels_is_refused() -> None:
    with pytest.raises(ValueError, match="2 levels, and these tasks have 3"):
        started(1, 2, 3).load_state_dict(started(1, 2).state_dict())
