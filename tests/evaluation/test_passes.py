"""pass@k and pass^k, against the closed form, every choice of attempts, and numbers worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import DataError
from rlhf.evaluation.passes import pass_all_k, pass_at_k, pass_estimates, share_of_tasks
from rlhf.evaluation.statistics import share_interval, success_estimate


def test_by_hand() -> None:
    # 5 attempts, 2 solved, k = 3: C(3,3) / C(5,3) = 1/10 of the choices miss both, and no choice of 3 is all solved
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)
    assert pass_all_k(5, 2, 3) == 0.0
    # 4 attempts, 3 solved, k = 2: every choice has one of them; C(3,2) / C(4,2) = 3/6 have two
    assert (pass_at_k(4, 3, 2), pass_all_k(4, 3, 2)) == (1.0, 0.5)


@given(n=st.integers(1, 9), data=st.data())
def test_both_are_the_share_of_all_choices(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    attempts = [True] * c + [False] * (n - c)
    choices = list(itertools.combinations(attempts, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert pass_all_k(n, c, k) == pytest.approx(sum(map(all, choices)) / len(choices))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 2), (8, 3), (8, 8)])
def test_both_are_unbiased(p: float, n: int, k: int) -> None:
    """Their means over the binomial distribution of c are 1 − (1−p)^k and p^k, exactly."""
    pmf = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert sum(m * pass_at_k(n, c, k) for c, m in enumerate(pmf)) == pytest.approx(1 - (1 - p) ** k)
    assert sum(m * pass_all_k(n, c, k) for c, m in enumerate(pmf)) == pytest.approx(p**k)


def test_one_attempt_is_success() -> None:
    rng = np.random.default_rng(0)
    solved = {str(task): list(rng.random(4) < rng.random()) for task in range(30)}
    at, every = pass_estimates(solved, 1)
    flat = [x for found in solved.values() for x in found]
    plain = success_estimate(flat, [task for task in solved for _ in range(4)])
    assert (at.value, at.low, at.high) == pytest.approx((plain.value, plain.low, plain.high))
    assert at == every and at.n == 30


def test_tasks_with_fewer_attempts_are_left_out() -> None:
    solved = {"a": [True, False], "b": [False], "c": [], "d": [True, True]}
    at, every = pass_estimates(solved, 2)
    assert (at.value, at.n, every.value) == (1.0, 2, 0.5)  # of a and d
    nothing, _ = pass_estimates(solved, 3)
    assert math.isnan(nothing.value) and (nothing.low, nothing.high, nothing.n) == (0.0, 1.0, 0)


def test_agreement_at_an_end_counts_the_tasks() -> None:
    found = share_of_tasks([1.0] * 20, 160)
    assert (found.value, found.low, found.high) == (1.0, share_interval(20, 20)[0], 1.0)
    found = share_of_tasks([0.0], 8)
    assert (found.low, found.high) == share_interval(0, 1)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_attempts_are_errors(n: int, c: int, k: int) -> None:
    for function in (pass_at_k, pass_all_k):
        with pytest.raises(DataError, match="no such attempts"):
            function(n, c, k)
