"""RLOO turn by turn: worked numbers, where it is RLOO, and the expected gradient by enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.turn_rloo import TurnRLOO
from rlhf.credit.estimator import AdvantageEstimator
from rlhf.credit.rloo import RLOO
from rlhf.data import ScoredGroup
from tests.credit.credit_groups import group, outcome_group, per_turn, score, trajectory, turn


def rows(estimator: AdvantageEstimator, rewards: list[list[float]]) -> list[list[float]]:
    return per_turn(estimator(group(rewards)))


def test_worked_example() -> None:
    # To come: t1 (.5 + 0 + 1, 1, 1), t2 (0, 0), t3 (.25).
    # Turn 0: 1.5 − (0 + .25) / 2, 0 − (1.5 + .25) / 2, .25 − (1.5 + 0) / 2.
    # Turn 1, where t3 stands with .25: 1 − (0 + .25) / 2, 0 − (1 + .25) / 2. Turn 2, where t2 stands with 0: 1 − .125.
    found = rows(TurnRLOO(), [[0.5, 0.0, 1.0], [0.0, 0.0], [0.25]])
    assert found[0] == pytest.approx([1.375, 0.875, 0.875])
    assert found[1] == pytest.approx([-0.875, -0.625])
    assert found[2] == pytest.approx([-0.5])


def test_later_turns_weigh_less() -> None:
    # γ = .5: to come are (.5 + .5 · 0 + .25 · 1, 0 + .5 · 1, 1) = (.75, .5, 1) for t1, and (.25) for t2.
    found = rows(TurnRLOO(gamma=0.5), [[0.5, 0.0, 1.0], [0.25]])
    assert found == [pytest.approx([0.5, 0.25, 0.75]), pytest.approx([-0.5])]


def test_turns_that_no_other_has_are_counted_and_silent_groups_too() -> None:
    credit = TurnRLOO()(group([[0.5, 0.0, 1.0], [0.0, 0.0], [0.25]]))
    assert credit.metrics["credit/n_singleton_turns"] == 1 and credit.metrics["credit/n_zero_std_groups"] == 0
    # Totals are equal, and turns are not: what was earned first is no credit of what came after.
    earlier = TurnRLOO()(group([[1.0, 0.0], [0.0, 1.0]]))
    assert per_turn(earlier) == [[0.0, -1.0], [0.0, 1.0]] and earlier.metrics["credit/n_zero_std_groups"] == 0
    assert TurnRLOO()(group([[0.5], [0.5]])).metrics["credit/n_zero_std_groups"] == 1
    assert TurnRLOO()(group([[0.5]])).metrics["credit/n_zero_std_groups"] == 0


def test_a_trajectory_without_turns_stands_with_its_score() -> None:
    made = ScoredGroup("task", (trajectory([]), trajectory([turn()], 1)), (score([]), score([1.0])))
    assert per_turn(TurnRLOO()(made)) == [[], [1.0]]


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0])), min_size=1, max_size=5))
def test_it_is_rloo_where_last_turns_earn_everything(ends: list[tuple[int, float]]) -> None:
    made = group([[0.0] * (n - 1) + [reward] for n, reward in ends])
    for ours, theirs in zip(per_turn(TurnRLOO()(made)), per_turn(RLOO()(made)), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)


def test_equal_numbers_give_exactly_zero() -> None:
    assert per_turn(TurnRLOO()(outcome_group([0.1 + 0.2, 0.3, 0.3]))) == [[0.0], [0.0], [0.0]]


#: Turn 0 earns 1 by right and 0 by left, which ends the episode; turn 1 earns .4 by left and −.2 by right.
PATHS = (((0, 0),), ((0, 1), (1, 0)), ((0, 1), (1, 1)))
EARNS = ([0.0], [1.0, 0.4], [1.0, -0.2])
RIGHT = (0.3, 0.6)  # chances; the parameters are their logits


def moments(estimator: AdvantageEstimator, n: int) -> tuple[list[float], float]:
    """Mean of the gradient's two components, and the sum of their variances: every group of n is enumerated."""
    mean, square = [0.0, 0.0], 0.0
    for chosen in itertools.product(range(len(PATHS)), repeat=n):
        chance = math.prod(RIGHT[k] if a else 1 - RIGHT[k] for i in chosen for k, a in PATHS[i])
        credit = per_turn(estimator(group([EARNS[i] for i in chosen])))
        found = [0.0, 0.0]
        for i, advantages in zip(chosen, credit, strict=True):
            for (k, action), advantage in zip(PATHS[i], advantages, strict=True):
                found[k] += advantage * (action - RIGHT[k]) / n
        mean = [m + chance * x for m, x in zip(mean, found, strict=True)]
        square += chance * sum(x * x for x in found)
    return mean, square - sum(m * m for m in mean)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_gradient_is_unbiased_and_varies_less_than_that_of_rloo(n: int) -> None:
    # J = p (1 + (1 − q) · .4 − q · .2); ∂p/∂logit = p (1 − p).
    p, q = RIGHT
    true = [p * (1 - p) * (1 + (1 - q) * 0.4 - q * 0.2), p * q * (1 - q) * (-0.2 - 0.4)]
    ours, spread = moments(TurnRLOO(), n)
    theirs, wider = moments(RLOO(), n)
    assert ours == pytest.approx(true) and theirs == pytest.approx(true)
    assert spread < 0.95 * wider
