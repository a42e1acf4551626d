"""From trajectories to gradients: layouts, packing, padding and observations, on a tiny model."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf.batching.pack import collate, pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.losses.policy_loss import LossInputs
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.losses.reinforce import Reinforce
from tests.batching.batch_parts import (
    VOCABULARY,
    PrefixModel,
    constant_credit,
    generation,
    group,
    policy_logprobs,
    steps,
    trajectory,
)

REDUCTIONS = [
    Reduction(kind="token_mean"),
    Reduction(kind="seq_mean_token_mean"),
    Reduction(kind="seq_mean_token_sum"),
    Reduction(kind="seq_mean_token_sum_norm", max_tokens=9),
    Reduction(kind="per_trajectory_mean"),
]
MODEL = PrefixModel()


def loss_of(batches, loss, model=MODEL):
    """The sum of the losses of micro-batches; old log-probs are those of the sampler."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        logprobs = policy_logprobs(model.packed_logits(batch), batch)
        given_ = LossInputs(
            policy_logprobs=logprobs,
            old_logprobs=batch.sampler_logprobs,
            sampler_logprobs=batch.sampler_logprobs,
            advantages=batch.advantages,
            weights=batch.weights,
            trajectory_ids=batch.trajectory_ids,
            n_minibatch_tokens=batch.n_minibatch_tokens,
        )
        total = total + loss(given_).loss
    return total


def gradient(samples, reduction, loss, max_tokens=10_000):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows over the budget are part of the test
        batches = [b for part in pack_minibatches(samples, 1, reduction, max_tokens) for b in part]
    return MODEL.gradient(loss_of(batches, loss))


def reinforce_by_definition(groups, credits, reduction):
    """Σ w · (-A log π) over generations, straight from the records: no rows, no masks, no packing."""
    pairs = [
        p for g, c in zip(groups, credits, strict=True) for p in zip(g.trajectories, c.advantages_GNT, strict=True)
    ]
    pairs = [(t, credit_NT) for t, credit_NT in pairs if t.n_tokens]
    n_tokens = sum(t.n_tokens for t, _ in pairs)
    total = torch.zeros((), dtype=torch.float64)
    for t, credit_NT in pairs:
        weight = {
            "token_mean": 1 / n_tokens,
            "seq_mean_token_mean": 1 / (len(pairs) * t.n_tokens),
            "seq_mean_token_sum": 1 / len(pairs),
            "seq_mean_token_sum_norm": 1 / (len(pairs) * 9),
            "per_trajectory_mean": 1 / (len(pairs) * t.n_tokens),
        }[reduction.kind]
        for g, credit_T in zip(t.generations, credit_NT, strict=True):
            log_p = torch.log_softmax(MODEL.logits(torch.tensor(g.full_ids)), -1)
            for i, (token, advantage) in enumerate(zip(g.token_ids, credit_T, strict=True)):
                total = total - weight * advantage * log_p[len(g.prompt.token_ids) + i - 1, token]
    return total


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: r.kind)
@settings(max_examples=25)
@given(step=steps())
def test_both_layouts_give_the_gradient_of_the_definition(reduction, step):
    assume(any(t.n_tokens for g in step[0] for t in g.trajectories))
    expected = MODEL.gradient(reinforce_by_definition(*step, reduction))
    for layout in ("trajectory", "generation"):
        samples, _ = make_samples(*step, layout)
        assert torch.allclose(gradient(samples, reduction, Reinforce()), expected, atol=1e-7)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: r.kind)
@settings(max_examples=15)
@given(step=steps(), max_tokens=st.integers(1, 40))
def test_neither_layout_nor_micro_batches_change_the_clipped_gradient(reduction, step, max_tokens):
    folded, unfolded = (make_samples(*step, layout)[0] for layout in ("trajectory", "generation"))
    expected = gradient(folded, reduction, PPOClip())
    for samples in (folded, unfolded):
        assert torch.allclose(gradient(samples, reduction, PPOClip(), max_tokens), expected, atol=1e-9)


def test_counting_rows_makes_the_layout_matter():
    # One trajectory of two turns and one of one: per row, the first counts twice in one layout and once in the other.
    long = trajectory(generation([0], [1]), generation([0, 1, 2], [3]))
    made = group(long, trajectory(generation([0], [2])))
    credit = constant_credit(made, [1.0, -1.0])
    per_row = Reduction(kind="seq_mean_token_mean", per="row")
    folded, unfolded = (make_samples([made], [credit], layout)[0] for layout in ("trajectory", "generation"))
    assert not torch.allclose(gradient(folded, per_row, Reinforce()), gradient(unfolded, per_row, Reinforce()))


@settings(max_examples=25)
@given(step=steps(), n_extra=st.integers(1, 4))
def test_trailing_tokens_that_nobody_sampled_change_nothing(step, n_extra):
    samples, _ = make_samples(*step)

    def padded(s):
        grown = {
            name: np.pad(getattr(s, name), (0, n_extra))
            for name in ("mask", "sampler_logprobs", "advantages", "versions")
        }
        return replace(s, token_ids=np.pad(s.token_ids, (0, n_extra), constant_values=VOCABULARY - 1), **grown)

    before = gradient(samples, Reduction(), PPOClip())
    after = gradient([padded(s) for s in samples], Reduction(), PPOClip())
    # Rows of other lengths are multiplied in another order, which a processor may round in another way.
    assert torch.allclose(after, before, rtol=1e-9, atol=1e-12)


@settings(max_examples=25)
@given(step=steps())
def test_only_logits_that_predict_sampled_tokens_get_a_gradient(step):
    samples, _ = make_samples(*step)
    assume(samples)
    batch = collate(samples, Reduction()(*counts(samples)))
    logits = MODEL.packed_logits(batch).detach().requires_grad_()
    logprobs = policy_logprobs(logits, batch)
    given_ = LossInputs(
        logprobs, logprobs.detach(), batch.sampler_logprobs, batch.advantages + 1, batch.weights, batch.trajectory_ids
    )
    PPOClip()(given_).loss.backward()
    touched = set(logits.grad.abs().sum(-1).nonzero().flatten().tolist())
    mask = np.concatenate([s.mask for s in samples])
    assert touched <= {int(i) - 1 for i in np.flatnonzero(mask)}
    assert touched or not batch.advantages.add(1).any()


def counts(samples):
    return np.array([s.n_policy_tokens for s in samples]), np.array([s.sequence for s in samples])


@settings(max_examples=25)
@given(step=steps(), poison=st.integers(0, VOCABULARY - 1))
def test_poisoned_observations_leave_no_gradient(step, poison):
    # A model without memory sees an observation only as something to predict, and must not learn to: replacing every
    # token that was not sampled changes nothing, to the bit.
    samples, _ = make_samples(*step)
    assume(samples)
    reduction = Reduction()(*counts(samples))

    def unigram_gradient(rows):
        batch = collate(rows, reduction)
        table = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64).requires_grad_()
        logprobs = policy_logprobs(table.expand(len(batch.token_ids), -1), batch)
        loss = -(batch.weights * batch.advantages * logprobs).sum()
        return torch.autograd.grad(loss, table)[0]

    poisoned = [replace(s, token_ids=np.where(s.mask, s.token_ids, poison)) for s in samples]
    assert torch.equal(unigram_gradient(poisoned), unigram_gradient(samples))


def test_the_poison_test_can_fail():
    # With the observation wrongly masked as sampled, the gradient does move towards it.
    zeros = np.zeros(3, np.float32)
    right = Sample(np.array([0, 1, 5]), np.array([False, True, False]), zeros, np.array([0, 1, 0], np.float32), 0, 0)
    wrong = replace(right, mask=np.array([False, True, True]), advantages=np.array([0, 1, 1], np.float32))
    assert 5 not in collate([right], np.ones(1)).targets.tolist()
    assert 5 in collate([wrong], np.ones(1)).targets.tolist()
