"""PPOClip and Reinforce: worked examples, gradients, metrics that add up, terms, bad settings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.errors import DataError
from rlhf.losses.policy_loss import LossInputs, PolicyLoss
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reinforce import Reinforce
from tests.losses.loss_inputs import gradient, inputs

SYMMETRIC = PPOClip(clip_low=0.2, clip_high=0.2)
logprob = st.floats(-8, 0)
advantage = st.floats(-3, 3)


def tokens(*columns: st.SearchStrategy[float]) -> st.SearchStrategy[list[tuple[float, ...]]]:
    return st.lists(st.tuples(*columns), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "expected"),
    [
        (SYMMETRIC, 1.5, 1, -1.2),  # clipped from above: -1.2 · 1
        (SYMMETRIC, 0.5, 1, -0.5),  # below the range, but the unclipped term is the larger loss
        (SYMMETRIC, 1.5, -1, 1.5),  # likelier although bad: not clipped ...
        (SYMMETRIC, 5.0, -1, 3.0),  # ... up to the dual clip, 3 · |A|
        (PPOClip(dual_clip=None), 5.0, -1, 5.0),
        (SYMMETRIC, 0.5, -1, 0.8),  # clipped from below: .8 · |A|
        (PPOClip(), 1.25, 1, -1.25),  # clip-higher leaves 1.25 < 1.28 alone
        (SYMMETRIC, 1.25, 1, -1.2),
        (SYMMETRIC, 5.0, 0, 0.0),
    ],
)
def test_ppo_worked_examples(loss, ratio, advantage, expected):
    given_ = inputs([math.log(ratio) - 2], [advantage], old=[-2.0])
    assert loss(given_).loss.item() == pytest.approx(expected)


def test_the_loss_of_loop_worked_example():
    # Of scores 1, 0, .5, .5 the first attempt has A = 2/3. Its log-ratios .2, −.1, 0 are ratios of 1.221403, .904837
    # and 1. The first is clipped at 1.1; the second is below 1 / 1.1, which binds where A < 0 only:
    # −(1.1 + .904837 + 1) / 3 · 2/3.
    loss = PPOClip(clip_low=1 - 1 / 1.1, clip_high=0.1)
    given_ = inputs([-0.5, -1.0, -0.2], [2 / 3] * 3, old=[-0.7, -0.9, -0.2])
    assert loss(given_).loss.item() == pytest.approx(-0.667742, abs=1e-6)
    # The first has no gradient; −A ρ / 3 of the others.
    assert gradient(loss(given_).loss, given_) == pytest.approx([0, -0.201075, -0.222222], abs=1e-6)


def test_ratios_of_loop_per_turn_and_per_trajectory():
    # Log-ratios .2, −.1 in one turn, 0 in the next. Turns: products e^.1 = 1.105171, clipped at 1.1, and 1: −1.1 · 2/3
    # and −2/3. The trajectory: e^.1 again, −1.1 · 2/3.
    bounds = {"clip_low": 1 - 1 / 1.1, "clip_high": 0.1}
    numbers = ([-0.5, -1.0, -0.2], [2 / 3] * 3)
    given_ = inputs(*numbers, old=[-0.7, -0.9, -0.2], token_positions=[0, 1, 3], weights=[1.0] * 3)
    assert PPOClip(ratio="turn", **bounds)(given_).loss.item() == pytest.approx(-0.733333 - 0.666667, abs=1e-6)
    assert PPOClip(ratio="trajectory", **bounds)(given_).loss.item() == pytest.approx(-0.733333, abs=1e-6)
    assert gradient(PPOClip(ratio="turn", **bounds)(given_).loss, given_) == pytest.approx([0, 0, -2 / 3])


@given(
    st.lists(st.tuples(logprob, logprob, st.sampled_from([0, 1, 2]), st.sampled_from([0, 3])), min_size=1, max_size=9)
)
def test_a_product_has_the_loss_and_gradient_of_its_formula(rows):
    rows = sorted(rows, key=lambda row: (row[3], row[2]))  # trajectories 0 and 3, and their turns
    turns = [(sequence, turn) for _, _, turn, sequence in rows]
    starts = [i + turn for i, (_, turn) in enumerate(turns)]  # a gap before each turn
    policy = torch.tensor([0.2 * row[0] for row in rows], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.2 * row[1] for row in rows], dtype=torch.float64)
    advantage_of = {0: 1.0, 3: -0.5}
    loss = PPOClip(ratio="turn", clip_low=0.2, clip_high=0.2, dual_clip=None)
    more = {"trajectory_ids": [s for s, _ in turns], "token_positions": starts, "weights": [1.0] * len(rows)}
    given_ = inputs(policy, [advantage_of[s] for s, _ in turns], old=old.tolist(), **more)
    expected = torch.zeros((), dtype=torch.float64)
    for turn in dict.fromkeys(turns):
        at = [i for i, other in enumerate(turns) if other == turn]
        ratio, a = (policy[at] - old[at]).sum().exp(), advantage_of[turn[0]]
        expected = expected + torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    found = loss(given_).loss
    assert found.item() == pytest.approx(expected.item(), abs=1e-9)
    assert torch.autograd.grad(found, policy)[0].tolist() == pytest.approx(
        torch.autograd.grad(expected, policy)[0].tolist()
    )


def test_reinforce_worked_example():
    # -.5 · (-1), -.5 · (-2), -.5 · (-3): mean 1
    assert Reinforce()(inputs([-1.0, -2.0, -3.0], [0.5] * 3)).loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "loss", [PPOClip(), SYMMETRIC, PPOClip(clip_low=0, clip_high=0), Reinforce(), Reinforce(max_weight=2)]
)
@given(rows=tokens(logprob, advantage, st.floats(0, 2)))
def test_on_policy_the_gradient_is_the_plain_policy_gradient(loss, rows):
    policy, advantages, weights = zip(*rows, strict=True)
    given_ = inputs(policy, advantages, weights=weights)
    # dL / dlogp_t = -w_t A_t at ratio one
    expected = [-w * a for w, a in zip(weights, advantages, strict=True)]
    assert gradient(loss(given_).loss, given_) == pytest.approx(expected)


@given(rows=tokens(logprob, logprob, advantage))
def test_clipping_at_infinity_is_no_clipping(rows):
    policy, old, advantages = zip(*rows, strict=True)
    given_ = inputs(policy, advantages, old=old)
    loss = PPOClip(clip_low=1, clip_high=math.inf, dual_clip=None)(given_).loss
    ratios = [math.exp(p - o) for p, o in zip(policy, old, strict=True)]
    # L = mean of -A ρ, dL / dlogp = -A ρ / N
    plain = [-a * r / len(rows) for a, r in zip(advantages, ratios, strict=True)]
    assert loss.item() == pytest.approx(sum(plain))
    assert gradient(loss, given_) == pytest.approx(plain)


@given(rows=tokens(logprob, logprob, advantage))
def test_ppo_loss_is_pessimistic_and_bounded(rows):
    policy, old, advantages = zip(*rows, strict=True)
    for p, o, a in zip(policy, old, advantages, strict=True):
        loss = SYMMETRIC(inputs([p], [a], old=[o])).loss.item()
        unclipped = -a * math.exp(p - o)
        assert loss <= 3 * abs(a) + 1e-9
        assert loss >= unclipped - 1e-9 or loss == pytest.approx(3 * abs(a))


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0), (5.0, -1.0), (1.5, 0.0)])
def test_clipped_tokens_get_no_gradient(ratio, advantage):
    given_ = inputs([math.log(ratio)], [advantage], old=[0.0])
    assert gradient(SYMMETRIC(given_).loss, given_) == [0.0]


def test_reinforce_weight_is_truncated_and_carries_no_gradient():
    # ratios .5 and 4, truncated to .5 and 2; gradient -A w / N with A = 1, N = 2
    given_ = inputs([math.log(0.5), math.log(4.0)], [1.0, 1.0], old=[0.0, 0.0])
    assert gradient(Reinforce(max_weight=2)(given_).loss, given_) == pytest.approx([-0.25, -1.0])


def test_log_ratios_far_apart_stay_finite():
    given_ = inputs([-1e4, 0.0], [1.0, -1.0], old=[0.0, -1e4])
    output = PPOClip(kl="k3", kl_coef=0.1, dual_clip=None)(
        inputs([-1e4, 0.0], [1.0, -1.0], old=[0.0, -1e4], ref_logprobs=[0.0, -1e4])
    )
    assert all(torch.isfinite(x) for x in (output.loss, *output.metrics.values(), *output.metrics_max.values()))
    assert all(math.isfinite(x) for x in gradient(PPOClip()(given_).loss, given_))


def test_metrics_of_one_batch():
    # ratios 1.5, .5, 4, 1 with advantages 1, -1, -1, 1: one clipped high, one low, one at the dual bound
    ratios, advantages = [1.5, 0.5, 4.0, 1.0], [1.0, -1.0, -1.0, 1.0]
    policy = [math.log(r) - 2 for r in ratios]
    output = SYMMETRIC(inputs(policy, advantages, old=[-2.0] * 4))
    means = {name: value.item() for name, value in output.metrics.items()}
    assert means["loss/clip_high_share"] == pytest.approx(1 / 4)
    assert means["loss/clip_low_share"] == pytest.approx(1 / 4)
    assert means["loss/clip_dual_share"] == pytest.approx(1 / 4)
    assert means["loss/ratio_mean"] == pytest.approx(7 / 4)
    # ρ - 1 - log ρ: .094535, .193147, 1.613706, 0: mean .475347
    assert means["loss/approx_kl"] == pytest.approx(0.475347, abs=1e-6)
    # no entropy given: mean of -log π = 2 - mean(ln 1.5, -ln 2, ln 4, 0) = 2 - 1.098612 / 4
    assert means["loss/entropy"] == pytest.approx(1.725347, abs=1e-6)
    # -1.2, .8, 3, -1: mean .4
    assert means["loss/policy"] == means["loss/total"] == pytest.approx(0.4)
    assert output.metrics_max["loss/ratio_max"].item() == pytest.approx(4.0)
    assert not any(x.requires_grad for x in (*output.metrics.values(), *output.metrics_max.values()))


@given(rows=tokens(logprob, logprob, advantage, st.floats(0, 2)), data=st.data())
def test_micro_batches_add_up_to_the_minibatch(rows, data):
    cut = data.draw(st.integers(0, len(rows)))
    loss = PPOClip(kl="k3", kl_coef=0.1, entropy_coef=0.01)

    def output(part):
        policy, old, advantages, weights = ([row[i] for row in part] for i in range(4))
        more = {"ref_logprobs": old, "entropy": [-p for p in policy], "n_minibatch_tokens": len(rows)}
        given_ = inputs(policy, advantages, old=old, weights=weights, **more)
        return loss(given_)

    whole, first, second = output(rows), output(rows[:cut]), output(rows[cut:])
    assert (first.loss + second.loss).item() == pytest.approx(whole.loss.item())
    for name, value in whole.metrics.items():
        assert (first.metrics[name] + second.metrics[name]).item() == pytest.approx(value.item(), abs=1e-9)
    for name, value in whole.metrics_max.items():
        assert max(first.metrics_max[name], second.metrics_max[name]).item() == pytest.approx(value.item())


@pytest.mark.parametrize("loss", [PPOClip(), Reinforce()], ids=["PPOClip", "Reinforce"])
def test_no_tokens_give_a_loss_of_zero(loss):
    given_ = inputs([], [])
    output = loss(given_)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert isinstance(loss, PolicyLoss)
    assert all(value.item() == 0.0 for value in (*output.metrics.values(), *output.metrics_max.values()))


@pytest.mark.parametrize("loss", [PPOClip, Reinforce])
def test_terms_are_added_with_the_same_weights(loss):
    # The second token alone has weight; d = .2 gives k3 = e^-.2 - 1 + .2 = .018731, entropy .5.
    terms = {"ref_logprobs": [0.0, -1.2], "entropy": [9.0, 0.5], "weights": [0.0, 1.0]}
    given_ = inputs([-1.0, -1.0], [5.0, 0.0], **terms)
    settings = loss(kl="k3", kl_coef=0.1, entropy_coef=0.01)
    assert settings.needs_ref and settings.needs_entropy
    output = settings(given_)
    assert output.loss.item() == pytest.approx(0.1 * 0.018731 - 0.01 * 0.5, abs=1e-7)
    assert output.metrics["loss/kl_ref"].item() == pytest.approx(0.018731, abs=1e-6)
    assert output.metrics["loss/entropy"].item() == pytest.approx(0.5)
    assert output.metrics["loss/policy"].item() == pytest.approx(0.0)


def test_entropy_bonus_worked_example():
    # H = (1, .5), c = .01: -.01 · mean H = -.0075
    assert PPOClip(entropy_coef=0.01)(inputs([-1.0, -1.0], [0, 0], entropy=[1.0, 0.5])).loss.item() == pytest.approx(
        -0.0075
    )


def test_a_divergence_without_coefficient_is_logged_only():
    # .5 · .2² = .02
    output = PPOClip(kl="k2")(inputs([-1.0], [0.0], ref_logprobs=[-1.2]))
    assert output.loss.item() == 0.0
    assert output.metrics["loss/kl_ref"].item() == pytest.approx(0.02)


@pytest.mark.parametrize("settings", [{"kl": "k3", "kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_what_a_loss_needs_and_is_not_given_raises(settings):
    with pytest.raises(DataError, match="needs"):
        PPOClip(**settings)(inputs([-1.0], [1.0]))


@pytest.mark.parametrize("loss", [PPOClip, Reinforce])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kl": "k1", "kl_coef": 0.1}, "zero on average"),
        ({"kl_coef": 0.1}, "no effect"),
        ({"kl_coef": -0.1}, "greater than or equal to 0"),
        ({"kl": "k4"}, "k3"),
        ({"entropy": 0.1}, "entropy"),
    ],
)
def test_impossible_settings_are_rejected_with_a_reason(loss, settings, says):
    with pytest.raises(ValidationError, match=says):
        loss(**settings)


@pytest.mark.parametrize("settings", [{"clip_low": 1.5}, {"clip_high": -0.1}, {"dual_clip": 1.0}])
def test_clip_ranges_are_checked(settings):
    with pytest.raises(ValidationError):
        PPOClip(**settings)


def test_arrays_of_different_length_raise():
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(DataError, match="differ in shape"):
        LossInputs(two, two, two, one, two, two)


def test_ratios_of_replies_need_places():
    with pytest.raises(DataError, match="this loss needs token_positions"):
        PPOClip(ratio="turn")(replace(inputs([-1.0], [1.0]), token_positions=None))
