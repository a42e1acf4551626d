"""REINFORCE++, its baseline variant and Lite PPO: worked examples, and what holds over all groups of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.credit.contrib.lite_ppo import LitePPO
from rlhf.credit.contrib.task_normalised import TaskNormalised
from rlhf.credit.dr_grpo import DrGRPO
from rlhf.credit.estimator import compute_advantages
from rlhf.credit.flat_tokens import FlatTokens, scan, whitened
from rlhf.credit.grpo import GRPO
from rlhf.credit.reinforce_pp import ReinforcePP
from rlhf.credit.reinforce_pp_baseline import ReinforcePPBaseline
from tests.credit.credit_groups import group, group_of, outcome_group, per_token, per_trajectory, turn

rewards = st.lists(st.sampled_from([-1.0, -0.1, 0.0, 0.25, 1.0]), min_size=1, max_size=5)


def tokens(credits):
    return [x for credit in credits for row in per_token(credit) for x in row]


def test_whitening_of_the_published_example():
    # Rewards of two sequences, 1 and 0 on their last tokens, are lowered by .01 per nat from the reference, .1 and .2
    # nats on the tokens of the first, 0 and .1 on those of the second (we leave that to the loss, so it is given here).
    # Returns 1 − .01 · .3, 1 − .01 · .2; −.01 · .1 twice. Mean 1.993 / 4 = .49825; squares .49875² + .49975² + 2 ·
    # .49925² = .997003; std sqrt(.997003 / 3) = .576484; .49875, .49975 and −.49925 over that.
    returns = scan(np.array([-0.001, 0.998, 0.0, -0.001]), np.array([2, 2]), 1.0).tolist()
    assert returns == pytest.approx([0.997, 0.998, -0.001, -0.001])
    assert whitened(np.array(returns)) == pytest.approx([0.865158, 0.866892, -0.866025, -0.866025], abs=1e-5)


def returns_to_go(turns, rewards, gamma):
    line = FlatTokens.of([group_of([turns], [rewards])])
    return scan(line.rewards_N, line.tokens_S, gamma).tolist()


def test_returns_of_tokens_are_discounted_by_sampled_token():
    # Turns of 2 and 1 tokens earn 1 and 2, γ = .5. Backwards: 2; 1 + .5 · 2 = 2; .5 · 2 = 1.
    assert returns_to_go([turn(2), turn(1)], [1.0, 2.0], 0.5) == [1.0, 2.0, 2.0]
    # The middle turn sampled nothing: what it earned is on the token before it. 4; 1 + 3 + .5 · 4 = 6; 3.
    assert returns_to_go([turn(2), turn(0), turn(1)], [1.0, 3.0, 4.0], 0.5) == [3.0, 6.0, 4.0]
    # So did the first two: there is no token before them, and both rewards go to the turn after. 1 + 3 + 4.
    assert returns_to_go([turn(0), turn(0), turn(2)], [1.0, 3.0, 4.0], 0.5) == [4.0, 8.0]
    assert returns_to_go([], [], 0.5) == [] and returns_to_go([turn(0)], [1.0], 0.5) == []


@given(
    segments=st.lists(st.lists(st.sampled_from([-1.0, 0.1, 0.25, 3.0]), max_size=5), max_size=6),
    factor=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
)
def test_a_scan_over_all_segments_at_once_is_a_loop_over_each(segments, factor):
    expected = []
    for segment in segments:
        backwards, running = [], 0.0
        for x in reversed(segment):
            running = x + factor * running
            backwards.append(running)
        expected += reversed(backwards)
    lengths = np.array([len(segment) for segment in segments], np.int64)
    assert scan(np.array([x for segment in segments for x in segment]), lengths, factor).tolist() == expected


def test_reinforce_pp_compares_all_tokens_of_the_step():
    # Returns to go 1, 1, 1, 1 (turns of 2 tokens earning 0 and 1) and 0, 0 of another task. Mean 4/6 = .666667;
    # squares 4 · .111111 + 2 · .444444 = 1.333333; std sqrt(1.333333 / 5) = .516398.
    made = [group([[0.0, 1.0]], task="a"), group([[0.0]], task="b")]
    credits = compute_advantages(ReinforcePP(), made)
    assert tokens(credits) == pytest.approx([0.645496] * 4 + [-1.290992] * 2, abs=1e-5)
    assert credits[0].metrics == {"credit/n_groups": 1.0, "credit/n_zero_std_steps": 0.0}
    # What the first turn earned is not the doing of the second: returns 1, 1, 0, 0 and 0, 0. Mean 1/3, std .516398.
    early = compute_advantages(
        ReinforcePP(subtract_mean=False), [group([[1.0, 0.0]], task="a"), group([[0.0]], task="b")]
    )
    assert tokens(early) == pytest.approx([1.936488] * 2 + [0.0] * 4, abs=1e-5)


def test_reinforce_pp_baseline_worked_example():
    # Group 1: R = (1, 0), lengths 2 and 1; group 2: R = (1, 1), lengths 1 and 2. Centred: .5, .5, −.5, 0, 0, 0. Mean
    # .083333; squares 2 · .173611 + .340278 + 3 · .006944 = .708333; std sqrt(.708333 / 5) = .376386.
    made = [group([[1], [0]], lengths_GK=[[2], [1]], task="a"), group([[1], [1]], lengths_GK=[[1], [2]], task="b")]
    assert tokens(compute_advantages(ReinforcePPBaseline(), made)) == pytest.approx(
        [1.107019, 1.107019, -1.549826, -0.221404, -0.221404, -0.221404], abs=1e-5
    )
    # .5 / .376386 without the second mean: the group that is solved throughout stays at 0.
    unshifted = tokens(compute_advantages(ReinforcePPBaseline(subtract_mean=False), made))
    assert unshifted == pytest.approx([1.328422, 1.328422, -1.328422, 0, 0, 0], abs=1e-5)


@pytest.mark.parametrize("estimator", [ReinforcePP(), ReinforcePPBaseline(), TaskNormalised(inner=GRPO())], ids=repr)
def test_what_an_opponent_sampled_is_not_in_the_statistics(estimator):
    made = group([[1.0], [0.0], [0.0]], lengths_GK=[[2], [1], [3]])
    *own, other = made.trajectories
    by = tuple(replace(g, opponent="step 2") for g in other.turns[0].generations)
    played = replace(other, turns=(replace(other.turns[0], action=replace(other.turns[0].action, generations=by)),))
    [credit] = compute_advantages(estimator, [replace(made, trajectories=(*own, played))])
    assert math.fsum(tokens([credit])[:3]) == pytest.approx(0, abs=1e-6)
    assert math.fsum(tokens(compute_advantages(estimator, [made]))[:3]) > 0.1


def test_lite_ppo_worked_example():
    # R = (1, 0) and (1, 1, 0): all five have mean .6, squares 3 · .16 + 2 · .36 = 1.2, std sqrt(1.2 / 4) = .547723.
    # Group means .5 and .666667: ±.5 / .547723, .333333 / .547723, −.666667 / .547723.
    credits = compute_advantages(LitePPO(), [outcome_group([1, 0], task="a"), outcome_group([1, 1, 0], task="b")])
    assert per_trajectory(credits[0]) == pytest.approx([0.912869, -0.912869], abs=1e-5)
    assert per_trajectory(credits[1]) == pytest.approx([0.608580, 0.608580, -1.217159], abs=1e-5)
    # Divided by n: std sqrt(1.2 / 5) = .489898.
    credits = compute_advantages(LitePPO(ddof=0), [outcome_group([1, 0]), outcome_group([1, 1, 0])])
    assert per_trajectory(credits[0]) == pytest.approx([1.020621, -1.020621], abs=1e-5)


@pytest.mark.parametrize("estimator", [ReinforcePP(), ReinforcePPBaseline()], ids=repr)
@given(data=st.lists(rewards, min_size=1, max_size=4), lengths=st.data())
def test_whitened_tokens_have_mean_zero_and_deviation_one_or_are_all_zero(estimator, data, lengths):
    made = [
        group([[r] for r in row], lengths_GK=[[lengths.draw(st.integers(1, 4))] for _ in row], task=str(i))
        for i, row in enumerate(data)
    ]
    credits = compute_advantages(estimator, made)
    values = tokens(credits)
    assert math.fsum(values) == pytest.approx(0, abs=1e-6)
    if any(values):
        assert math.sqrt(math.fsum(x * x for x in values) / (len(values) - 1)) == pytest.approx(1, abs=1e-4)
    n_flat = math.fsum(c.metrics.get("credit/n_zero_std_steps", 0.0) for c in credits)
    assert n_flat == float(not any(values))


@given(data=st.lists(rewards, min_size=1, max_size=4))
def test_lite_ppo_sums_to_zero_in_each_group_and_is_dr_grpo_up_to_one_factor(data):
    made = [outcome_group(row, task=str(i)) for i, row in enumerate(data)]
    ours, plain = (tokens(compute_advantages(e, made)) for e in (LitePPO(), DrGRPO()))
    for credit in compute_advantages(LitePPO(), made):
        assert math.fsum(per_trajectory(credit)) == pytest.approx(0, abs=1e-9)
    factors = {round(a / b, 6) for a, b in zip(ours, plain, strict=True) if b}
    assert len(factors) <= 1 and all((a == 0) == (b == 0) for a, b in zip(ours, plain, strict=True))


def test_one_token_is_no_step_to_learn_from():
    [credit] = compute_advantages(ReinforcePP(), [group([[1.0]], lengths_GK=[[1]])])
    assert per_token(credit) == [[0.0]] and credit.metrics["credit/n_zero_std_steps"] == 1
