"""ShiQ, ROVER and the sums over the tokens of a trajectory: worked examples, and gradients of the definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.losses.contrib.rover import ROVER
from rlhf.losses.contrib.shiq import ShiQ
from rlhf.losses.policy_loss import LossInputs, whole_of
from rlhf.losses.trajectories import next_in, sums_from, sums_to
from tests.losses.loss_inputs import gradient, inputs

N_WORDS = 3
number = st.floats(-2, 2)


def test_sums_and_the_next_value_worked_by_hand():
    values, ids = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3, 3, 3, 1])
    assert sums_from(values, ids).tolist() == [7.0, 6.0, 4.0, 8.0]
    assert sums_to(values, ids).tolist() == [1.0, 3.0, 7.0, 8.0]
    assert next_in(values, ids).tolist() == [2.0, 4.0, 0.0, 0.0]
    nothing = torch.zeros(0)
    for function in (sums_from, sums_to, next_in):
        assert function(nothing, nothing.long()).shape == (0,)


@given(lengths=st.lists(st.integers(1, 4), max_size=4), data=st.data())
def test_sums_are_those_of_each_trajectory_alone(lengths, data):
    ids = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], dtype=torch.int64)
    values = torch.tensor([data.draw(number) for _ in ids], dtype=torch.float64)
    for s in range(len(lengths)):
        mine = values[ids == s]
        ahead, behind, after = (f(values, ids)[ids == s] for f in (sums_from, sums_to, next_in))
        assert ahead.tolist() == pytest.approx([mine[i:].sum().item() for i in range(len(mine))])
        assert behind.tolist() == pytest.approx([mine[: i + 1].sum().item() for i in range(len(mine))])
        assert after.tolist() == [*mine[1:].tolist(), 0.0]


def test_the_tokens_of_a_minibatch_are_put_in_order():
    # Trajectory 4 has its places 0 and 2 in the second part, 5 in the first; what a part lacks is left out.
    first = inputs([-1.0, -2.0], [0.1, 0.2], trajectory_ids=[4, 2], token_positions=[5, 0], entropy=[1.0, 1.0])
    second = inputs([-3.0, -4.0], [0.3, 0.4], trajectory_ids=[4, 4], token_positions=[2, 0])
    whole = whole_of([first, second])
    assert whole.policy_logprobs.tolist() == [-2.0, -4.0, -3.0, -1.0] and not whole.policy_logprobs.requires_grad
    assert whole.advantages.tolist() == [0.2, 0.4, 0.3, 0.1] and whole.entropy is None
    for part, expected in ((first, [3, 0]), (second, [2, 1])):
        assert replace(part, whole=whole).whole_tokens()[1].tolist() == expected


# --- ShiQ ------------------------------------------------------------------------------------------------------------


def from_logits(logits, ref_logits, tokens, advantages, ids, old=None, weights=None):
    """Inputs of tokens that are drawn from logits `[N, V]`, which collect gradients."""
    log_p, ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    at, n = torch.tensor(tokens)[:, None], len(tokens)
    policy = log_p.gather(1, at).squeeze(1)
    made = LossInputs(
        policy_logprobs=policy,
        old_logprobs=policy.detach(),
        sampler_logprobs=policy.detach(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.full((n,), 1.0, dtype=torch.float64) if weights is None else weights,
        trajectory_ids=torch.tensor(ids),
        ref_logprobs=ref.gather(1, at).squeeze(1),
        token_positions=torch.arange(n),
        log_normalizers=logits.logsumexp(-1),
        ref_log_normalizers=ref_logits.logsumexp(-1),
        mean_logprobs=log_p.detach().mean(-1),
        old_mean_logprobs=None if old is None else old.log_softmax(-1).mean(-1),
    )
    if old is not None:
        made = replace(made, old_logprobs=old.log_softmax(-1).gather(1, at).squeeze(1))
    return replace(made, whole=whole_of([made]))


def test_shiq_worked_example():
    # v = .5 (ln(e + 2) − ln 3) = .226416; log-ratios (1 − 1.551445) + ln 3 = .547168. The score of 1 lies on the second
    # token, so both returns are 1: tails 1 − .5 · 2 · .547168 = .452832 and 1 − .5 · .547168 = .726416;
    # (.452832 − .226416)² + (.726416 − .226416)² = .301264
    logits = torch.tensor([[1.0, 0, 0], [0, 1, 0]], dtype=torch.float64, requires_grad=True)
    made = from_logits(logits, torch.zeros_like(logits).detach(), [0, 1], [1.0, 1.0], [0, 0])
    output = ShiQ(beta=0.5)(made)
    assert output.loss.item() == pytest.approx(0.301264, abs=1e-6)
    assert output.metrics["loss/policy"].item() == pytest.approx(0.301264, abs=1e-6)


@st.composite
def trajectories(draw):
    """Logits of policy, reference and old policy, tokens, returns and trajectory of up to six tokens."""
    n = draw(st.integers(1, 6))
    row = st.lists(number, min_size=N_WORDS, max_size=N_WORDS)
    tables = [torch.tensor([draw(row) for _ in range(n)], dtype=torch.float64) for _ in range(3)]
    tokens = draw(st.lists(st.integers(0, N_WORDS - 1), min_size=n, max_size=n))
    ids = sorted(draw(st.lists(st.sampled_from([0, 1]), min_size=n, max_size=n)))
    return *tables, tokens, draw(st.lists(number, min_size=n, max_size=n)), ids


@given(made=trajectories(), beta=st.floats(0.05, 1))
def test_shiq_has_the_value_and_the_gradient_of_the_definition(made, beta):
    logits, ref, _, tokens, returns, ids = made
    logits.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(tokens)):  # by the definition, logits and all
        later = [k for k in range(t, len(tokens)) if ids[k] == ids[t]]
        ratios = [(logits.log_softmax(-1) - ref.log_softmax(-1))[k, tokens[k]] for k in later]
        value = beta * (logits[t].logsumexp(0) - ref[t].logsumexp(0))
        total = total + (returns[t] - beta * sum(ratios) - value) ** 2
    loss = ShiQ(beta=beta)(from_logits(logits, ref, tokens, returns, ids)).loss
    assert loss.item() == pytest.approx(total.item(), abs=1e-9)
    expected, found = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (total, loss))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_shiq_is_solved_by_the_logits_of_the_regularised_task():
    # One state, three words of reward 1, 0 and −1, reference uniform: Q = r, with ℓ − ℓ_ref = r / β the loss is 0
    # for every word, and no other policy does that.
    rewards, beta = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), 0.5
    for solved, logits in ((True, rewards / beta), (False, rewards / beta + torch.tensor([0.0, 0.1, 0.0]))):
        logits = logits.clone().requires_grad_()
        made = from_logits(logits.expand(3, 3), torch.zeros(3, 3).double(), [0, 1, 2], rewards.tolist(), [0, 1, 2])
        loss = ShiQ(beta=beta)(made).loss
        slope = torch.autograd.grad(loss, logits)[0].abs().max().item()
        assert (loss.item() < 1e-20 and slope < 1e-9) if solved else (loss.item() > 1e-3 and slope > 1e-2)


# --- ROVER -----------------------------------------------------------------------------------------------------------


def test_rover_worked_example():
    # Q = (.1, −.1); at the second token the mean of Q over the vocabulary is −.1, behind it the episode ends: targets
    # .5 − .1 and .5, errors −.3 and −.6, (.09 + .36) / 2. Slopes 2 · error / 2.
    made = inputs(
        [-0.9, -1.1], [0.5, 0.5], old=[-1.0, -1.0], mean_logprobs=[-5.0, -1.3], old_mean_logprobs=[-2.0, -1.2]
    )
    loss = ROVER()(made).loss
    assert loss.item() == pytest.approx(0.225)
    assert gradient(loss, made) == pytest.approx([-0.3, -0.6])
    # λ = 0: errors −.4 and −.6
    assert ROVER(next_weight=0)(made).loss.item() == pytest.approx(0.26)


@pytest.mark.parametrize("t", [0.5, 2.0])
def test_a_temperature_of_rover_is_a_scale_of_rewards_and_of_the_learning_rate(t):
    # The authors' rover_t: (t Q − A − t q̄')² = t² (Q − A / t − q̄')², with Q = .1 and −.1, q̄' = −.1 and 0.
    made = inputs([-1.9, -1.6], [0.5 / t] * 2, old=[-2.0, -1.5], mean_logprobs=[-3.0, -3.1], old_mean_logprobs=[-3, -3])
    theirs = sum((t * q - 0.5 - t * after) ** 2 for q, after in ((0.1, -0.1), (-0.1, 0.0))) / 2
    assert t**2 * ROVER()(made).loss.item() == pytest.approx(theirs)


def test_rover_knows_no_next_value_across_trajectories():
    rows = {"old": [-1.0, -1.0], "mean_logprobs": [-5.0, -1.3], "old_mean_logprobs": [-2.0, -1.2]}
    made = inputs([-0.9, -1.1], [0.5, 0.5], trajectory_ids=[0, 1], **rows)
    assert ROVER()(made).loss.item() == pytest.approx(0.26)


def test_rover_without_old_means_is_before_the_first_update():
    made = inputs([-0.9, -1.1], [0.5, 0.5], old=[-1.0, -1.0], mean_logprobs=[-5.0, -1.3])
    assert ROVER()(made).loss.item() == pytest.approx(0.26)


def test_rover_stops_at_its_bound_on_the_way_out():
    # Q = 1 on its way to 2 is brought to ln 1.2 = .182322, Q = −1 on its way to −2 to ln .8 = −.223144.
    for q, target, bound in ((1.0, 2.0, math.log(1.2)), (-1.0, -2.0, math.log(0.8))):
        made = inputs([-2.0 + q], [target], old=[-2.0], mean_logprobs=[0.0])
        loss = ROVER(clip=0.2)(made).loss
        assert loss.item() == pytest.approx((bound - target) ** 2) and gradient(loss, made) == [0.0]


@pytest.mark.parametrize(("q", "target"), [(1.0, 0.0), (1.0, 0.5), (-1.0, 0.0), (1.0, -2.0), (0.1, 2.0)])
def test_rover_comes_back_from_beyond_its_bound(q, target):
    # (Q − target)², slope 2 (Q − target): the bound holds no token off from a target that is nearer, nor within it.
    made = inputs([-2.0 + q], [target], old=[-2.0], mean_logprobs=[0.0])
    loss = ROVER(clip=0.2)(made).loss
    assert loss.item() == pytest.approx((q - target) ** 2)
    assert gradient(loss, made) == pytest.approx([2 * (q - target)])


@given(made=trajectories(), weight=st.floats(0, 2))
def test_rover_is_the_mean_squared_error_of_a_fixed_target(made, weight):
    logits, ref, old, tokens, advantages, ids = made
    logits.requires_grad_()
    gaps = logits.log_softmax(-1) - old.log_softmax(-1)
    last = len(tokens) - 1
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(tokens)):
        ends = t == last or ids[t + 1] != ids[t]
        following = 0.0 if ends else gaps[t + 1].mean().detach()
        total = total + (gaps[t, tokens[t]] - advantages[t] - weight * following) ** 2
    found = ROVER(next_weight=weight)(from_logits(logits, ref, tokens, advantages, ids, old)).loss
    assert found.item() == pytest.approx(total.item(), abs=1e-9)
    slopes = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (total, found)]
    torch.testing.assert_close(*slopes, atol=1e-9, rtol=1e-9)
