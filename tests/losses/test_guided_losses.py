"""KDRL and LUFFY: worked examples, what is taught and what is another's, and gradients by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.losses.contrib.kdrl import KDRL
from rlhf.losses.contrib.luffy import LUFFY
from rlhf.losses.ppo_clip import PPOClip
from tests.losses.loss_inputs import gradient, inputs

logprob = st.floats(-4, -0.01)
NAN = math.nan


def kdrl(**keys):
    return KDRL(teacher="somewhere", **keys)


def test_kdrl_worked_example():
    # d = −1.0 + 1.3 = .3: k2 = .045; A = 0 leaves nothing of the surrogate. β = .5: .0225, slope β d = .15
    made = inputs([-1.0], [0.0], teacher_logprobs=[-1.3])
    output = kdrl(teacher_coef=0.5)(made)
    assert output.loss.item() == pytest.approx(0.0225) and output.metrics["loss/total"].item() == pytest.approx(0.0225)
    assert output.metrics["loss/policy"].item() == 0
    assert gradient(output.loss, made) == pytest.approx([0.15])
    assert output.metrics["loss/kl_teacher"].item() == pytest.approx(0.045)
    assert output.metrics["loss/teacher_coef"].item() == pytest.approx(0.5)


def test_kdrl_leaves_out_what_is_not_taught():
    made = inputs([-1.0, -1.0], [0.0, 0.0], teacher_logprobs=[-1.3, NAN])
    output = kdrl(teacher_coef=1.0)(made)
    assert output.loss.item() == pytest.approx(0.0225)  # of two tokens
    assert gradient(output.loss, made) == pytest.approx([0.15, 0.0])
    assert output.metrics["loss/teacher_token_share"].item() == pytest.approx(0.5)
    nobody = inputs([-1.0], [0.7], old=[-1.2], teacher_logprobs=[NAN])
    plain = inputs([-1.0], [0.7], old=[-1.2])
    assert kdrl()(nobody).loss.item() == pytest.approx(PPOClip()(plain).loss.item())


def test_the_coefficient_falls_linearly_over_the_steps():
    loss = kdrl()
    assert [loss.at(step, 3).teacher_coef for step in range(3)] == pytest.approx([5e-3, 3e-3, 1e-3])
    assert loss.at(0, 1) == loss
    assert loss.at(1, 3).teacher == "somewhere" and loss.at(1, 3).clip_high == loss.clip_high


@given(rows=st.lists(st.tuples(logprob, logprob, logprob, st.floats(-1, 1)), min_size=1, max_size=5))
def test_kdrl_adds_the_gradient_of_half_the_squared_gap(rows):
    policy, old, theirs, advantages = map(list, zip(*rows, strict=True))
    made = inputs(policy, advantages, old=old, teacher_logprobs=theirs)
    plain = inputs(policy, advantages, old=old)
    found, base = gradient(kdrl(teacher_coef=0.3)(made).loss, made), gradient(PPOClip()(plain).loss, plain)
    expected = [b + 0.3 * (p - t) / len(rows) for b, p, t in zip(base, policy, theirs, strict=True)]
    assert found == pytest.approx(expected, abs=1e-9)


# --- LUFFY -----------------------------------------------------------------------------------------------------------


def test_luffy_worked_example():
    # p = .2, γ = .1: f = .2 / .3 = .666667, slope in log p .1 · .2 / .3² = .222222; A = .5
    made = inputs([math.log(0.2)], [0.5], old=[0.0], off_policy=torch.tensor([True]))
    output = LUFFY()(made)
    assert output.loss.item() == pytest.approx(-1 / 3)
    assert gradient(output.loss, made) == pytest.approx([-0.5 * 0.222222], abs=1e-6)
    # no token of the policy's own: no ratio but 1, whatever the old log-prob
    assert output.metrics["loss/ratio_mean"].item() == pytest.approx(1)
    assert output.metrics["loss/approx_kl"].item() == 0
    assert output.metrics["loss/off_policy_share"].item() == pytest.approx(1)


def test_luffy_takes_its_own_tokens_by_their_ratio_without_bound():
    # ρ = 3 and .2: −A ρ, which no clip bounds
    made = inputs([-1.0, -1.0], [1.0, -1.0], old=[-1.0 - math.log(3), -1.0 - math.log(0.2)])
    loss = LUFFY()(made).loss
    assert loss.item() == pytest.approx((-3 + 0.2) / 2)
    assert gradient(loss, made) == pytest.approx([-1.5, 0.1])
    assert "loss/off_policy_share" not in LUFFY()(made).metrics


@given(p=st.floats(1e-6, 1), gamma=st.floats(1e-3, 1))
def test_shaping_is_the_formula_and_pulls_hardest_at_gamma(p, gamma):
    made = inputs([math.log(p)], [1.0], off_policy=torch.tensor([True]))
    loss = LUFFY(shaping=gamma)(made).loss
    [slope] = gradient(loss, made)
    assert loss.item() == pytest.approx(-p / (p + gamma), rel=1e-6)
    assert slope == pytest.approx(-gamma * p / (p + gamma) ** 2, rel=1e-6) and slope >= -0.25 - 1e-12
    if p < 1:
        h = 1e-6
        around = [LUFFY(shaping=gamma)(inputs([math.log(p) + x], [1.0], off_policy=made.off_policy)) for x in (-h, h)]
        assert slope == pytest.approx((around[1].loss - around[0].loss).item() / (2 * h), abs=1e-4)


@given(rows=st.lists(st.tuples(logprob, logprob, st.floats(-1, 1), st.booleans()), min_size=1, max_size=6))
def test_each_token_of_a_mixed_row_has_the_loss_of_its_own_kind(rows):
    policy, old, advantages, off = map(list, zip(*rows, strict=True))
    made = inputs(policy, advantages, old=old, off_policy=torch.tensor(off))
    expected = [
        -a * (math.exp(p) / (math.exp(p) + 0.1) if is_off else math.exp(p - o))
        for p, o, a, is_off in zip(policy, old, advantages, off, strict=True)
    ]
    assert LUFFY()(made).loss.item() == pytest.approx(sum(expected) / len(rows), abs=1e-9)
