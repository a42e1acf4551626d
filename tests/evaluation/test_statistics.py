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
    bootstrap_interval,
    mean_interval,
    success_estimate,
    t_quantile,
    wilson_interval,
)

Z = 1.959963985  # normal quantile at 0.975


def test_wilson_by_hand() -> None:
    # 8 of 10: p = 0.8, z² = 3.841459, 1 + z²/n = 1.384146
    # centre = (0.8 + 3.841459/20) / 1.384146 = 0.992073 / 1.384146 = 0.716740
    # half = 1.959964/1.384146 · √(0.16/10 + 3.841459/400) = 1.416010 · √0.025604 = 0.226578
    assert wilson_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    # 0 of 10: both terms coincide, high = z² / (n + z²) = 3.841459 / 13.841459
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)


def test_without_episodes_nothing_is_known() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    estimate = success_estimate([], [])
    assert math.isnan(estimate.value) and (estimate.low, estimate.high, estimate.n) == (0.0, 1.0, 0)


@given(n=st.integers(1, 2000), data=st.data())
def test_wilson_ends_are_where_the_score_test_is_undecided(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = wilson_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1
    for end in (low, high):
        if 0 < end < 1:  # |p̂ − end| = z √(end (1 − end) / n)
            assert abs(k / n - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / n), rel=1e-6)
    mirrored = wilson_interval(n - k, n)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-12)


@pytest.mark.parametrize("n", [10, 30, 100])
def test_wilson_covers_the_truth_95_times_in_100(n: int) -> None:
    intervals = [wilson_interval(k, n) for k in range(n + 1)]
    coverage = []
    for p in np.linspace(0.02, 0.98, 97):  # exact, from the binomial distribution
        pmf = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
        coverage.append(sum(m for m, (low, high) in zip(pmf, intervals, strict=True) if low <= p <= high))
    assert 0.945 < np.mean(coverage) < 0.965
    assert min(coverage) > 0.83


@pytest.mark.parametrize(("successes", "n"), [(-1, 10), (11, 10), (math.nan, 10)])
def test_impossible_counts_are_errors(successes: float, n: int) -> None:
    with pytest.raises(DataError):
        wilson_interval(successes, n)
    with pytest.raises(DataError, match="confidence"):
        wilson_interval(1, 2, confidence=1.0)


@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975, 0.999])
def test_t_quantile_against_closed_forms(probability: float) -> None:
    p = probability
    assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)  # Cauchy
    assert t_quantile(p, 2) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)), rel=1e-9)
    assert t_quantile(1 - p, 7) == pytest.approx(-t_quantile(p, 7), rel=1e-9)
    # the finite series (df up to 1000) and the expansion (above) meet
    steps = [t_quantile(p, df) for df in (999, 1000, 1001, 1002)]
    assert np.diff(steps) == pytest.approx([np.diff(steps).mean()] * 3, rel=0.01)


def test_t_quantile_against_the_printed_table() -> None:
    # Student's table, two-sided 5%: df 4, 5, 10, 30
    assert [round(t_quantile(0.975, df), 3) for df in (4, 5, 10, 30)] == [2.776, 2.571, 2.228, 2.042]


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
def test_one_attempt_per_task_gives_the_plain_wilson_interval(solved: list[bool]) -> None:
    estimate = success_estimate(solved, [f"task {i}" for i in range(len(solved))], n_errors=3)
    assert (estimate.low, estimate.high) == wilson_interval(sum(solved), len(solved))
    assert (estimate.n, estimate.n_errors) == (len(solved), 3)
    assert estimate == success_estimate(solved, n_errors=3)


def test_attempts_that_agree_count_as_tasks() -> None:
    # 50 tasks, each solved by all 4 attempts or by none: as much evidence as 50 episodes, not as 200. With 25 of 50
    # solved, deff = (m/(m−1) Σ_c (4 · 0.5)² / 200²) / (0.25/200) = (50/49 · 200 / 40000) / 0.00125 = 4.081633
    # n / deff = 49; times (t(0.975, 199) / t(0.975, 49))² = (1.971957 / 2.009575)² = 0.962912: 47.18270
    solved = [task % 2 == 0 for task in range(50) for _ in range(4)]
    tasks = [task for task in range(50) for _ in range(4)]
    estimate = success_estimate(solved, tasks)
    assert (estimate.low, estimate.high) == pytest.approx(wilson_interval(47.18270 / 2, 47.18270), abs=1e-6)
    assert estimate.low < wilson_interval(100, 200)[0] - 0.05


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
    ratio = t_quantile(0.975, 79) / t_quantile(0.975, 39)
    low, high = wilson_interval(found.value * 160 * ratio**2, 160 * ratio**2)
    assert (found.low, found.high) == pytest.approx((low, high))
    # no variance at all says nothing: the episodes are counted
    assert success_estimate([True, False] * 40, tasks).low == pytest.approx(
        wilson_interval(40 * ratio**2, 80 * ratio**2)[0]
    )


def test_bootstrap_is_seeded_and_agrees_with_theory() -> None:
    values = list(np.random.default_rng(1).normal(3, 1, 400))
    first, second = bootstrap_interval(values), bootstrap_interval(values)
    assert first == second != bootstrap_interval(values, seed=1)
    theory = mean_interval(values)
    assert (first.low, first.high) == pytest.approx((theory.low, theory.high), abs=0.01)
    assert bootstrap_interval([2.0] * 5) == Estimate(2.0, 2.0, 2.0, 5)
