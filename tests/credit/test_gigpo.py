"""GiGPO: the worked example in every variant, similarity, and what a penalty does."""

from __future__ import annotations

from difflib import SequenceMatcher

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.estimator import EstimatorCapabilities
from rlhf.credit.gigpo import GiGPO
from rlhf.credit.groups import broadcast_turns
from rlhf.credit.grpo import GRPO
from rlhf.credit.returns import discounted_returns
from rlhf.credit.similarity import similar_clusters
from rlhf.data import Action, Credit, Score, ScoredGroup, Turn
from rlhf.errors import DataError
from tests.credit.credit_groups import group, per_turn, trajectory, turn

# t1 walks s0, s1, s2 and earns 10 at the end; t2 walks s0, s1, s1, s3 and earns nothing.
# With γ = .95 the discounted returns are t1: 10 · .95² = 9.025, 9.5, 10; t2: 0.
REWARDS = [[0.0, 0.0, 10.0], [0.0, 0.0, 0.0, 0.0]]
STATES = [["s0", "s1", "s2"], ["s0", "s1", "s1", "s3"]]

# Episode part. Per trajectory: mean 5, std 7.071068, so ±5 or ±.707107. Per turn: the rows are 10 three times and 0
# four times, mean 30/7 = 4.285714, std sqrt((3 · 5.714286² + 4 · 4.285714²) / 6) = 5.345225: 1.069045 and -.801784.
# State part. s0: D (9.025, 0), mean 4.5125, std 6.381639, so ±4.5125 or ±.707107. s1: D (9.5, 0, 0), mean 3.166667, so
# 6.333333 and -3.166667 twice, std sqrt((40.1111 + 2 · 10.0278) / 2) = 5.484828, so 1.154700 and -.577350 twice.
# s2 and s3 are seen once: 0.
EXAMPLES = [
    (
        GiGPO(normalize="mean"),
        [[5 + 4.5125, 5 + 6.333333, 5.0], [-5 - 4.5125, -5 - 3.166667, -5 - 3.166667, -5.0]],
    ),
    (
        GiGPO(),
        [
            [0.707107 + 0.707107, 0.707107 + 1.154700, 0.707107],
            [-0.707107 - 0.707107, -0.707107 - 0.577350, -0.707107 - 0.577350, -0.707107],
        ],
    ),
    (
        GiGPO(statistics="turn"),
        [
            [1.776151, 2.223745, 1.069045],
            [-0.801784 - 0.707107, -0.801784 - 0.577350, -0.801784 - 0.577350, -0.801784],
        ],
    ),
    (
        GiGPO(step_weight=0.5, normalize="mean"),
        [[5 + 2.25625, 5 + 3.166667, 5.0], [-5 - 2.25625, -5 - 1.583333, -5 - 1.583333, -5.0]],
    ),
]


@pytest.mark.parametrize(("estimator", "expected"), EXAMPLES, ids=lambda x: repr(x) if isinstance(x, GiGPO) else "")
def test_worked_example(estimator, expected):
    got = per_turn(estimator(group(REWARDS, STATES)))
    for row, expected_row in zip(got, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)


def test_counts_state_groups_singletons_and_unknown_states():
    metrics = GiGPO()(group(REWARDS, [["s0", "s1", "s2"], ["s0", "s1", None, "s3"]])).metrics
    assert metrics["credit/n_state_groups"] == 2  # s0 and s1
    assert metrics["credit/n_singleton_states"] == 2  # s2 and s3
    assert metrics["credit/n_turns_without_state"] == 1


def test_turns_of_unknown_state_are_not_compared_with_each_other():
    unknown = per_turn(GiGPO()(group(REWARDS)))
    assert unknown[0] == pytest.approx([0.707107] * 3, abs=1e-5)
    assert unknown[1] == pytest.approx([-0.707107] * 4, abs=1e-5)


def test_without_step_weight_it_is_grpo():
    made = group(REWARDS, STATES)
    assert GiGPO(step_weight=0)(made).advantages_GNT == GRPO()(made).advantages_GNT


def test_equal_scores_still_learn_from_states():
    # Both earn 1, so the episode part is 0; t1 takes one turn from s0, t2 two: D at s0 is 1 and .95, mean .975.
    credit = GiGPO(normalize="mean")(group([[1.0], [0.0, 1.0]], [["s0"], ["s0", "s1"]]))
    assert per_turn(credit)[0] == pytest.approx([0.025])
    assert per_turn(credit)[1] == pytest.approx([-0.025, 0.0])
    assert credit.metrics["credit/n_zero_std_groups"] == 1


def test_a_state_visited_twice_by_one_trajectory_counts_twice():
    # γ = .5: t1 visits s0 twice with D = .5 and 1, t2 once with D = 0; mean .5, so 0, .5 and -.5 beside ±.5.
    credit = GiGPO(normalize="mean", gamma=0.5)(group([[0.0, 1.0], [0.0]], [["s0", "s0"], ["s0"]]))
    assert per_turn(credit)[0] == pytest.approx([0.5 + 0.0, 0.5 + 0.5])
    assert per_turn(credit)[1] == pytest.approx([-0.5 - 0.5])


def test_a_penalty_lowers_earlier_turns_too():
    # t1 is fined .1 in its second turn: D at s0 is -.1 · .95 = -.095 against 0, so ∓.0475 around the mean.
    credit = GiGPO(normalize="mean")(group([[0.0, -0.1], [0.0]], [["s0", "s1"], ["s0"]]))
    assert per_turn(credit)[0] == pytest.approx([-0.05 - 0.0475, -0.05])
    assert per_turn(credit)[1] == pytest.approx([0.05 + 0.0475])


KEY, LAMP = "You are in room A. key", "You are in room A. lamp"


def test_similar_states_join_above_the_threshold_only():
    # 19 characters agree out of 22 and 23: 2 · 19 / 45 = .844444.
    assert similar_clusters([KEY, LAMP], 0.9) == [0, 1]
    assert similar_clusters([KEY, LAMP], 0.84) == [0, 0]
    made = group([[1.0], [0.0]], [[KEY], [LAMP]])
    apart, together = (GiGPO(normalize="mean", similarity=s)(made) for s in (0.9, 0.84))
    assert per_turn(apart) == [[0.5], [-0.5]] and per_turn(together) == [[1.0], [-1.0]]
    assert together.metrics["credit/n_state_groups"] == 1


def test_a_text_that_comes_again_is_where_it_was():
    # "abcf" is compared with the same first member as "abce" before it, the repeated texts with none.
    assert similar_clusters(["abcd", "abce", "abcf", "abce", "wxyz", "wxyz"], 0.75) == [0, 0, 0, 0, 1, 1]


def test_texts_of_very_different_length_are_not_alike():
    # At most 2 · 2 / (2 + 8) = .4 agree, whatever they say.
    assert similar_clusters(["abababab", "ab"], 0.5) == [0, 1]
    assert similar_clusters(["abababab", "ab"], 0.4) == [0, 0]


def test_a_text_is_compared_with_first_members_only():
    # Neighbours share 3 of 4 characters (.75), the ends 2 (.5): the middle joins the first, the last joins nothing.
    assert similar_clusters(["abcd", "abce", "abfe"], 0.75) == [0, 0, 1]


@given(st.lists(st.text("ab", max_size=4), max_size=12))
def test_threshold_one_means_equality(texts):
    clusters = similar_clusters(texts, 1.0)
    assert [[a == b for b in clusters] for a in clusters] == [[a == b for b in texts] for a in texts]


@given(
    texts=st.lists(st.text("abc", max_size=40) | st.text("ab", min_size=195, max_size=205), max_size=6),
    threshold=st.sampled_from([0.3, 0.5, 0.7, 0.8, 0.9]),
)
def test_bounds_that_rule_out_comparisons_change_no_cluster(texts, threshold):
    # Texts of 200 characters and more are compared otherwise: difflib leaves out characters that are common there.
    first_members, expected = [], []
    for text in texts:
        alike = [SequenceMatcher(None, text, first).ratio() >= threshold for first in first_members]
        if text not in first_members and not any(alike):
            first_members.append(text)
            alike.append(True)
        expected.append(alike.index(True) if any(alike) else first_members.index(text))
    assert similar_clusters(texts, threshold) == expected


@given(st.lists(st.floats(-10, 10), max_size=8), st.floats(0, 1))
def test_discounted_returns_follow_their_sum(rewards, gamma):
    returns = discounted_returns(rewards, gamma)
    expected = [sum(gamma ** (m - k) * rewards[m] for m in range(k, len(rewards))) for k in range(len(rewards))]
    assert returns == pytest.approx(expected, abs=1e-9)


def test_every_token_of_a_turn_gets_its_number_in_all_generations():
    one, two = turn(n_tokens=1), turn(n_tokens=2)
    thinking = Turn(Action("act", one.generations + two.generations), "reply")
    made = ScoredGroup("task", (trajectory([thinking, two]),), (Score({}, (0.0, 0.0), 0.0),))
    tokens = broadcast_turns(made, [[3.0, 4.0]])
    assert tokens == (((3.0,), (3.0, 3.0), (4.0, 4.0)),)
    Credit(tokens).check(made)


def test_spread_refuses_numbers_that_do_not_match_the_turns():
    with pytest.raises(DataError, match="do not match"):
        broadcast_turns(group([[0.0, 0.0]]), [[1.0]])


def test_states_are_compared_unless_steps_weigh_nothing() -> None:
    assert EstimatorCapabilities(GiGPO()).compares_states
    assert not EstimatorCapabilities(GiGPO(step_weight=0.0)).compares_states
