"""Estimators around another one: worked examples, and that they keep what the inner one promises."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.credit.contrib.actor_critic_agents import Reviews
from rlhf.credit.contrib.duration_aware import DurationAware
from rlhf.credit.contrib.hicra import HICRA
from rlhf.credit.contrib.ktae import KTAE, fisher_p, information_gain
from rlhf.credit.contrib.lite_ppo import LitePPO
from rlhf.credit.contrib.task_normalised import TaskNormalised
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.credit.estimator import AdvantageEstimator, compute_advantages
from rlhf.credit.grpo import GRPO
from rlhf.credit.reinforce_pp import ReinforcePP
from rlhf.data import Credit
from rlhf.errors import RecipeError
from rlhf.rollout.branching import Branch, Fork, split_generations
from tests.credit.credit_groups import (
    call,
    group,
    group_of,
    outcome_group,
    per_token,
    per_trajectory,
    taking,
    turn,
    turn_of,
)

WRAPPERS = [TaskNormalised, DurationAware, KTAE, Reviews, lambda **how: HICRA(grams=((7, 7),), **how)]
NAMES = ["task_normalised", "duration_aware", "ktae", "reviews", "hicra"]
every = pytest.mark.parametrize("wrapper", WRAPPERS, ids=NAMES)


def tokens(credits):
    return [x for credit in credits for row in per_token(credit) for x in row]


@every
def test_a_wrapper_needs_what_the_inner_estimator_needs(wrapper):
    class Critical(GRPO):
        needs_values: ClassVar[bool] = True

    assert isinstance(wrapper(), AdvantageEstimator)
    assert wrapper().inner == GRPO() and wrapper().min_group == 2 and not wrapper().needs_values
    assert wrapper(inner=Critical()).needs_values
    assert wrapper(inner=GRPO(single_group="raw")).min_group == wrapper(inner=ReinforcePP()).min_group == 1
    assert wrapper(inner=TaskNormalised(inner=ReinforcePP())).min_group == 1


@every
def test_the_inner_estimator_sees_the_whole_step_through_every_wrapper(wrapper):
    # Two groups whose deviation is that of four scores together; seen one at a time they would have their own.
    made = [outcome_group([1, 0], task="a/0"), outcome_group([5, 1], task="a/1")]
    twice = wrapper(inner=wrapper(inner=LitePPO()))
    inner = compute_advantages(LitePPO(), made)
    apart = [twice(one) for one in made]
    assert tokens(compute_advantages(twice, made)) == tokens(wrapper().changed(made, wrapper().changed(made, inner)))
    assert tokens(apart) != pytest.approx(tokens(compute_advantages(twice, made)))


@every
def test_counters_of_the_inner_estimator_are_kept(wrapper):
    credits = compute_advantages(wrapper(), [outcome_group([1, 0], task="a/0"), outcome_group([1, 1], task="a/1")])
    assert [c.metrics["credit/n_zero_std_groups"] for c in credits] == [0, 1]


def test_task_normalised_worked_example():
    # Type 1: .5, −.5, .5, mean .166667, std over n sqrt((2 · .111111 + .444444) / 3) = .471405: .707105, −1.414211,
    # .707105. Type 2: 5 and −5, std 5: ±1.
    made = [group([[0]], lengths_GK=[[3]], task="maze/3/0"), group([[0]], lengths_GK=[[2]], task="maze/9/0")]
    inner = [Credit((((0.5, -0.5, 0.5),),)), Credit((((5.0, -5.0),),))]
    credits = TaskNormalised().changed(made, inner)
    assert tokens(credits) == pytest.approx([0.707105, -1.414211, 0.707105, 1, -1], abs=1e-5)
    assert credits[0].metrics == {"credit/n_task_types": 2.0}
    unshifted = TaskNormalised(subtract_mean=False).changed(made, inner)
    assert tokens(unshifted)[:2] == pytest.approx([1.060658, -1.060658], abs=1e-5)  # ±.5 / .471406
    # By the first part of their ids they are one type: mean .5 / 5 = .1; squares 2 · .16 + .36 + 24.01 + 26.01 = 50.7;
    # std sqrt(50.7 / 5) = 3.184337.
    one = TaskNormalised(id_parts=1).changed(made, inner)
    assert one[0].metrics == {"credit/n_task_types": 1.0}
    assert tokens(one) == pytest.approx([0.125615, -0.188422, 0.125615, 1.538782, -1.601589], abs=1e-5)


@pytest.mark.parametrize(
    ("id_parts", "task", "expected"),
    [
        (None, "babyai-1.3.1/GoToObj/train/17", "babyai-1.3.1/GoToObj/train"),
        (None, "maze-4/17", "maze-4"),
        (None, "17", "17"),
        (1, "textworld/coin/train/3", "textworld"),
        (2, "textworld/coin/train/3", "textworld/coin"),
        (9, "textworld/coin", "textworld/coin"),
    ],
)
def test_the_type_of_a_task_is_a_part_of_its_id(id_parts, task, expected):
    assert TaskNormalised(id_parts=id_parts).type_of(task) == expected


def test_a_type_without_differences_is_left_as_it_is():
    made = [outcome_group([1, 1], task="easy/0"), outcome_group([1, 0], task="hard/0"), group([[3]], task="alone/0")]
    credits = compute_advantages(TaskNormalised(inner=GRPO(single_group="raw")), made)
    assert per_trajectory(credits[0]) == [0, 0] and per_trajectory(credits[2]) == [3]
    assert per_trajectory(credits[1]) == pytest.approx([1, -1], abs=1e-5)


@given(
    data=st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=4)),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_every_type_of_task_has_mean_zero_and_the_same_scale(data):
    made = [outcome_group(rewards, task=f"{kind}/{i}") for i, (kind, rewards) in enumerate(data)]
    credits = compute_advantages(TaskNormalised(), made)
    for kind in "ab":
        values = tokens(c for c, (k, _) in zip(credits, data, strict=True) if k == kind)
        assert math.fsum(values) == pytest.approx(0, abs=1e-6)
        if any(values):
            assert math.fsum(x * x for x in values) / len(values) == pytest.approx(1, abs=1e-4)


def test_duration_aware_worked_example():
    # One turn of 1 s and one of 9 s: mean 5, weights .2 and 1.8. GRPO gives ±.707106.
    made = taking(outcome_group([1, 0]), [1, 9])
    [credit] = compute_advantages(DurationAware(), [made])
    assert per_trajectory(credit) == pytest.approx([0.2 * 0.707106, -1.8 * 0.707106], abs=1e-5)
    # A trajectory of 9 turns and 9 s has turns of 1 s: all are alike.
    even = taking(group([[1], [0] * 9]), [1, 9])
    assert DurationAware()(even).advantages_GNT == GRPO()(even).advantages_GNT
    # Over two groups, turns of 1, 1, 1 and 97 s: mean 25, and 3.88 is brought to the bound.
    pair = [taking(outcome_group([1, 0]), [1, 1]), taking(outcome_group([1, 0], task="b"), [1, 97])]
    bounded = compute_advantages(DurationAware(max_weight=2), pair)
    weights = (0.04, 0.04, -0.04, -0.04, 0.04, 0.04, -2, -2)
    assert tokens(bounded) == pytest.approx([0.707106 * w for w in weights], abs=1e-5)


def test_each_turn_counts_with_its_own_seconds():
    # Turns of 1, 9 and 5 s: mean 5, weights .2, 1.8 and 1, whatever the trajectories took in all.
    made = group([[1, 0], [0]])
    timed = [
        replace(t, duration_s=99.0, turns=tuple(replace(u, duration_s=s) for u, s in zip(t.turns, own, strict=True)))
        for t, own in zip(made.trajectories, ([1.0, 9.0], [5.0]), strict=True)
    ]
    [row, other] = DurationAware()(replace(made, trajectories=tuple(timed))).advantages_GNT
    plain = GRPO()(made).advantages_GNT
    assert [x for r in row for x in r] == pytest.approx(
        [w * x for w, r in zip((0.2, 1.8), plain[0], strict=True) for x in r]
    )
    assert other == plain[1]


def test_unknown_durations_change_nothing_and_are_counted():
    made = outcome_group([1, 0, 0])
    credit = DurationAware()(made)
    assert credit.advantages_GNT == GRPO()(made).advantages_GNT and credit.metrics["credit/n_untimed_trajectories"] == 3
    some = DurationAware()(taking(made, [2, 0, math.nan]))  # the only known one is its own mean
    assert some.advantages_GNT == GRPO()(made).advantages_GNT and some.metrics["credit/n_untimed_trajectories"] == 2


def test_hicra_raises_planning_tokens():
    # α = .2: .5 becomes .6, −.5 becomes −.4; the rest stays.
    made = group_of([[turn(ids=[1, 2, 3, 9])], [turn(ids=[9, 2, 3])]], [[1], [0]])
    credit = HICRA(grams=((2, 3), (5,)), inner=GRPO(normalize_std=False))(made)
    assert per_token(credit) == [[0.5, pytest.approx(0.6), pytest.approx(0.6), 0.5], [-0.5, -0.4, -0.4]]
    assert credit.metrics["credit/n_planning_tokens"] == 4


@pytest.mark.parametrize(
    ("settings", "ids", "expected"),
    [
        ({"grams": ((1, 1),)}, [1, 1, 1, 2], [1, 1, 1, 0]),  # overlapping
        ({"grams": ((1, 2), (2, 3))}, [1, 2, 3, 4], [1, 1, 1, 0]),
        ({"grams": ((1, 2, 3),)}, [2, 1, 2], [0, 0, 0]),
        (
            {"plan_start_ids": (8,), "plan_end_ids": (9,)},
            [1, 8, 2, 3, 9, 4, 8, 9, 8, 5],
            [0, 0, 1, 1, 0, 0, 0, 0, 0, 1],
        ),
        ({"plan_start_ids": (8, 8), "plan_end_ids": (9, 9)}, [8, 8, 2, 9, 9, 4], [0, 0, 1, 0, 0, 0]),
        ({"plan_start_ids": (8,)}, [1, 8, 2, 8, 3], [0, 0, 1, 1, 1]),
        ({"plan_start_ids": (8,), "plan_end_ids": (9,), "grams": ((1,),)}, [1, 8, 2, 9, 1], [1, 0, 1, 0, 1]),
        ({"grams": ((1,),)}, [], []),
    ],
)
def test_planning_tokens_are_those_of_grams_and_between_tags(settings, ids, expected):
    assert HICRA(**settings).planning(ids) == [bool(x) for x in expected]


def test_hicra_reads_a_call_in_pieces_as_a_whole():
    whole = group_of([[turn_of([call((10, 11, 12, 13, 5)), call((11,))])], [turn_of([call((5,))])]], [[1.0], [0.0]])
    pieces, _ = split_generations(whole.trajectories, [Branch(0, (), fork=Fork(0, 2))])
    tags, gram = (
        HICRA(plan_start_ids=(10,), plan_end_ids=(13,), inner=DrGRPO()),
        HICRA(grams=((11, 12),), inner=DrGRPO()),
    )
    for hicra in (tags, gram):
        assert hicra(whole).advantages_GNT[0] == (pytest.approx((0.5, 0.6, 0.6, 0.5, 0.5)), (0.5,))
        first, second, other = hicra(replace(whole, trajectories=tuple(pieces))).advantages_GNT[0]
        assert (first + second, other) == hicra(whole).advantages_GNT[0]
        assert hicra(whole).metrics["credit/n_planning_tokens"] == 2


@pytest.mark.parametrize(
    "settings", [{}, {"plan_end_ids": (9,)}, {"grams": ((),)}, {"grams": ((1,),), "plan_end_ids": (9,)}]
)
def test_hicra_without_planning_tokens_is_refused(settings):
    with pytest.raises(ValidationError):
        HICRA(**settings)


def test_ktae_worked_example():
    # Four right and four wrong attempts of 5 tokens; id 7 once in three right ones and once in one wrong one. Tables
    # with 4 and 4 in the margins have C(4, k)² of 70 ways: 1, 16, 36, 16, 1. (3, 1) has 16: p = (1 + 16 + 16 + 1) / 70.
    assert fisher_p(3, 1, 1, 3) == pytest.approx(0.485714, abs=1e-6)
    # Halves are 1 bit; three of four are .811278: 1 − .811278.
    assert information_gain(3, 1, 1, 3) == pytest.approx(0.188722, abs=1e-6)
    # F = e^(−.971429) = .378542; h = asin √.75 − asin √.25 = .523599; tf .15 and .05, sides of equal length: x = .45 /
    # 2.15 = .209302, y = .15 / 2.05 = .073171; s = .523599 + 2.860078 − .349581 = 3.034096; key = (.378542 + .188722) ·
    # s / 2 = .860566; κ = 2 σ(key) − 1 = .405558.
    rest = [1, 2, 3, 4]  # in every attempt: p is 1 and nothing is gained, so 0
    right, wrong = [[7, *rest]] * 3 + [[6, *rest]], [[7, *rest]] + [[5, *rest]] * 3
    kappa = KTAE().kappa(right, wrong)
    assert kappa[7] == pytest.approx(0.405558, abs=1e-5)
    assert [kappa[i] for i in rest] == [0, 0, 0, 0]
    assert kappa[6] > 0 > kappa[5] and KTAE(max_bonus=0.5).kappa(right, wrong)[7] == pytest.approx(0.202779, abs=1e-5)
    # Exchanged, everything is turned around.
    assert KTAE().kappa(wrong, right) == {i: pytest.approx(-x, abs=1e-9) for i, x in kappa.items()}


def test_ktae_without_any_evidence_is_refused():
    with pytest.raises(ValidationError, match="fisher_weight and gain_weight must not both be 0"):
        KTAE(fisher_weight=0, gain_weight=0)
    # Either alone is evidence: the right attempts say 5, the wrong ones do not, and all say 3.
    right, wrong = [turn(ids=[5, 3])], [turn(ids=[3])]
    made = group_of([right, right, wrong, wrong], [[1], [1], [0], [0]], solved_G=[True, True, False, False])
    base = per_token(GRPO()(made))
    for alone in (KTAE(fisher_weight=0), KTAE(gain_weight=0)):
        assert per_token(alone(made))[0][0] > base[0][0]


def test_ktae_adds_to_every_token_but_stop_tokens():
    made = group_of([[turn(ids=[7, 0])], [turn(ids=[5, 0])]], [[1], [0]], solved_G=[True, False])
    kappa = KTAE().kappa([[7, 0]], [[5, 0]])
    assert kappa[7] > 0.9 and kappa[5] == pytest.approx(-kappa[7])
    assert made.trajectories[0].generations[0].prompt.stop_ids == (0,)
    base = per_token(GRPO()(made))
    assert per_token(KTAE()(made)) == [[base[0][0] + kappa[7], base[0][1]], [base[1][0] + kappa[5], base[1][1]]]
    assert KTAE(correct_above=0.5)(made) == KTAE()(made)
    assert KTAE(correct_above=2)(made) == GRPO()(made)  # nobody is right


@given(
    right=st.lists(st.lists(st.integers(1, 4), max_size=4), max_size=4),
    wrong=st.lists(st.lists(st.integers(1, 4), max_size=4), max_size=4),
)
def test_values_of_tokens_are_bounded_and_say_on_which_side_they_occur(right, wrong):
    kappa = KTAE().kappa(right, wrong)
    assert all(-1 <= x <= 1 for x in kappa.values())
    sampled = {i for ids in right + wrong for i in ids}
    assert set(kappa) == (sampled if any(right) and any(wrong) else set())
    for i, x in kappa.items():
        if not any(i in ids for ids in wrong):
            assert x >= 0
        if not any(i in ids for ids in right):
            assert x <= 0


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_fisher_and_gain_do_not_depend_on_which_side_is_called_right(a, b, c, d):
    assert 0 < fisher_p(a, b, c, d) <= 1
    assert fisher_p(a, b, c, d) == fisher_p(b, a, d, c)
    if a + b + c + d:
        assert information_gain(a, b, c, d) == pytest.approx(information_gain(b, a, d, c), abs=1e-12)
        assert -1e-12 <= information_gain(a, b, c, d) <= 1


@pytest.mark.parametrize(
    ("key", "settings"), [("grams", {"grams": ((5,), (6, 99))}), ("plan_start_ids", {"plan_start_ids": (99,)})]
)
def test_hicra_refuses_ids_that_the_policy_cannot_say(key, settings):
    settings = HICRA(**settings)
    settings.check_policy(range(100))  # whatever has a length
    with pytest.raises(RecipeError, match="no such token") as caught:
        settings.check_policy(range(99))
    assert caught.value.got == "99" and caught.value.where.endswith(key)
