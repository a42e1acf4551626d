"""Which groups are trained on: the worked numbers of each rule, groups kept whole, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.data import ScoredGroup
from rlhf.errors import DataError, RecipeError, TrainingError
from rlhf.tasks.contrib.uncertain import Uncertain
from rlhf.tasks.dynamic import Dynamic
from rlhf.tasks.empty_steps import EmptySteps
from rlhf.tasks.group_metric import measured
from rlhf.tasks.selection import All, GroupSelection, Selection
from tests.tasks.groups import group, groups

#: Two attempts a step of √2 · u apart have the sample deviation u: (√2 u / 2)² · 2 / (2 − 1) = u².
DEVIATIONS = (0.0, 0.5, 0.1, 0.4)


def spread(*deviations: float) -> list[ScoredGroup]:
    """A group of two attempts for each sample deviation."""
    return [group(str(i), [0.0, math.sqrt(2) * u]) for i, u in enumerate(deviations)]


def kept(selection: GroupSelection, of: list[ScoredGroup], n_tasks: int = 4) -> tuple[int, ...]:
    return selection(of, n_tasks, 1).kept


# --- what attempts are compared by -----------------------------------------------------------------------------------


def test_attempts_are_measured_by_success_score_or_one_reward() -> None:
    mixed = group("a", [1.0, 0.4], parts=[3.0, 2.0])
    assert measured(mixed, "success") == [1.0, 0.0]
    assert measured(mixed, "score") == [1.0, 0.4]
    assert measured(mixed, "reward/right") == [3.0, 2.0]
    assert measured(ScoredGroup("b", (), ()), "reward/right") == []


def test_a_reward_that_is_not_there_is_named() -> None:
    with pytest.raises(RecipeError, match="did you mean 'reward/right'"):
        measured(group("a", [1.0]), "reward/rigth")


# --- all -------------------------------------------------------------------------------------------------------------


def test_all_keeps_all_of_one_round() -> None:
    assert All()(groups("11", "00", "01"), 3, 1) == Selection((0, 1, 2))


# --- dynamic ---------------------------------------------------------------------------------------------------------


def test_dynamic_keeps_the_groups_that_differ() -> None:
    # Population deviations 0, √(1/4 · 3/4) = .433013, 0, .433013.
    assert kept(Dynamic(max_rounds=1), groups("1111", "0100", "0000", "1011")) == (1, 3)


@pytest.mark.parametrize(
    ("rows", "n_tasks", "n_more"),
    [
        (["11", "01"], 2, 2),  # one missing, one of two kept: 1 / (1/2) = 2
        (["01", "01", "01", "11"], 4, 2),  # one missing, three of four kept: 1 / (3/4), rounded up
        (["11"] * 4, 4, 4),  # nothing is known of the yield: as many as in a step
        (["01", *["11"] * 3], 4, 4),  # 3 / (1/4) = 12, but never more than in a step
        (["01"] * 4, 4, 0),
    ],
)
def test_dynamic_draws_what_the_yield_suggests(rows: list[str], n_tasks: int, n_more: int) -> None:
    assert Dynamic()(groups(*rows), n_tasks, 1).n_more == n_more


def test_dynamic_trims_what_was_drawn_last() -> None:
    assert Dynamic()(groups("01", "11", "10", "01", "01"), 2, 2) == Selection((0, 2))


def test_after_the_last_round_dynamic_trains_on_what_it_has_or_stops() -> None:
    rows = groups("01", "11", "00", "11")
    assert Dynamic(max_rounds=2)(rows, 2, 1).n_more == 2
    assert Dynamic(max_rounds=2)(rows, 2, 2) == Selection((0,))
    assert Dynamic(max_rounds=1)(groups("11"), 2, 1) == Selection(())
    with pytest.raises(TrainingError, match="2 rounds gave too few groups") as stopped:
        Dynamic(max_rounds=2, on_exhaustion="stop")(rows, 2, 2)
    assert stopped.value.got == "1 of 4 groups"


def test_dynamic_looks_at_the_metric_and_not_at_penalties() -> None:
    penalised = group("a", [1.0, 0.9], parts=[1.0, 1.0])
    assert kept(Dynamic(), [penalised]) == kept(Dynamic(metric="reward/right"), [penalised]) == ()
    assert kept(Dynamic(metric="score"), [penalised]) == (0,)


def test_dynamic_keeps_no_group_that_failures_left_with_one_attempt() -> None:
    assert kept(Dynamic(max_rounds=1), [group("a", [1.0]), ScoredGroup("b", (), ())]) == ()


@given(
    rows=st.lists(st.text("01", min_size=1, max_size=4), min_size=1, max_size=12),
    n_tasks=st.integers(1, 6),
    n_rounds=st.integers(1, 4),
)
def test_dynamic_keeps_only_whole_groups_that_differ_and_at_most_a_step(
    rows: list[str], n_tasks: int, n_rounds: int
) -> None:
    drawn = groups(*rows)
    selection = Dynamic()(drawn, n_tasks, n_rounds)
    selection.check(len(drawn), "here")
    differing = [i for i, row in enumerate(rows) if len(set(row)) == 2]
    assert list(selection.kept) == differing[:n_tasks]
    assert 0 <= selection.n_more <= n_tasks
    # More is asked for exactly while groups are missing and rounds are left.
    assert (selection.n_more > 0) == (len(differing) < n_tasks and n_rounds < 4)


# --- uncertain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Uncertain(rule="top_k", value=0.5), (1, 3)),  # 2 of 4
        (Uncertain(), (1,)),  # a quarter
        (Uncertain(rule="top_k", value=0.2), (1,)),  # .8 of a group: at least one
        (Uncertain(rule="top_k", value=1.0), (1, 2, 3)),  # not those without any deviation
        (Uncertain(rule="top_k", value=1.0, drop_equal=False), (0, 1, 2, 3)),
        (Uncertain(rule="top_k_abs", value=2), (1, 3)),
        (Uncertain(rule="top_k_abs", value=9), (1, 2, 3)),
        (Uncertain(rule="min_p", value=0.8), (1, 3)),  # .4 ≥ .8 · .5
        (Uncertain(rule="min_p", value=0.81), (1,)),
        (Uncertain(rule="min_p", value=0.2), (1, 2, 3)),
        (Uncertain(rule="top_p", value=0.8), (1, 3)),  # Σ = 1; .5 < .79 ≤ .5 + .4
        (Uncertain(rule="top_p", value=0.5), (1,)),  # .5 ≥ .49
        (Uncertain(rule="top_p"), (1, 3)),  # .9 ≥ .89
        (Uncertain(rule="top_p", value=1.0), (1, 2, 3)),
        (Uncertain(rule="top_p", value=0.95, drop_equal=False), (1, 2, 3)),  # 1 ≥ .94: never those at 0
        # e^0, e^−.1, e^−.4 = 1, .904837, .670320, together 2.575157: shares .388326, .351372, .260302.
        (Uncertain(rule="top_p_softmax", value=0.38), (1,)),
        (Uncertain(rule="top_p_softmax", value=0.73), (1, 3)),
        (Uncertain(rule="top_p_softmax", value=0.75), (1, 2, 3)),
        (Uncertain(rule="top_p_softmax", value=1.0), (1, 2, 3)),
        (Uncertain(rule="reweight"), (1, 2, 3)),
    ],
)
def test_the_rules_of_uncertain(selection: Uncertain, expected: tuple[int, ...]) -> None:
    assert kept(selection, spread(*DEVIATIONS)) == expected


def test_reweighting_scales_by_the_deviation_over_the_largest() -> None:
    found = Uncertain(rule="reweight", drop_equal=False)(spread(*DEVIATIONS), 4, 1)
    assert found.kept == (0, 1, 2, 3)
    assert found.factors == pytest.approx([0.0, 1.0, 0.2, 0.8], abs=1e-5)  # u / (.5 + 1e-6)


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 0.5), ("sqrt", 0.707107), ("none", None)])
def test_a_step_that_keeps_less_may_move_the_policy_less(scaling: str, factor: float | None) -> None:
    found = Uncertain(rule="top_k", value=0.5, scaling=scaling)(spread(*DEVIATIONS), 4, 1)  # type: ignore[arg-type]
    assert found.factors == (None if factor is None else pytest.approx((factor,) * 2, abs=1e-6))


def test_scaling_and_reweighting_multiply() -> None:
    # Three of four groups are kept: .75 · (1, .2, .8).
    found = Uncertain(rule="reweight", scaling="linear")(spread(*DEVIATIONS), 4, 1)
    assert found.factors == pytest.approx((0.75, 0.15, 0.6), abs=1e-5)


def test_equal_deviations_keep_their_order_and_slack_never_empties_a_step() -> None:
    assert kept(Uncertain(rule="top_k_abs", value=2), spread(0.3, 0.3, 0.3)) == (0, 1)
    # .9 · .006 − .01 < 0: the slack is more than the whole, and the first is kept all the same.
    assert kept(Uncertain(rule="top_p"), spread(0.001, 0.003, 0.002)) == (1,)


@pytest.mark.parametrize("rule", ["top_k", "top_p", "top_p_softmax", "reweight"])
def test_groups_that_do_not_differ_leave_nothing(rule: str) -> None:
    assert kept(Uncertain(rule=rule), spread(0.0, 0.0)) == ()  # type: ignore[arg-type]
    assert kept(Uncertain(rule=rule), []) == ()  # type: ignore[arg-type]


def test_a_share_loses_no_group_to_rounding() -> None:
    # .29 · 100 is 28.999999999999996 in floating point.
    assert len(kept(Uncertain(rule="top_k", value=0.29), spread(*[0.1] * 100))) == 29


@given(
    deviations=st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]), max_size=10),
    rule=st.sampled_from(["top_k", "top_k_abs", "min_p", "top_p", "top_p_softmax", "reweight"]),
    value=st.floats(0.01, 1.0),
    drop_equal=st.booleans(),
    scaling=st.sampled_from(["none", "linear", "sqrt"]),
)
def test_uncertain_never_leaves_out_a_group_that_differs_more_than_one_it_keeps(
    deviations: list[float], rule: str, value: float, drop_equal: bool, scaling: str
) -> None:
    number = {"reweight": None, "top_k_abs": math.ceil(5 * value)}.get(rule, value)
    selection = Uncertain(rule=rule, value=number, drop_equal=drop_equal, scaling=scaling)  # type: ignore[arg-type]
    found = selection(spread(*deviations), 4, 1)
    found.check(len(deviations), "here")
    assert found.n_more == 0
    left_out = [u for i, u in enumerate(deviations) if i not in found.kept]
    assert all(deviations[i] >= max(left_out, default=0.0) - 1e-9 for i in found.kept)
    assert not drop_equal or all(deviations[i] > 0 for i in found.kept)
    assert found.kept or not any(deviations)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rule": "reweight", "value": 0.5}, "no effect"),
        ({"rule": "top_k_abs"}, "needs a value"),
        ({"rule": "min_p"}, "needs a value"),
        ({"rule": "top_k_abs", "value": 1.5}, "whole number"),
        ({"rule": "top_k_abs", "value": 0}, "whole number"),
        ({"rule": "top_k", "value": 8}, "top_k_abs takes a number of groups, top_k a share"),
        ({"rule": "top_p", "value": 0}, "no threshold"),
    ],
)
def test_a_value_that_does_not_fit_its_rule_is_refused(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Uncertain(**keys)  # type: ignore[arg-type]


# --- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        (Selection((0, 0)), "one twice"),
        (Selection((1, 0)), "not in order"),
        (Selection((3,)), "not drawn"),
        (Selection((-1,)), "not drawn"),
        (Selection((0, 1), factors=(1.0,)), "do not fit"),
        (Selection((0,), factors=(-1.0,)), "do not fit"),
        (Selection((0,), factors=(math.nan,)), "do not fit"),
        (Selection((0,), n_more=-1), "negative number of tasks"),
    ],
)
def test_what_a_selection_cannot_mean_is_refused(selection: Selection, says: str) -> None:
    with pytest.raises(DataError, match=says):
        selection.check(3, "MySelection")


# --- steps without anything ------------------------------------------------------------------------------------------


def test_empty_steps_in_a_row_end_a_run() -> None:
    steps = EmptySteps()
    assert steps.learn(3.0, "step 1") == ({"sampling/n_empty_steps": 0.0}, {})
    for n in (1, 2):
        steps.check(2, "step 2")
        figures, cautions = steps.learn(0.0, "step 2")
        assert figures == {"sampling/n_empty_steps": float(n)} and "step 2 had nothing to train on" in cautions["empty"]
    steps.check(None, "step 3")
    again = EmptySteps()
    again.load_state_dict(steps.state_dict())
    with pytest.raises(TrainingError, match="2 steps in a row had nothing to train on"):
        again.check(2, "step 3")
    again.learn(1.0, "step 3")
    again.check(1, "step 4")
