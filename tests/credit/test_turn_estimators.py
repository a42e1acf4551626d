"""HGPO, Step-GRPO, progress and HRPO: estimators that tell the turns of a trajectory apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.hgpo import HGPO
from rlhf.credit.contrib.hrpo import HRPO
from rlhf.credit.contrib.progress import Progress, grounded
from rlhf.credit.contrib.step_grpo import StepGRPO
from rlhf.credit.estimator import compute_advantages
from rlhf.credit.gigpo import GiGPO
from rlhf.credit.grpo import GRPO
from rlhf.data import Score, ScoredGroup, Values, Verdict
from rlhf.errors import DataError
from tests.credit.credit_groups import group, group_of, per_token, per_trajectory, per_turn, score, turn

# t1 walks s0, s1, s2 and earns 10 at the end; t2 walks s0, s1, s1, s3 and earns nothing.
# With γ = .95 the discounted returns are t1: 9.025, 9.5, 10; t2: 0.
REWARDS = [[0.0, 0.0, 10.0], [0.0, 0.0, 0.0, 0.0]]
STATES = [["s0", "s1", "s2"], ["s0", "s1", "s1", "s3"]]
WALKS = group(REWARDS, STATES)


def rows(estimator, made):
    return per_turn(estimator(made))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Depth 0, deviations over n. s0: (9.025, 0) gives ±1. s1: (9.5, 0, 0), mean 3.166667, std sqrt((40.111 + 2 ·
        # 10.028) / 3) = 4.478343: 1.414213 and −.707106 twice. s2 and s3 are seen once.
        (HGPO(history=0), [[1.0, 1.414213, 0.0], [-1.0, -0.707106, -0.707106, 0.0]]),
        # Depth 1: (s0, s1) of t1 and of t2's second turn give ±1; (s1, s1) and the others are single. Weights 2 and 3:
        # (2 · 1.414213 + 3) / 5 = 1.165685; (−2 · .707106 − 3) / 5 = −.882842; s0 has depth 0 alone.
        (HGPO(history=1), [[1.0, 1.165685, 0.0], [-1.0, -0.882842, -0.707106, 0.0]]),
        # Weights 1 and 2, as in the paper: (1.414213 + 2) / 3 = 1.138071; −(.707106 + 2) / 3 = −.902369.
        (HGPO(history=1, first_weight=1), [[1.0, 1.138071, 0.0], [-1.0, -0.902369, -0.707106, 0.0]]),
        # α = 0: plain means. (1.414213 + 1) / 2.
        (HGPO(history=1, alpha=0), [[1.0, 1.207107, 0.0], [-1.0, -0.853553, -0.707106, 0.0]]),
        # With episodes, whose deviation is over n − 1: ±5 / 7.071068 = ±.707107 of weight 1. t1: (.707107 + 2) / 3;
        # (.707107 + 2 · 1.414213 + 3) / 6; .707107. t2: −the first; −5.12132 / 6; −2.12132 / 3; −.707107.
        (HGPO(history=1, episode=True), [[0.902369, 1.089255, 0.707107], [-0.902369, -0.853553, -0.707107, -0.707107]]),
    ],
    ids=repr,
)  # fmt: skip
def test_hgpo_worked_example(estimator, expected):
    for row, expected_row in zip(rows(estimator, WALKS), expected, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)


def test_hgpo_counts_states_and_leaves_out_what_is_unknown():
    credit = HGPO()(group(REWARDS, [["s0", "s1", "s2"], ["s0", "s1", None, "s3"]]))
    assert credit.metrics["credit/n_state_groups"] == 2 and credit.metrics["credit/n_singleton_states"] == 2
    assert credit.metrics["credit/n_turns_without_state"] == 1
    assert per_turn(credit)[1][2:] == [0.0, 0.0]  # unknown, and reached through the unknown with nobody beside it


@given(st.integers(0, 4), st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), min_size=2, max_size=4))
def test_hgpo_without_history_is_the_state_part_of_gigpo(reward, states):
    made = group([[0.0] * (len(row) - 1) + [float(reward + i)] for i, row in enumerate(states)], states)
    both = per_turn(GiGPO(ddof=0)(made))
    episode = per_turn(GiGPO(ddof=0, step_weight=0)(made))
    for ours, theirs, base in zip(rows(HGPO(history=0), made), both, episode, strict=True):
        assert ours == pytest.approx([a - b for a, b in zip(theirs, base, strict=True)], abs=1e-9)


def test_step_grpo_compares_turns_of_one_number_and_last_turns():
    # First turns that are not last: (.8, .4), mean .6, std .282843: ±.707104. Second: t1's .2 stands alone. Last turns:
    # (1, 0, 0), mean 1/3, std .577350: 1.154699, −.577349 twice.
    made = group([[0.8, 0.2, 1.0], [0.4, 0.0], [0.0]])
    credit = StepGRPO()(made)
    expected = [[0.707104, 0.0, 1.154699], [-0.707104, -0.577349], [-0.577349]]
    for row, expected_row in zip(per_turn(credit), expected, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)
    assert credit.metrics["credit/n_singleton_turns"] == 1
    # By number alone. First: (.8, .4, 0), mean .4, std .4: 1, 0, −1. Second: (.2, 0): ±.707102. Third: alone.
    by_number = [[0.999998, 0.707102, 0.0], [0.0, -0.707102], [-0.999998]]
    for row, expected_row in zip(rows(StepGRPO(last_apart=False), made), by_number, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.4, 1.0]), min_size=1, max_size=4), min_size=1, max_size=5))
def test_step_grpo_sums_to_zero_over_the_turns_of_each_number(rewards):
    found = rows(StepGRPO(last_apart=False), group(rewards))
    for k in range(max(map(len, rewards))):
        assert math.fsum(row[k] for row in found if k < len(row)) == pytest.approx(0, abs=1e-9)


def test_step_grpo_is_grpo_where_every_trajectory_has_one_turn():
    made = group([[1.0], [0.0], [0.5]])
    assert StepGRPO()(made).advantages_GNT == GRPO()(made).advantages_GNT
    assert StepGRPO()(group([[1.0, 0.0], [0.0, 1.0]])).metrics["credit/n_zero_std_groups"] == 0  # equal totals only


def test_grounding_adds_to_what_was_carried_out_and_to_the_last_turn():
    # Contributions (.1, .2, .5), carried out: the first and, as always, the last. β = .5: .6, .2, 1.0.
    first, second, third = turn(), replace(turn(), valid=False), replace(turn(), valid=False)
    made = group_of([[first, second, third]], [[0.1, 0.2, 0.5]])
    assert grounded(made.trajectories[0], [0.1, 0.2, 0.5], 0.5) == pytest.approx([0.6, 0.2, 1.0])


def test_progress_takes_contributions_of_a_critic():
    # ĉ = (.1, .2, .5), g = (1, 0, 1), β = .5: r = (.6, .2, 1). The other attempt has one turn without tokens, which
    # contributed nothing, and one with ĉ = .4, carried out: r = (.5, .9). Of all five, whatever the scores: mean .64,
    # squared distances .0016 + .1936 + .1296 + .0196 + .0676 = .412, deviation √.103 = .320936. What is to go from the
    # last turn on: .36, −.08, −.12 and .26, .12, each over the deviation.
    made = group([[0, 0, 1], [0, 0]], lengths_GK=[[2, 1, 2], [0, 1]])
    turns = made.trajectories[0].turns
    invalid = replace(made.trajectories[0], turns=(turns[0], replace(turns[1], valid=False), turns[2]))
    made = replace(made, trajectories=(invalid, made.trajectories[1]))
    found = (((0.1, 0.1), (0.2,), (0.5, 0.5)), ((), (0.4,)))
    nothing = tuple(tuple((0.0,) * len(row) for row in rows) for rows in found)
    estimator = Progress(contributions="critic", eps=0.0)
    assert estimator.needs_values and estimator.needs_critic == "contributions" and not Progress().needs_values
    [credit] = compute_advantages(estimator, [made], [Values(nothing, (0.0, 0.0), found)])
    d = 0.320936
    assert per_token(credit) == [
        [pytest.approx(x / d, abs=1e-5) for x in (-0.12, -0.12, -0.08, 0.36, 0.36)], [pytest.approx(0.26 / d, abs=1e-5)]
    ]  # fmt: skip
    for values, says in ((None, "values of a critic"), (Values(nothing, (0.0, 0.0)), "values of actions")):
        with pytest.raises(DataError, match=says):
            estimator(made, values)


def test_progress_sums_what_is_still_to_come():
    # r of t1: .6, .2, 1.0 as above; of t2, one turn without contribution: .5. Mean 2.3 / 4 = .575; squares .000625 +
    # .140625 + .180625 + .005625 = .3275; std sqrt(.3275 / 3) = .330404. Each (r − mean) / std: .075665, −1.134974,
    # 1.286304; −.226995. Summed from the end: 1.286304, .151330, .226995.
    first, second = turn(), replace(turn(), valid=False)
    made = group_of([[first, second, turn()], [turn()]], [[0.1, 0.2, 0.5], [0.0]])
    t1, t2 = rows(Progress(), made)
    assert t1 == pytest.approx([0.226995, 0.151330, 1.286304], abs=1e-5) and t2 == pytest.approx([-0.226995], abs=1e-5)
    # Each turn carried out and worth the same: nothing to learn, whatever the totals.
    silent = Progress()(group([[0.1, 0.1], [0.1]]))
    assert not any(x for row in per_turn(silent) for x in row)
    assert silent.metrics["credit/n_zero_std_groups"] == 1


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=4), min_size=2, max_size=5))
def test_progress_of_first_turns_sums_to_zero(rewards):
    # The first turn holds the whole centred sum of its trajectory, and all turns together sum to 0.
    assert math.fsum(row[0] for row in rows(Progress(), group(rewards))) == pytest.approx(0, abs=1e-6)


def test_hrpo_adds_the_reward_of_each_turn():
    # R = (1, 0, 0, 1): ±.866024 as GRPO; steps of −.1 and .2 as they are, and none below 0 in the first turn if exempt.
    made = group([[0.0, 1.0], [0.0], [0.0], [1.0]])
    steps = [[-0.1, 0.2], [-0.1], [0.0], [0.0]]
    scores = [
        Score({"cost": Verdict(sum(row), "", tuple(row))}, s.turns, s.total)
        for row, s in zip(steps, made.scores, strict=True)
    ]
    made = ScoredGroup("task", made.trajectories, tuple(scores))
    assert rows(HRPO(reward="cost"), made) == [
        pytest.approx(row, abs=1e-5) for row in ([0.766024, 1.066024], [-0.966024], [-0.866024], [0.866024])
    ]
    assert rows(HRPO(reward="cost", exempt_turns=1), made)[0] == pytest.approx([0.866024, 1.066024], abs=1e-5)
    assert rows(HRPO(reward="cost", step_weight=0.5), made)[1] == pytest.approx([-0.916024], abs=1e-5)
    assert HRPO(reward="cost", step_weight=0)(made).advantages_GNT == GRPO()(made).advantages_GNT


def test_hrpo_leaves_an_absolute_reward_where_there_is_nothing_to_compare():
    assert rows(HRPO(reward="steps"), group([[-0.1, 0.3]])) == [[-0.1, 0.3]]
    assert per_trajectory(HRPO(reward="steps")(group([[-0.1], [-0.1]]))) == [-0.1, -0.1]


@pytest.mark.parametrize(
    ("parts", "got"),
    [({"other": Verdict(1.0)}, "rewards other"), ({}, "without parts"), ({"cost": Verdict(1.0)}, "no values per turn")],
)
def test_hrpo_says_which_reward_lacks_values_per_turn(parts, got):
    made = ScoredGroup("task", group([[1.0]]).trajectories, (replace(score([1.0]), parts=parts),))
    with pytest.raises(DataError, match="'cost' has no values per turn") as caught:
        HRPO(reward="cost")(made)
    assert got in caught.value.got
