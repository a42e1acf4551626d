"""GRPO, Dr.GRPO and RLOO: worked examples, invariants, degenerate groups."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.credit.dr_grpo import DrGRPO
from rlhf.credit.estimator import AdvantageEstimator
from rlhf.credit.gigpo import GiGPO
from rlhf.credit.grpo import GRPO
from rlhf.credit.rloo import RLOO
from rlhf.data import Score, ScoredGroup
from rlhf.errors import DataError
from tests.credit.credit_groups import group, outcome_group, per_trajectory, trajectory, turn

TRAJECTORY_LEVEL = [GRPO(), GRPO(normalize_std=False), GRPO(ddof=0), DrGRPO(), RLOO()]
ALL = [*TRAJECTORY_LEVEL, GiGPO(), GiGPO(normalize="mean"), GiGPO(statistics="turn")]
returns = st.lists(st.sampled_from([-1.0, -0.1, 0.0, 0.25, 0.5, 1.0, 10.0]), min_size=2, max_size=8)


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        # mean .5; deviations ±.5; std (ddof 1) sqrt(4 · .25 / 3) = .577350; .5 / (.577350 + 1e-6) = .866024
        (GRPO(), [1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        # mean .25; squares .5625 + 3 · .0625 = .75; std sqrt(.75 / 3) = .5; .75 / .500001, -.25 / .500001
        (GRPO(), [1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        # std (ddof 0) sqrt(.75 / 4) = .433013; .75 / .433014 and -.25 / .433014
        (GRPO(ddof=0), [1, 0, 0, 0], [1.732047, -0.577349, -0.577349, -0.577349]),
        (GRPO(), [1, 1, 1], [0, 0, 0]),
        (GRPO(), [0.5], [0]),
        (GRPO(single_group="raw"), [0.5], [0.5]),
        (GRPO(normalize_std=False), [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        # reward minus the mean .25
        (DrGRPO(), [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        # the others' means: 0 for the first, 1/3 for the rest
        (RLOO(), [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        (RLOO(), [0.5], [0]),
        # A penalty of .1 turns the second of [1, 0, 0, 1] into -.1: mean .475, squares .275625 · 2 + .330625 + .225625
        # = 1.1075, std sqrt(1.1075 / 3) = .607591; .525 / .607592, -.575 / .607592, -.475 / .607592
        (GRPO(), [1, -0.1, 0, 1], [0.864067, -0.946359, -0.781775, 0.864067]),
        # One 10 and fifteen 0: mean .625, squares 9.375² + 15 · .625² = 93.75, std sqrt(93.75 / 15) = 2.5; 9.375 / 2.5
        (GRPO(), [10] + [0] * 15, [3.749999] + [-0.25] * 15),
    ],
)
def test_worked_examples(estimator, rewards, expected):
    assert per_trajectory(estimator(outcome_group(rewards))) == pytest.approx(expected, abs=1e-6)


def test_a_trajectory_counts_once_however_many_turns_it_has():
    # R = (1, 0), turns 2 and 3: mean .5, std .707107, so ±.707106. Pooling the five turns would give 1.0954 and -.7303.
    credit = GRPO()(group([[0, 1], [0, 0, 0]]))
    assert per_trajectory(credit) == pytest.approx([0.707106, -0.707106], abs=1e-6)
    assert [len(rows) for rows in credit.advantages_GNT] == [2, 3]


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_satisfies_the_contract(estimator):
    assert isinstance(estimator, AdvantageEstimator)
    assert estimator.needs_values is False and estimator.min_group == 2
    made = group([[0, 1], [0], [1, 0, 0]])
    estimator(made).check(made)


@pytest.mark.parametrize("estimator", TRAJECTORY_LEVEL, ids=repr)
@given(rewards=returns)
def test_credit_sums_to_zero(estimator, rewards):
    assert math.fsum(per_trajectory(estimator(outcome_group(rewards)))) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("estimator", ALL, ids=repr)
@given(rewards=returns, shift=st.floats(-100, 100))
def test_a_constant_added_to_every_score_changes_nothing(estimator, rewards, shift):
    before = per_trajectory(estimator(outcome_group(rewards)))
    after = per_trajectory(estimator(outcome_group([r + shift for r in rewards])))
    assert after == pytest.approx(before, abs=1e-7)


@given(rewards=returns, scale=st.floats(0.01, 100))
def test_grpo_without_eps_ignores_the_scale_of_scores(rewards, scale):
    before = per_trajectory(GRPO(eps=0)(outcome_group(rewards)))
    assert per_trajectory(GRPO(eps=0)(outcome_group([scale * r for r in rewards]))) == pytest.approx(before, abs=1e-9)


@pytest.mark.parametrize("estimator", ALL, ids=repr)
@given(data=st.data())
def test_permuting_the_group_permutes_the_credit(estimator, data):
    states = st.sampled_from(["hall", "cellar", None])
    turns = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), states), min_size=1, max_size=4)
    rows = data.draw(st.lists(turns, min_size=1, max_size=5))
    order = data.draw(st.permutations(range(len(rows))))

    def credit(rows):
        return estimator(
            group([[r for r, _ in row] for row in rows], [[s for _, s in row] for row in rows])
        ).advantages_GNT

    before = credit(rows)
    assert credit([rows[i] for i in order]) == tuple(before[i] for i in order)


@pytest.mark.parametrize(("estimator", "factor"), [(RLOO(), 1.0), (DrGRPO(), 2 / 3)], ids=["RLOO", "DrGRPO"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_expected_gradient_in_closed_form(estimator, factor, p):
    # A policy succeeds (R = 1) with probability p, so dE[R]/dp = 1, and ∇log p is 1/p on success, -1/(1-p) on failure.
    # Enumerating all outcomes of G = 3 attempts gives the exact expectation of the mean of A ∇log p: RLOO is unbiased;
    # a baseline that includes the attempt itself shrinks it by (G - 1) / G = 2/3.
    total = 0.0
    for outcomes in itertools.product([0.0, 1.0], repeat=3):
        probability = math.prod(p if r else 1 - p for r in outcomes)
        advantages = per_trajectory(estimator(outcome_group(outcomes)))
        total += (
            probability * sum(a * (1 / p if r else -1 / (1 - p)) for a, r in zip(advantages, outcomes, strict=True)) / 3
        )
    assert total == pytest.approx(factor)


@pytest.mark.parametrize("estimator", ALL, ids=repr)
@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [0.1] * 3, [1e6] * 7, [0.0, -0.0]])
def test_equal_scores_give_exactly_zero_and_are_counted(estimator, rewards):
    # .1 + .2 differs from .3 in the last bit: rounding must not become a signal.
    credit = estimator(outcome_group(rewards))
    assert per_trajectory(credit) == [0.0] * len(rewards)
    assert credit.metrics["credit/n_zero_std_groups"] == 1
    assert credit.metrics["credit/n_singleton_groups"] == 0


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_a_lone_trajectory_has_no_signal_and_is_counted(estimator):
    credit = estimator(group([[0, 5]], [["hall", "hall"]]))
    assert per_trajectory(credit) == [0.0]
    assert credit.metrics["credit/n_singleton_groups"] == 1
    assert credit.metrics["credit/n_zero_std_groups"] == 0


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_a_group_without_trajectories_counts_nowhere(estimator):
    credit = estimator(ScoredGroup("task", (), ()))
    assert credit.advantages_GNT == ()
    assert not any(credit.metrics.values())


@pytest.mark.parametrize("estimator", ALL, ids=repr)
def test_trajectories_without_turns_or_generations_are_compared_but_get_no_tokens(estimator):
    no_turns, one_turn = trajectory([]), trajectory([turn(n_tokens=3)])
    made = ScoredGroup("task", (no_turns, one_turn), (Score({}, (), 0.0), Score({}, (1.0,), 1.0)))
    credit = estimator(made)
    credit.check(made)
    assert credit.advantages_GNT[0] == ()
    if estimator not in (GiGPO(statistics="turn"),):  # there a trajectory without turns has no row to compare
        assert credit.advantages_GNT[1][0][0] > 0


@pytest.mark.parametrize("estimator", ALL, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_raises(estimator, bad):
    with pytest.raises(DataError, match="not finite"):
        estimator(outcome_group([1.0, bad]))


@pytest.mark.parametrize("settings", [{"ddof": 2}, {"eps": -1.0}, {"single_group": "mean"}, {"normalise_std": True}])
def test_wrong_settings_are_rejected(settings):
    with pytest.raises(ValidationError):
        GRPO(**settings)
