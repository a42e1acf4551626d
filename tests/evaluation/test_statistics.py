"""Intervals and comparisons, against closed forms and numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import DataError
from rlhf.evaluation.statistics import (
    Estimate,
    bounded_interval,
    mean_interval,
    share_interval,
    success_estimate,
    usual_range,
)
from rlhf.stats import t_quantile


def test_a_share_by_hand() -> None:
    # 8 of 10, and 1.8 ones and zeros more: 9.8 of 13.6, m = 0.720588, Σ(x − m)² = 9.8 − 13.6 m² = 2.738235,
    # s² = 2.738235 / 12.6 = 0.217320, s/√13.6 = 0.126410, t(0.975, 12.6) = 2.167395: 0.720588 ± 0.273980
    assert share_interval(8, 10) == pytest.approx((0.446608, 0.994568), abs=1e-5)
    # 0 of 10: 1.8 of 13.6, m = 0.132353, s² = (1.8 − 13.6 m²) / 12.6 = 0.123950, s/√13.6 = 0.095467
    assert share_interval(0, 10) == pytest.approx((0.0, 0.132353 + 2.167395 * 0.095467), abs=1e-5)


def test_without_episodes_nothing_is_known() -> None:
    assert share_interval(0, 0) == (0.0, 1.0)
    estimate = success_estimate([], [])
    assert math.isnan(estimate.value) and (estimate.low, estimate.high, estimate.n) == (0.0, 1.0, 0)


@given(n=st.integers(1, 2000), data=st.data())
def test_a_share_lies_in_its_interval_and_that_has_a_width(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = share_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1 and high - low > 0.9 / n
    mirrored = share_interval(n - k, n)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-12)


@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=30), width=st.floats(1, 50))
def test_no_interval_leaves_its_range_or_has_no_width(values: list[float], width: float) -> None:
    found = mean_interval(values, [i // 2 for i in range(len(values))], within=(-1.0, width))
    assert -1 <= found.low <= found.value <= found.high <= width and found.high - found.low > 0.9 / len(values)
    # shifted and stretched, it is the same interval
    moved = mean_interval([(x + 1) / (width + 1) for x in values], [i // 2 for i in range(len(values))], within=(0, 1))
    scaled = [(end + 1) / (width + 1) for end in (found.low, found.high)]
    assert (moved.low, moved.high) == pytest.approx(scaled, abs=1e-9)


def test_more_than_the_range_is_an_error_and_the_range_is_known_from_the_values() -> None:
    with pytest.raises(DataError, match="outside its range"):
        mean_interval([0.5, 1.5], within=(0.0, 1.0))
    assert usual_range([0.0, 0.3, 1.0]) == (0.0, 1.0) == usual_range([])
    assert usual_range([0.5, -0.1]) == (-1.0, 1.0)
    assert usual_range([0.5, 1.1]) is None is usual_range([-3.0])


def test_one_and_zero_as_scores_are_success() -> None:
    solved = [i % 3 == 0 for i in range(40)]
    for tasks in (list(range(40)), [i // 4 for i in range(40)]):
        success, score = (
            success_estimate(solved, tasks),
            mean_interval([float(x) for x in solved], tasks, within=(0, 1)),
        )
        assert (success.low, success.high) == pytest.approx((score.low, score.high))


def test_values_that_all_agree_say_nothing_of_others_where_no_range_is_known() -> None:
    found = mean_interval([2.1] * 9)
    assert (found.value, found.low, found.high) == (pytest.approx(2.1), -math.inf, math.inf)
    assert bounded_interval(2.1, 0.0, 9, 0.0, 3.0) == pytest.approx((1.3850, 2.4721), abs=1e-4)


@pytest.mark.parametrize(("successes", "n"), [(-1, 10), (11, 10), (math.nan, 10)])
def test_impossible_counts_are_errors(successes: float, n: int) -> None:
    with pytest.raises(DataError):
        share_interval(successes, n)
    with pytest.raises(DataError, match="confidence"):
        share_interval(1, 2, confidence=1.0)


def test_mean_interval_by_hand() -> None:
    # 1..5: mean 3, s² = 10/4 = 2.5, s/√5 = 0.707107, t(0.975, 4) = 2.776445: 3 ± 1.963243
    estimate = mean_interval([1, 2, 3, 4, 5], n_errors=2)
    assert (estimate.low, estimate.high) == pytest.approx((1.036757, 4.963243), abs=1e-6)
    assert (estimate.value, estimate.n, estimate.n_errors) == (3.0, 5, 2)


def test_one_task_says_nothing_about_others() -> None:
    assert mean_interval([1.0, 2.0], ["a", "a"]) == Estimate(1.5, -math.inf, math.inf, 2)
    with pytest.raises(DataError):
        mean_interval([1.0, math.nan])
    with pytest.raises(DataError):
        mean_interval([1.0], ["a", "b"])


@given(values=st.lists(st.floats(-10, 10), min_size=2, max_size=12), copies=st.integers(1, 5))
def test_repeating_every_attempt_adds_no_evidence(values: list[float], copies: int) -> None:
    once = mean_interval(values)
    many = mean_interval(values * copies, list(range(len(values))) * copies)
    assert (many.value, many.low, many.high) == pytest.approx((once.value, once.low, once.high), abs=1e-9)


@given(solved=st.lists(st.booleans(), min_size=1, max_size=60))
def test_one_attempt_per_task_gives_the_plain_share_interval(solved: list[bool]) -> None:
    estimate = success_estimate(solved, [f"task {i}" for i in range(len(solved))], n_errors=3)
    assert (estimate.low, estimate.high) == share_interval(sum(solved), len(solved))
    assert (estimate.n, estimate.n_errors) == (len(solved), 3)
    assert estimate == success_estimate(solved, n_errors=3)


def test_attempts_that_agree_count_as_tasks() -> None:
    # 50 tasks, each solved by all 4 attempts or by none: as much evidence as 50 episodes, not as 200. With 25 of 50
    # solved, deff = (m/(m−1) Σ_c (4 · 0.5)² / 200²) / (0.25/200) = (50/49 · 200 / 40000) / 0.00125 = 4.081633
    # n / deff = 49; times (t(0.975, 199) / t(0.975, 49))² = (1.971957 / 2.009575)² = 0.962912: 47.18270
    solved = [task % 2 == 0 for task in range(50) for _ in range(4)]
    tasks = [task for task in range(50) for _ in range(4)]
    estimate = success_estimate(solved, tasks)
    assert (estimate.low, estimate.high) == pytest.approx(share_interval(47.18270 / 2, 47.18270), abs=1e-6)
    assert estimate.low < share_interval(100, 200)[0] - 0.05


def test_few_tasks_that_differ_count_as_if_attempts_agreed_more() -> None:
    # 20 tasks of 4 attempts, of which two are solved once: p = 1/40, variance 0.024375; error² = 20/19 Σ_c(...)²/80²
    # with Σ_c = 2 (1 − .1)² + 18 · .1² = 1.8: 0.000296053. deff = 0.000296053 / (0.024375 / 80) = 0.971660; of
    # 4 · 20 · 0.024375 = 1.95 tasks that tell: (1.95 · 0.971660 + 0.5 · 4) / 2.45 = 1.589689
    solved = [task < 2 and attempt == 0 for task in range(20) for attempt in range(4)]
    found = success_estimate(solved, [i // 4 for i in range(80)])
    effective = 80 / 1.589689 * (t_quantile(0.975, 79) / t_quantile(0.975, 19)) ** 2
    assert (found.low, found.high) == pytest.approx(share_interval(effective / 40, effective), abs=1e-6)


def test_clustering_widens_the_interval_of_tasks_that_differ() -> None:
    rng = np.random.default_rng(0)
    tasks = [i // 4 for i in range(160)]
    for _ in range(50):
        solved = list(np.repeat(rng.random(40) < rng.uniform(0.2, 0.8), 4))  # all attempts at a task go the same way
        clustered, plain = success_estimate(solved, tasks), success_estimate(solved)
        assert clustered.high - clustered.low > 1.5 * (plain.high - plain.low)


def test_chance_agreement_of_tasks_narrows_the_interval_to_twice_the_episodes_at_most() -> None:
    # Each task solves one of two attempts: tasks agree better than chance allows, but half the variance is the least.
    tasks = [i // 2 for i in range(80)]
    solved = [i % 2 == 0 for i in range(78)] + [True, True]  # one task differs, or the variance would be 0
    found = success_estimate(solved, tasks)
    differing = 4 * 40 * found.value * (1 - found.value)
    deff = (differing * 0.5 + 0.5 * 2) / (differing + 0.5)
    ratio = t_quantile(0.975, 79) / t_quantile(0.975, 39)
    effective = 80 / deff * ratio**2
    assert (found.low, found.high) == pytest.approx(share_interval(found.value * effective, effective))
    # no variance at all says nothing: the episodes are counted
    plain = 80 / ((40 + 1) / 40.5) * ratio**2
    assert success_estimate([True, False] * 40, tasks).low == pytest.approx(share_interval(plain / 2, plain)[0])
