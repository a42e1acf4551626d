"""Stratified GRPO, LOOP, LightningRL and GRPO-LEAD: one number per trajectory, worked examples and invariants."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.credit.contrib.grpo_lead import GRPOLead
from rlhf.credit.contrib.lightning import Lightning
from rlhf.credit.contrib.loop import LOOP
from rlhf.credit.contrib.stratified import Stratified
from rlhf.credit.grpo import GRPO
from rlhf.credit.rloo import RLOO
from rlhf.data.generation import piece_of
from tests.credit.credit_groups import call, group, group_of, outcome_group, per_trajectory, turn, turn_of

returns = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8)


def calling(rewards, n_calls):
    """Trajectories that search so many times, then answer."""
    turns = [[turn(text="search: x") for _ in range(n)] + [turn(text="answer")] for n in n_calls]
    return group_of(turns, [[0.0] * n + [float(r)] for r, n in zip(rewards, n_calls, strict=True)])


CALLS = calling([1, 0, 1, 0, 0, 1], [0, 0, 1, 1, 1, 2])


def test_stratified_worked_example():
    # Stratum 0: (1, 0), mean and std (over n) .5: ±1. Stratum 1: (1, 0, 0), mean 1/3, std .471405: 1.414211, −.707105
    # twice. Stratum 2 is single: 0. The group: mean and std .5, so ±1. α = .8: .8 · 1 + .2 = 1, .8 · 1.414211 + .2 =
    # 1.331368, −.8 · .707105 − .2 = −.765684, .2.
    within = per_trajectory(Stratified(alpha=1)(CALLS))
    assert within == pytest.approx([1, -1, 1.414211, -0.707105, -0.707105, 0], abs=1e-5)
    credit = Stratified(alpha=0.8)(CALLS)
    expected = [0.999998, -0.999998, 1.331368, -0.765684, -0.765684, 0.2]
    assert per_trajectory(credit) == pytest.approx(expected, abs=1e-5)
    assert credit.metrics["credit/n_singleton_strata"] == 1


def test_strata_are_of_calls_that_match_and_of_the_width_asked_for():
    assert Stratified(calls="^search")(CALLS) == Stratified()(CALLS)  # every trajectory has one more turn, the answer
    assert (
        Stratified(alpha=1, calls="lookup")(CALLS).advantages_GNT == GRPO(ddof=0)(CALLS).advantages_GNT
    )  # one stratum
    wide = Stratified(alpha=1, calls="search", width=2)(CALLS)  # 0 and 1 together: (1, 0, 1, 0, 0); 2 alone
    # Mean .4, std .489898: .6 / .489899 and −.4 / .489899.
    assert per_trajectory(wide) == pytest.approx([1.224742, -0.816495, 1.224742, -0.816495, -0.816495, 0], abs=1e-5)
    assert per_trajectory(Stratified(alpha=0)(CALLS)) == per_trajectory(GRPO(ddof=0)(CALLS))
    with pytest.raises(ValidationError, match="regular expression"):
        Stratified(calls="(")


def test_all_strata_single_leave_the_share_of_the_group():
    made = calling([1, 0, 0], [0, 1, 2])
    group_part = per_trajectory(GRPO(ddof=0)(made))
    credit = Stratified(alpha=0.7)(made)
    assert per_trajectory(credit) == pytest.approx([0.3 * a for a in group_part])
    assert credit.metrics["credit/n_singleton_strata"] == 3


@given(data=st.lists(st.tuples(st.sampled_from([0, 1, 0.5]), st.integers(0, 2)), min_size=1, max_size=8))
def test_stratified_sums_to_zero_in_every_stratum_at_alpha_one(data):
    credit = per_trajectory(Stratified(alpha=1)(calling(*zip(*data, strict=True))))
    for n in range(3):
        assert math.fsum(a for a, (_, calls) in zip(credit, data, strict=True) if calls == n) == pytest.approx(
            0, abs=1e-9
        )


def test_loop_worked_example():
    # R = (1, 0, .5, .5): the others' means 1/3, 2/3, .5, .5.
    assert per_trajectory(LOOP()(outcome_group([1, 0, 0.5, 0.5]))) == pytest.approx([2 / 3, -2 / 3, 0, 0])
    # R = (.006, 0, 0): .006 − 0, −.003 twice, all below .01.
    credit = LOOP()(outcome_group([0.006, 0, 0]))
    assert per_trajectory(credit) == [0, 0, 0] and credit.metrics["credit/n_small_advantages"] == 3
    # R = (.012, 0, 0): .012, −.006 twice: one is left.
    credit = LOOP()(outcome_group([0.012, 0, 0]))
    assert per_trajectory(credit) == pytest.approx([0.012, 0, 0]) and credit.metrics["credit/n_small_advantages"] == 2


@given(rewards=returns)
def test_loop_without_a_threshold_is_rloo_and_sums_to_zero(rewards):
    made = outcome_group(rewards)
    assert LOOP(min_advantage=0)(made).advantages_GNT == RLOO()(made).advantages_GNT
    assert math.fsum(per_trajectory(LOOP(min_advantage=0)(made))) == pytest.approx(0, abs=1e-9)


def test_lightning_counts_trajectories_and_for_comparison_calls():
    # R = (1, 0) in 2 and 3 calls. Per trajectory: mean .5, std .707107. Per call: rows 1, 1, 0, 0, 0, mean .4, std
    # sqrt((2 · .36 + 3 · .16) / 4) = .547723: .6 and −.4 over that.
    made = group([[0, 1], [0, 0, 0]])
    assert per_trajectory(Lightning()(made)) == pytest.approx([0.707107, -0.707107], abs=1e-5)
    assert per_trajectory(Lightning(statistics="call")(made)) == pytest.approx([1.095445, -0.730297], abs=1e-5)
    assert Lightning()(made) == GRPO()(made)
    # A call that is recorded in two pieces is one call.
    whole = call((3, 4, 5))
    pieces = [piece_of(whole, 0, 2), piece_of(whole, 2, 3)]
    made = group_of([[turn_of([whole])], [turn_of(pieces)]], [[1.0], [0.0]])
    assert per_trajectory(Lightning(statistics="call")(made)) == pytest.approx([0.707107, -0.707107], abs=1e-5)


def test_grpo_lead_worked_numbers():
    # w(.25) = .4 + 1.1 / (1 + e^−5) = .4 + 1.1 · .993307; w(.75) = .4 + 1.1 / 2.
    assert GRPOLead().difficulty_weight(0.25) == pytest.approx(1.492638, abs=1e-6)
    assert GRPOLead().difficulty_weight(0.75) == pytest.approx(0.95, abs=1e-6)
    assert GRPOLead(steepness=1e6).difficulty_weight(1.0) == pytest.approx(0.4)
    # Lengths 100, 200, 300: mean 200, std 100, z = −1, 0, 1: e^.05, 1, e^−.05.
    assert GRPOLead().length_factors([100, 200, 300]) == pytest.approx([1.051271, 1, 0.951229], abs=1e-6)
    assert GRPOLead().length_factors([7]) == [1] and GRPOLead().length_factors([7, 7]) == [1, 1]


def test_grpo_lead_prefers_short_right_answers_and_hard_tasks():
    # Right with 1 and 3 tokens, wrong twice: z = ∓.707106, R' = e^.035355 = 1.035988, .965262, −1, −1. Mean .000313,
    # squares 1.072623 + .931127 + 2 · 1.000625 = 4.005, std 1.155422: .896362, .835150, −.865755 twice. Half are right:
    # w(.5) = .4 + 1.1 / (1 + e^−2.5) = 1.416556 for all.
    made = group([[1], [1], [0], [0]], lengths_GK=[[1], [3], [2], [9]], solved_G=[True, True, False, False])
    expected = [w * 1.416556 for w in (0.896362, 0.835150, -0.865755, -0.865755)]
    assert per_trajectory(GRPOLead()(made)) == pytest.approx(expected, abs=1e-4)
    assert per_trajectory(GRPOLead(correct_above=0.5)(made)) == per_trajectory(GRPOLead()(made))
    # One right of four counts more than one wrong of four: 1.5 w(.25) and −1.5 w(.25), against .5 · w(.75).
    hard = per_trajectory(GRPOLead()(outcome_group([1, 0, 0, 0], solved_G=[True, False, False, False])))
    easy = per_trajectory(GRPOLead()(outcome_group([1, 1, 1, 0], solved_G=[True, True, True, False])))
    assert hard == pytest.approx([1.5 * 1.492638] + [-0.5 * 0.95] * 3, abs=1e-5)
    assert easy == pytest.approx([0.5 * 0.95] * 3 + [-1.5 * 1.492638], abs=1e-5)


@given(n=st.integers(1, 6), solved=st.booleans())
def test_grpo_lead_without_two_kinds_of_attempts_of_equal_length_is_zero(n, solved):
    credit = GRPOLead()(outcome_group([1.0] * n, solved_G=[solved] * n))
    assert per_trajectory(credit) == [0.0] * n
    assert credit.metrics["credit/n_zero_std_groups"] == float(n > 1)
