"""Paired tests, their correction and the tasks they need, against enumeration and numbers worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import DataError
from rlhf.evaluation.paired import compare, holm, mcnemar, n_tasks_needed, permutation
from rlhf.evaluation.statistics import mean_interval, share_interval


def test_mcnemar_by_hand() -> None:
    # 9 better, 1 worse: (2 C(10,0) + C(10,1)) / 2^10 = 12/1024, where the exact test says 22/1024
    assert mcnemar(9, 1) == mcnemar(1, 9) == 12 / 1024
    assert mcnemar(4, 4) == mcnemar(0, 0) == 1.0
    # 0 of 1: half of the probability of what was seen, twice: C(1,0) / 2
    assert mcnemar(0, 1) == 0.5


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_never_exceeds_the_exact_test(better: int, worse: int) -> None:
    n = better + worse
    exact = min(1.0, 2 * sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n)
    assert 0 < mcnemar(better, worse) <= exact


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9))
def test_permutation_agrees_with_every_choice_of_signs(differences: list[int]) -> None:
    left = [d for d in differences if d]
    observed = abs(sum(left))
    sums = [
        abs(sum(s * d for s, d in zip(signs, left, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(left))
    ]
    exact = (sum(s > observed for s in sums) + sum(s == observed for s in sums) / 2) / len(sums)
    found = permutation(np.array(differences, dtype=float) / 3, n_flips=4000)
    assert found == pytest.approx(exact if left else 1.0, abs=0.05)  # 4000 flips: 5 standard errors are 0.04


def test_permutation_of_ones_is_mcnemar() -> None:
    differences = np.array([1.0] * 14 + [-1.0] * 5 + [0.0] * 81)
    assert permutation(differences, n_flips=100_000) == pytest.approx(mcnemar(14, 5), abs=0.003)
    assert permutation(differences) == permutation(differences) != permutation(differences, seed=1)


def test_holm_by_hand() -> None:
    # sorted 0.01, 0.02, 0.04: 3 · 0.01, 2 · 0.02, 1 · 0.04, none below the one before
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03] and holm([]) == []


def test_tasks_needed_by_hand() -> None:
    # z of 0.975 and 0.8: 1.959964 + 0.841621 = 2.801585; (2.801585 · 0.5 / 0.05)² = 784.89
    assert n_tasks_needed(0.5, 0.05) == n_tasks_needed(0.5, -0.05) == 785
    assert n_tasks_needed(0.0, 0.05) == 2
    for deviation, difference in ((0.5, 0.0), (math.nan, 0.1)):
        with pytest.raises(DataError, match="number of tasks is undefined"):
            n_tasks_needed(deviation, difference)


def test_that_many_tasks_show_the_difference_as_often_as_promised() -> None:
    rng, p_better, p_worse = np.random.default_rng(0), 0.3, 0.15
    deviation = math.sqrt(p_better + p_worse - (p_better - p_worse) ** 2)
    n = n_tasks_needed(deviation, p_better - p_worse)
    better, worse, _ = rng.multinomial(n, [p_better, p_worse, 1 - p_better - p_worse], size=2000).T
    power = np.mean([mcnemar(int(b), int(w)) <= 0.05 for b, w in zip(better, worse, strict=True)])
    assert power == pytest.approx(0.8, abs=0.04)


def test_a_comparison_counts_tasks_and_names_those_that_flipped() -> None:
    first = {"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [0.0, 1.0], "d": [1.0], "only first": [1.0], "empty": []}
    second = {"a": [0.0, 1.0], "b": [1.0, 1.0], "c": [1.0, 0.0], "d": [1.0], "only second": [0.0], "empty": [1.0]}
    found = compare(first, second)
    assert (found.better, found.worse, found.n_unpaired, found.test) == (("b",), ("a",), 3, "permutation")
    # differences -1/2, 1, 0, 0
    plain = mean_interval([-0.5, 1.0, 0.0, 0.0], within=(-1.0, 1.0))
    assert (found.difference.value, found.difference.low) == pytest.approx((0.125, plain.low))
    assert found.deviation == pytest.approx(np.std([-0.5, 1.0, 0.0, 0.0], ddof=1))
    mirrored = compare(second, first)
    assert (mirrored.p_value, mirrored.better) == (found.p_value, found.worse)


def test_one_attempt_each_takes_mcnemar() -> None:
    first = {str(i): [float(i < 3)] for i in range(20)}
    second = {str(i): [float(i < 12)] for i in range(20)}
    found = compare(first, second)
    assert (found.test, found.p_value) == ("mcnemar", mcnemar(9, 0))


def test_policies_that_never_differ_have_an_interval_all_the_same() -> None:
    same = {str(i): [1.0, 0.0] for i in range(50)}
    found = compare(same, same)
    # 1.8 tasks each way: s² = 3.6 / 52.6, s/√53.6 = 0.035733, t(0.975, 52.6) = 2.006102
    assert (found.difference.low, found.difference.high) == pytest.approx((-0.071685, 0.071685), abs=1e-5)
    assert (found.p_value, found.better, found.worse) == (1.0, (), ())


def test_pairing_finds_a_difference_that_two_intervals_hide() -> None:
    # 100 tasks; the second policy solves what the first does, and 10 more: 10 better, 0 worse, 1 / 2^10
    first = {str(i): [float(i < 45)] for i in range(100)}
    second = {str(i): [float(i < 55)] for i in range(100)}
    assert share_interval(45, 100)[1] > share_interval(55, 100)[0]
    found = compare(first, second)
    assert found.difference.low > 0 and found.p_value == 1 / 1024


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_a_difference_of_shares_stays_within_one(pairs: list[tuple[bool, bool]]) -> None:
    first, second = ({str(i): [float(pair[side])] for i, pair in enumerate(pairs)} for side in (0, 1))
    found = compare(first, second).difference
    assert -1 <= found.low <= found.value <= found.high <= 1 and found.high - found.low > 1 / len(pairs)


def test_all_better_is_no_more_than_all() -> None:
    first = {str(i): [0.0] for i in range(20)}
    second = {str(i): [float(i > 0)] for i in range(20)}  # 95 points, whose plain t interval ends at 105.5
    found = compare(first, second).difference
    assert found.high == 1.0 and 0.5 < found.low < 0.95
    # scores that pass 1 have no known range
    third = {str(i): [2.0 + i] for i in range(20)}
    assert compare(first, third).difference.high > 12


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(DataError, match="the two evaluations share no task"):
        compare({"a": [1.0]}, {"b": [1.0]})
