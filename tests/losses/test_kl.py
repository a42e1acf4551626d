"""KL estimators: worked example, and exact expectations of values and gradients over a small distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf.losses.kl import is_bounded, kl_estimate
from rlhf.losses.ppo_clip import PPOClip
from tests.losses.loss_inputs import inputs

logits = st.lists(st.floats(-2, 2), min_size=3, max_size=3)


@pytest.mark.parametrize(
    ("kind", "expected"),
    # d = .2: d; d² / 2; e^-.2 - 1 + .2
    [("k1", 0.2), ("k2", 0.02), ("k3", 0.018731), ("k1+", 0.2), ("k3+", 0.018731)],
)
def test_worked_example(kind, expected):
    assert kl_estimate(kind, torch.tensor([-1.0]), torch.tensor([-1.2])).item() == pytest.approx(expected, abs=1e-6)


def expectation(kind, policy_logits, ref_logits):
    """E over x ~ π of the estimate at x, and of its gradient in the logits of π; π itself is not differentiated."""
    leaf = torch.tensor(policy_logits, dtype=torch.float64, requires_grad=True)
    log_policy = torch.log_softmax(leaf, 0)
    estimate = kl_estimate(kind, log_policy, torch.log_softmax(torch.tensor(ref_logits, dtype=torch.float64), 0))
    value = (log_policy.exp().detach() * estimate).sum()
    return value.item(), torch.autograd.grad(value, leaf)[0]


def divergence(policy_logits, ref_logits, *, reverse):
    """Exact KL(π ‖ π_ref), or KL(π_ref ‖ π), and its gradient in the logits of π."""
    leaf = torch.tensor(policy_logits, dtype=torch.float64, requires_grad=True)
    p, q = torch.log_softmax(leaf, 0), torch.log_softmax(torch.tensor(ref_logits, dtype=torch.float64), 0)
    value = (p.exp() * (p - q)).sum() if reverse else (q.exp() * (q - p)).sum()
    return value.item(), torch.autograd.grad(value, leaf)[0]


@given(logits, logits)
def test_k1_and_k3_are_unbiased_values(policy, ref):
    exact, _ = divergence(policy, ref, reverse=True)
    for kind in ("k1", "k1+"):
        assert expectation(kind, policy, ref)[0] == pytest.approx(exact, abs=1e-9)
    # |d| is small enough here that the bound on k3 binds nowhere below 10
    if max(abs(a - b) for a, b in zip(policy, ref, strict=True)) < 1:
        for kind in ("k3", "k3+"):
            assert expectation(kind, policy, ref)[0] == pytest.approx(exact, abs=1e-9)


@given(logits, logits)
def test_the_gradient_of_k1_vanishes(policy, ref):
    assert torch.allclose(expectation("k1", policy, ref)[1], torch.zeros(3, dtype=torch.float64), atol=1e-12)


@given(logits, logits)
def test_k2_and_the_plus_kinds_have_the_gradient_of_the_reverse_kl(policy, ref):
    _, exact = divergence(policy, ref, reverse=True)
    for kind in ("k2", "k1+", "k3+"):
        assert torch.allclose(expectation(kind, policy, ref)[1], exact, atol=1e-9)


@given(st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3), st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3))
def test_k3_has_the_gradient_of_the_forward_kl(policy, ref):
    _, exact = divergence(policy, ref, reverse=False)
    assert torch.allclose(expectation("k3", policy, ref)[1], exact, atol=1e-9)


@given(st.floats(-100, 0), st.floats(-100, 0))
def test_k3_is_never_negative_and_bounded(policy, ref):
    value = kl_estimate("k3", torch.tensor([policy]), torch.tensor([ref])).item()
    assert 0 <= value <= 20  # 10 where π is much the smaller, d = 20 at most where it is the larger


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
@pytest.mark.parametrize("d", [-35.0, -3.0, 3.0, 35.0])
def test_the_pull_to_the_reference_grows_with_the_distance(kind, d):
    # The gradient of d² / 2 is d, as in verl: the further away, the harder the pull.
    policy = torch.tensor([-40.0 + max(d, 0)], requires_grad=True)
    estimate = kl_estimate(kind, policy, policy.detach() - d)
    assert torch.autograd.grad(estimate.sum(), policy)[0].item() == pytest.approx(d)
    assert not is_bounded(kind, policy, policy.detach() - d).any()


@given(st.floats(-100, 0), st.floats(-100, 0))
def test_tokens_at_a_bound_of_k3_have_no_gradient_and_are_told(policy, ref):
    leaf = torch.tensor([policy], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([ref], dtype=torch.float64)
    gradient = torch.autograd.grad(kl_estimate("k3", leaf, reference).sum(), leaf)[0]
    if abs(policy - ref) > 1e-6:
        assert is_bounded("k3", leaf, reference).item() == (gradient.item() == 0)


def test_the_share_of_tokens_at_a_bound_is_logged():
    # d of −2.61 has k3 e^2.61 − 1 − 2.61 = 9.99; −2.62 has 10.12.
    given_ = inputs([-3.0] * 4, [0.0] * 4, ref_logprobs=[-0.39, -0.38, -1.0, -25.0])
    assert PPOClip(kl="k3")(given_).metrics["loss/kl_clamped_share"] == 0.5
    assert PPOClip(kl="k2")(given_).metrics["loss/kl_clamped_share"] == 0.0


def test_a_correction_makes_the_term_that_of_the_policy():
    # Tokens come from an engine μ = (.5, .5) while π = (.8, .2) and π_ref = (.5, .5). The factors 1.6 and .4 make the
    # mean under μ one under π: KL(π ‖ π_ref) = .8 ln 1.6 + .2 ln .4 = .192745. Without them, as in verl, which weighs
    # the policy's term alone, it is −.223144, of k3 .339356: off by .42 and .15 nats, times kl_coef.
    policy, half = [math.log(0.8), math.log(0.2)], [math.log(0.5)] * 2
    given_ = inputs(policy, [0.0, 0.0], ref_logprobs=half, weights=[0.5 * 1.6, 0.5 * 0.4])
    for kind, plain in (("k1+", -0.223144), ("k3", 0.339356)):
        loss = PPOClip(kl=kind, kl_coef=1.0)
        assert loss(given_).loss.item() == pytest.approx(0.192745, abs=1e-6)
        unweighted = inputs(policy, [0.0, 0.0], ref_logprobs=half)
        assert loss(unweighted).loss.item() == pytest.approx(plain, abs=1e-6)


# --- the coefficient that adapts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divergence", "n", "expected"),
    [
        (0.2, 256, 0.00100512),  # .001 · (1 + .2 · 256 / 10000): 2 − 1 is cut to .2
        (0.05, 256, 0.00099488),  # .5 − 1 is cut to −.2
        (0.11, 256, 0.00100256),  # .1 · .0256
        (0.1, 256, 0.001),
        (9.0, 10**6, 0.0012),  # a step never changes it by more than a fifth
        (-1.0, 10**6, 0.0008),  # k1 may be negative
    ],
)
def test_the_coefficient_follows_the_divergence(divergence, n, expected):
    loss = PPOClip(kl="k3", kl_coef=0.001, kl_target=0.1)
    assert loss.next_kl_coef(divergence, n) == pytest.approx(expected, abs=1e-10)


def test_a_coefficient_without_a_target_stays():
    assert PPOClip(kl="k3", kl_coef=0.001).next_kl_coef(9.0, 10**6) == 0.001


@pytest.mark.parametrize("divergence", [math.nan, math.inf, -math.inf])
def test_a_divergence_that_is_not_finite_leaves_the_coefficient(divergence: float) -> None:
    assert PPOClip(kl="k3", kl_coef=0.001, kl_target=0.1).next_kl_coef(divergence, 10**6) == 0.001


@given(divergence=st.floats(0, 5), n=st.integers(0, 10**6))
def test_the_coefficient_moves_towards_the_target_and_stays_positive(divergence, n):
    loss = PPOClip(kl="k3", kl_coef=0.5, kl_target=1.0, kl_horizon=100)
    coefficient = loss.next_kl_coef(divergence, n)
    assert 0.4 - 1e-9 <= coefficient <= 0.6 + 1e-9
    assert (coefficient - 0.5) * (divergence - 1.0) >= 0
    assert PPOClip(kl="k3", kl_coef=0.5).next_kl_coef(divergence, n) == 0.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kl": "k3", "kl_target": 0.1}, "which is 0"),
        ({"kl_target": 0.1}, "which is 0"),
        ({"kl": "k3", "kl_coef": 0.1, "kl_horizon": 5}, "no effect while kl_target is null"),
    ],
)
def test_a_target_without_a_coefficient_is_refused(settings, says):
    with pytest.raises(ValidationError, match=says):
        PPOClip(**settings)
