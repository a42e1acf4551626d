"""GSPO, A-LoL, REBEL and the figures of whole trajectories: worked examples, and gradients of the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.losses.contrib.a_lol import ALoL
from rlhf.losses.contrib.rebel import REBEL
from rlhf.losses.gspo import GSPO
from rlhf.losses.trajectories import trajectories_of
from tests.losses.loss_inputs import gradient, inputs

lists = st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0)), min_size=1, max_size=4)


def test_figures_of_two_trajectories_worked_by_hand():
    # Trajectory 9 has tokens 0 and 2: log ratios .1 and .3, advantages 1 and 2; trajectory 4 has token 1.
    made = trajectories_of(
        torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.5, -0.8]), torch.tensor([1.0, -1.0, 2.0]),
        torch.tensor([9, 4, 9]), torch.tensor([1, 0, 1]),
    )  # fmt: skip
    assert (made.ids.tolist(), made.group_ids.tolist(), made.n_tokens.tolist()) == ([4, 9], [0, 1], [1, 2])
    assert made.log_ratios.tolist() == pytest.approx([-0.5, 0.4], abs=1e-6)
    assert made.advantages.tolist() == [-1.0, 1.5]
    assert made.spread(made.n_tokens, torch.tensor([9, 4, 9])).tolist() == [2, 1, 2]
    means, sizes = made.group_means(made.advantages)
    assert (means.tolist(), sizes.tolist()) == ([-1.0, 1.5], [1, 1])


def test_group_means_are_over_trajectories_and_not_over_tokens():
    # Three tokens of 1 and one of 4 in two trajectories of one group: mean 2.5.
    ids = torch.tensor([0, 0, 0, 1])
    made = trajectories_of(*(torch.tensor([1.0, 1.0, 1.0, 4.0]),) * 3, ids, torch.zeros(4, dtype=torch.int64))
    assert made.group_means(made.advantages)[0].tolist() == [2.5, 2.5]


LOG_RATIOS = [0.1, -0.05, 0.01]


def test_gspo_worked_example():
    # mean of the log ratios .02, s = e^.02 = 1.020201: clipped to 1.0004 for A = 1, kept for A = −1
    made = {a: inputs(LOG_RATIOS, [a] * 3, old=[0.0] * 3) for a in (1.0, -1.0)}
    output = GSPO()(made[1.0])
    assert output.loss.item() == pytest.approx(-1.0004)
    assert gradient(output.loss, made[1.0]) == [0.0] * 3
    assert output.metrics["loss/clip_high_share"].item() == pytest.approx(1)
    # −A s over three tokens of weight 1/3: 1.020201; each token carries s / 3 of the gradient
    loss = GSPO()(made[-1.0]).loss
    assert loss.item() == pytest.approx(1.020201, abs=1e-6)
    assert gradient(loss, made[-1.0]) == pytest.approx([1.020201 / 3] * 3, abs=1e-6)


@given(trajectories=st.lists(lists, min_size=1, max_size=3), advantage=st.floats(-2, 2))
def test_gspo_has_the_gradient_of_the_sequence_ratio(trajectories, advantage):
    # Against the definition: mean over trajectories of max(−A s, −A clip(s)), s of the graph itself.
    flat = [pair for pairs in trajectories for pair in pairs]
    ids = [i for i, pairs in enumerate(trajectories) for _ in pairs]
    weights = [1 / (len(trajectories) * len(pairs)) for pairs in trajectories for _ in pairs]
    policy, old = zip(*flat, strict=True)
    made = inputs(policy, [advantage] * len(flat), old=old, weights=weights, trajectory_ids=ids)
    loss = GSPO(clip_low=0.2, clip_high=0.2)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(trajectories)):
        mine = torch.tensor(ids) == i
        s = (made.policy_logprobs - made.old_logprobs)[mine].mean().exp()
        total = total + torch.maximum(-advantage * s, -advantage * s.clamp(0.8, 1.2)) / len(trajectories)
    found = loss(made).loss
    assert found.item() == pytest.approx(total.item())
    assert gradient(found, made) == pytest.approx(gradient(total, made), abs=1e-9)


def test_gspo_is_bounded_where_an_answer_became_certain():
    # log s = 12 is brought to 10 for A = −1, where nothing else bounds it; no gradient beyond
    made = inputs([0.0, 0.0], [-1.0] * 2, old=[-12.0] * 2)
    loss = GSPO()(made).loss
    assert loss.item() == pytest.approx(math.exp(10))
    assert gradient(loss, made) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "advantage", "value"),
    [
        (ALoL(), 0.3, 0.809915),  # ratio e^(2.3 − 2.0) = 1.349859; .3 · 1.349859 · 2.0
        (ALoL(clip_high=0.2), 0.3, 0.72),  # .3 · 1.2 · 2.0
        (ALoL(ratio="none"), 0.3, 0.6),
        (ALoL(), -0.3, 0.0),
    ],
)
def test_a_lol_worked_examples(loss, advantage, value):
    # A reward of .8 where .5 is expected has advantage .3; NLL 2.0 under the policy, 2.3 under the one that sampled.
    assert loss(inputs([-2.0], [advantage], old=[-2.3])).loss.item() == pytest.approx(value, abs=1e-6)


def test_a_lol_weighs_by_the_trajectory_or_by_the_token():
    # Ratios e^.2 and e^.3 of one trajectory, its product e^.5; sum over tokens, A = 1: slopes −w.
    for ratio, expected in (("trajectory", [math.exp(0.5)] * 2), ("token", [math.exp(0.2), math.exp(0.3)])):
        made = inputs([-1.0, -1.0], [1.0] * 2, old=[-1.2, -1.3], weights=[1.0, 1.0])
        loss = ALoL(ratio=ratio)(made).loss
        assert gradient(loss, made) == pytest.approx([-w for w in expected])
        assert loss.item() == pytest.approx(sum(expected))


def sum_over_trajectories(**rows):
    """Inputs with the weights of `seq_mean_token_sum`."""
    ids = rows["trajectory_ids"]
    return inputs(**rows, weights=[1 / len(set(ids))] * len(ids))


def test_rebel_worked_example():
    # D = −1.0 + 1.2 = .2 and −1.5 + 1.4 = −.1; rewards 1 apart are advantages ±.5; η = .5: (.2 + .1 − .5)² = .04
    rows = {"policy": [-1.0, -1.5], "old": [-1.2, -1.4], "advantages": [0.5, -0.5], "trajectory_ids": [0, 1]}
    made = sum_over_trajectories(**rows)
    loss = REBEL(eta=0.5)(made).loss
    assert loss.item() == pytest.approx(0.04)
    # derivative in D of the first: 2 (.3 − .5) = −.4
    assert gradient(loss, made) == pytest.approx([-0.4, 0.4])


@given(group=st.lists(st.tuples(lists, st.floats(-2, 2)), min_size=2, max_size=4), shift=st.floats(-5, 5))
def test_rebel_has_the_gradient_of_the_mean_over_pairs_whatever_the_baseline(group, shift):
    flat = [(i, p, o, r) for i, (pairs, r) in enumerate(group) for p, o in pairs]
    ids, policy, old, rewards = zip(*flat, strict=True)
    made = sum_over_trajectories(policy=policy, old=old, advantages=[r + shift for r in rewards], trajectory_ids=ids)
    gaps = made.policy_logprobs - made.old_logprobs
    d = [gaps[torch.tensor(ids) == i].sum() for i in range(len(group))]
    pairs = [(i, j) for i in range(len(group)) for j in range(i)]
    total = sum((d[i] - d[j] - (group[i][1] - group[j][1])) ** 2 for i, j in pairs) / len(pairs)
    loss = REBEL()(made).loss
    assert loss.item() == pytest.approx(total.item(), abs=1e-7)
    assert gradient(loss, made) == pytest.approx(gradient(total, made), abs=1e-7)


def test_rebel_compares_within_groups_only():
    # Two groups of one: nobody to compare with.
    rows = {"policy": [-1.0, -1.5], "old": [-1.2, -1.4], "advantages": [0.5, -0.5], "trajectory_ids": [0, 1]}
    made = sum_over_trajectories(**rows, group_ids=[0, 1])
    loss = REBEL()(made).loss
    assert loss.item() == 0.0 and gradient(loss, made) == [0.0, 0.0]
