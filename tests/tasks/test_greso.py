"""GRESO: how likely a task is skipped, what a visit changes, and that a source goes on where another stood."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.data import ScoredGroup, Task
from rlhf.errors import DataError
from rlhf.tasks.contrib.greso import GRESO, GresoTasks
from tests.tasks.groups import group


def source(n: int, seed: int = 0, **keys: object) -> GresoTasks:
    return GRESO(**keys).start([Task(str(i)) for i in range(n)], seed)  # type: ignore[arg-type]


def visited(found: GresoTasks, n: int, of: dict[str, list[float]]) -> dict[str, float]:
    """A step of `n` tasks whose attempts score as `of` says."""
    return dict(found.learn([group(task.id, of[task.id]) for task in found.draw(n)]))


def test_the_chance_to_be_skipped_grows_with_the_visits() -> None:
    # 1 − max(.5^z, .01): .5^7 = .0078 is below the floor.
    keep = [GRESO().keep_probability(0.5, z) for z in (0, 1, 2, 3, 7)]
    assert [1 - x for x in keep] == pytest.approx([0, 0.5, 0.75, 0.875, 0.99])


def test_the_base_falls_where_a_class_reaches_its_target() -> None:
    settings = GRESO()
    assert settings.next_p(0.5, 0.25, 0.25) == pytest.approx(0.49)
    assert settings.next_p(0.5, 0.24, 0.25) == pytest.approx(0.51)
    assert settings.next_p(0.055, 1.0, 0.25) == 0.05
    assert settings.next_p(0.945, 0.0, 0.25) == 0.95


def test_only_the_last_visits_of_one_kind_count() -> None:
    found, task = source(1), Task("0")
    streaks = []
    for values in ([1, 1], [1, 1], [0, 1], [0, 0], [0, 0], [1, 1], [0.5, 0.5]):
        found.learn([group(task.id, [float(x) for x in values])])
        streaks.append(found.streaks.get("0", 0))
    # Two easy visits, a mixed one, two hard ones, an easy one; the last is solved by none.
    assert streaks == [1, 2, 0, -1, -2, 1, -1]


def test_attempts_that_all_failed_say_nothing() -> None:
    found = source(2)
    found.streaks = {"0": 3}
    figures = found.learn([ScoredGroup("0", (), ())])
    assert found.streaks == {"0": 3} and found.p_easy == found.p_hard == 0.5
    assert figures["sampling/easy_share"] == figures["sampling/hard_share"] == 0.0


def test_tasks_that_taught_nothing_come_less_often() -> None:
    n = 40
    of = {str(i): [0.0, 1.0] if i < n // 2 else [1.0, 1.0] for i in range(n)}
    found = source(n, p_step=0.0)
    counts: Counter[str] = Counter()
    n_skipped = 0.0
    for _ in range(40):
        counts.update(task.id for task in found.draw(10))
        n_skipped += visited(found, 10, of)["sampling/n_skipped_tasks"]
    useful = sum(count for name, count in counts.items() if int(name) < n // 2)
    assert counts.total() == 400 and n_skipped > 100
    # In the first pass each half comes 20 times; later an easy task comes with .5, .25, ...: less than one in five.
    assert useful > 300
    assert min(counts.values()) >= 1


def test_what_is_easy_and_hard_is_counted_over_the_tasks_attempted() -> None:
    found = source(4)
    of = {"0": [1.0, 1.0], "1": [0.0, 0.0], "2": [0.0, 1.0], "3": [0.0, 0.0]}
    expected = {
        "sampling/n_skipped_tasks": 0.0,
        "sampling/easy_share": 0.25,  # at least 1/12
        "sampling/hard_share": 0.5,  # at least 1/6
        "sampling/p_easy": 0.5,
        "sampling/p_hard": 0.5,
    }
    assert visited(found, 4, of) == expected
    found.streaks = {}  # so that the second pass skips nothing either
    assert visited(found, 4, of) == expected | {"sampling/p_easy": 0.49, "sampling/p_hard": 0.49}


def test_the_bases_move_from_the_second_pass_on() -> None:
    found = source(10)
    of = {str(i): [1.0, 1.0] for i in range(10)}
    # Steps of four: places 4 and 8 are in the first pass, 12 is behind it. The authors begin in their second epoch.
    assert [visited(found, 4, of)["sampling/p_easy"] for _ in range(3)] == pytest.approx([0.5, 0.5, 0.49])
    assert found.p_hard == pytest.approx(0.51)


@given(total=st.integers(1, 12), n=st.integers(1, 20), seed=st.integers(0, 99))
def test_the_first_pass_skips_nothing(total: int, n: int, seed: int) -> None:
    drawn = [task.id for task in source(total, seed).draw(n)]
    assert all(len(set(drawn[i : i + total])) == len(drawn[i : i + total]) for i in range(0, n, total))


def steps(found: GresoTasks, n_steps: int, n: int = 4) -> list[list[str]]:
    """Steps whose outcomes are a function of the task."""
    drawn = []
    for _ in range(n_steps):
        tasks = found.draw(n)
        drawn.append([task.id for task in tasks])
        found.learn([group(t.id, [float(int(t.id) % 3 == 0), float(int(t.id) % 3 < 2)]) for t in tasks])
    return drawn


@given(at=st.integers(0, 12), seed=st.integers(0, 9))
def test_a_source_goes_on_where_another_stood(at: int, seed: int) -> None:
    whole = steps(source(9, seed), 12)
    first, second = source(9, seed), source(9, seed)
    begun = steps(first, at)
    first.draw(5)  # a step that is not finished changes nothing
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + steps(second, 12 - at) == whole


@given(n=st.integers(1, 9), m=st.integers(1, 9), seed=st.integers(0, 9))
def test_a_second_round_goes_on_behind_the_first(n: int, m: int, seed: int) -> None:
    found = source(7, seed)
    steps(found, 5)
    assert found.draw(n) + found.draw(m, n) == found.draw(n + m)


def test_places_are_skipped_by_chance_and_not_in_a_pattern() -> None:
    # 4000 places of tasks with z = 1 and p = .5: about half are drawn, the deviation is √(4000 · ¼) = 31.6.
    found = source(10, seed=random.Random(1).randrange(100))
    found.streaks = {str(i): 1 for i in range(10)}
    places = [place for place, _ in zip(found._drawn(), range(2000), strict=False)]
    assert abs(places[-1][0] - 4000) < 320


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"p_start": 0.02}, "not between"),
        ({"p_max": 0.4}, "not between"),
        ({"easy_from": 0.1, "hard_up_to": 0.1}, "is not below"),
    ],
)
def test_bounds_that_exclude_each_other_are_refused(keys: dict[str, float], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        GRESO(**keys)  # type: ignore[arg-type]


def test_no_tasks_are_refused() -> None:
    with pytest.raises(DataError, match="no tasks to draw from"):
        GRESO().start([], 0)
