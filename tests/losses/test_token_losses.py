"""CISPO, CPGD, StableReinforce, NFT, entropy: worked examples of one token each, bounds, bad settings."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.errors import DataError
from rlhf.losses.cispo import CISPO
from rlhf.losses.contrib.cpgd import CPGD
from rlhf.losses.contrib.min_entropy import MinEntropy
from rlhf.losses.contrib.nft import NFT
from rlhf.losses.contrib.rover import ROVER
from rlhf.losses.contrib.stable_reinforce import StableReinforce
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reinforce import Reinforce
from tests.losses.loss_inputs import gradient, inputs

log_ratios = st.lists(st.floats(-3, 3), min_size=1, max_size=6)


def at_ratio(loss, ratio, advantage, logprob=-1.0):
    """(loss, ∂ loss / ∂ log π) of one token."""
    made = inputs([logprob], [advantage], old=[logprob - math.log(ratio)])
    value = loss(made).loss
    return value.item(), gradient(value, made)[0]


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "value", "slope"),
    [
        # −w A log π with log π = −1; the weight carries no gradient, so the slope is −w A
        (CISPO(), 1.5, 1.0, 1.28, -1.28),  # w = 1.5 clipped to 1.28
        (CISPO(), 1.5, -1.0, -1.28, 1.28),
        (CISPO(), 0.1, 1.0, 0.1, -0.1),  # no lower bound
        (CISPO(clip_low=0.2), 0.1, 1.0, 0.8, -0.8),
        # d = ln 1.5 = .405465: −min(.405465, ln 1.2 = .182322); clipped, so no gradient
        (CPGD(drift_coef=0.0), 1.5, 1.0, -0.182322, 0.0),
        (CPGD(drift_coef=0.0), 1.5, -1.0, 0.405465, 1.0),  # −min(−.405465, −.182322)
        (CPGD(drift_coef=0.0), 0.5, -1.0, math.log(0.8), 0.0),  # −min(.693147, −ln .8): clipped from below
        # drift: min(1.5 − 1, 2) · log π = −.5, times α = .4; slope .5 · .4
        (CPGD(drift_coef=0.4), 1.5, 0.0, -0.2, 0.2),
        (CPGD(drift_coef=0.4), 9.0, 0.0, -0.8, 0.8),  # 9 − 1 is cut to 2
        # PPO: −1.2 clipped; a ratio of 5000 is brought to 1000 and has no gradient
        (StableReinforce(), 1.5, 1.0, -1.2, 0.0),
        (StableReinforce(), 500.0, -1.0, 500.0, 500.0),
        (StableReinforce(), 5000.0, -1.0, 1000.0, 0.0),
    ],
)
def test_worked_examples(loss, ratio, advantage, value, slope):
    assert at_ratio(loss, ratio, advantage) == pytest.approx((value, slope), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "ratio", "right", "value", "slope"),
    # q = .25: a right attempt has advantage .75, a wrong one −.25, and v = 1 − q = .75
    [
        (NFT(), 1.2, True, -0.136741, -0.75),  # −.75 ln 1.2
        # (1 − .25 · .8) / .75 = 1.066667: −.75 ln 1.066667; slope .75 · (.25 / .75) · .8 / 1.066667
        (NFT(), 0.8, False, -0.048404, 0.1875),
        # (1 − .25 · 1.2) / .75 = .933333 -> 1: ln 1 = 0; slope .75 · (.25 / .75) · 1.2 / 1: the gradient goes through
        (NFT(), 1.2, False, 0.0, 0.3),
        (NFT(min_negative=0.5), 1.2, False, 0.051745, 0.321429),  # −.75 ln .933333; .25 · 1.2 / .933333
        (NFT(negative_weight=0.5), 0.8, False, -0.024202, 0.09375),
        (NFT(negative_weight=0), 0.8, False, 0.0, 0.0),  # rejection fine-tuning
        (NFT(normalize="mean_std"), 1.2, True, -0.315791, -1.732051),  # v = √3: −√3 ln 1.2
    ],
)
def test_nft_worked_examples(loss, ratio, right, value, slope):
    assert at_ratio(loss, ratio, 0.75 if right else -0.25) == pytest.approx((value, slope), abs=1e-5)


def test_nft_refuses_advantages_that_are_no_shares():
    with pytest.raises(DataError, match="not of binary scores") as caught:
        NFT()(inputs([-1.0, -1.0], [0.5, -1.5]))
    assert "-1.5" in caught.value.got and "dr_grpo" in caught.value.hint


@given(q=st.floats(0.05, 0.95))
def test_nft_has_the_gradient_of_dr_grpo_or_of_grpo_at_ratio_one(q):
    # Scores of 0 and 1 with mean q have deviation √(q (1 − q)); GRPO's advantages are Dr.GRPO's divided by it.
    for normalize, scale in (("mean", 1.0), ("mean_std", math.sqrt(q * (1 - q)))):
        for advantage in (1 - q, -q):
            slope = at_ratio(NFT(normalize=normalize), 1.0, advantage)[1]
            assert slope == pytest.approx(-advantage / scale, rel=1e-6)


def test_nft_is_bounded_where_a_wrong_attempt_became_certain():
    # q = .9 and ρ = 20: 1 − q ρ < 0, which has no logarithm; the bound 1 takes its place
    value, slope = at_ratio(NFT(), 20.0, -0.9)
    assert value == 0.0
    assert slope == pytest.approx(0.1 * 0.9 / 0.1 * 20)


@given(log_ratios=log_ratios)
def test_cispo_without_lower_bound_is_reinforce_with_a_largest_weight(log_ratios):
    made = inputs([-4.0 + d for d in log_ratios], [0.5] * len(log_ratios), old=[-4.0] * len(log_ratios))
    found, same = (gradient(loss(made).loss, made) for loss in (CISPO(clip_high=1.0), Reinforce(max_weight=2.0)))
    assert found == pytest.approx(same)


@given(log_ratios=log_ratios, advantage=st.floats(-2, 2))
def test_stable_reinforce_is_ppo_until_its_bound_binds(log_ratios, advantage):
    n = len(log_ratios)
    made = inputs(log_ratios, [advantage] * n, old=[0.0] * n)
    plain = PPOClip(clip_low=0.2, clip_high=0.2, dual_clip=None)
    found, same = (gradient(loss(made).loss, made) for loss in (StableReinforce(), plain))
    assert found == pytest.approx(same)


@given(d=st.floats(-8, 8), advantage=st.floats(-2, 2))
def test_the_pull_of_cpgd_is_bounded_by_the_advantage(d, advantage):
    made = inputs([d - 9], [advantage], old=[-9.0])
    [slope] = gradient(CPGD(drift_coef=0.0)(made).loss, made)
    assert abs(slope) <= abs(advantage) + 1e-9


@pytest.mark.parametrize("d", [15.0, 35.0])
def test_a_token_that_is_far_off_is_pulled_back_as_hard(d):
    # −A d for A = −1 and far above π_old; (Q − A)² for ROVER, slope 2 (Q − A). Neither is exponentiated or bounded.
    made = inputs([d - 40], [-1.0], old=[-40.0], mean_logprobs=[0.0])
    assert gradient(CPGD(drift_coef=0.0)(made).loss, made) == [1.0]
    assert gradient(ROVER()(made).loss, made) == pytest.approx([2 * (d + 1)])


@given(d=st.floats(-3, 1))
def test_the_drift_has_the_gradient_of_k3(d):
    # k3 of KL(π_old ‖ π): ρ − 1 − log ρ, which c = 2 leaves alone below ρ = 3
    made = inputs([d - 4], [0.0], old=[-4.0])
    moved = made.policy_logprobs - made.old_logprobs
    k3 = (moved.exp() - 1 - moved).sum()
    assert gradient(CPGD(drift_coef=1.0)(made).loss, made) == pytest.approx(gradient(k3, made), abs=1e-9)


def test_entropy_is_minimised_as_worked_by_hand():
    # p = (.5, .25, .25): −.5 ln .5 − .5 ln .25 = 1.039721. At temperature .5 it is p² / Σ p² = (2/3, 1/6, 1/6), with
    # entropy −2/3 ln 2/3 − 1/3 ln 1/6 = .867563.
    logits = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    for temperature, expected in ((1.0, 1.039721), (0.5, 0.867563)):
        log_p = torch.log_softmax(logits / temperature, -1)
        entropy = -(log_p.exp() * log_p).sum()
        loss = MinEntropy()(inputs([-1.0], [3.0], entropy=[entropy.item()])).loss
        assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "settings", "says"),
    [
        (MinEntropy, {"entropy_coef": 0.1}, "raises the entropy"),
        (MinEntropy, {"kl_coef": 0.1}, "no effect"),
        (CPGD, {"clip_low": 1.0}, "less than 1"),
        (CPGD, {"max_drift": 0.0}, "greater than 0"),
        (CISPO, {"clip_low": 1.5}, "less than or equal to 1"),
        (StableReinforce, {"max_log_ratio": 25.0}, "less than or equal to 20"),
        (NFT, {"min_negative": 0.0}, "greater than 0"),
        (NFT, {"normalize": "std"}, "mean_std"),
    ],
)
def test_impossible_settings_are_rejected(loss, settings, says):
    with pytest.raises(ValidationError, match=says):
        loss(**settings)
