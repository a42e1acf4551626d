"""Corrected rows: what becomes of tokens, denominators, and that neither layout nor packing shows."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf.batching.corrected_rows import correct
from rlhf.batching.pack import collate, minibatches, pack_minibatches
from rlhf.batching.samples import make_samples
from rlhf.errors import DataError
from rlhf.losses.importance_correction import Clipped, Criterion, Masked, Rejection, Truncated
from rlhf.losses.mismatch import CorrectionOutput
from rlhf.losses.policy_loss import LossInputs
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from tests.batching.batch_parts import (
    PrefixModel,
    constant_credit,
    generation,
    group,
    policy_logprobs,
    steps,
    trajectory,
)

MODEL = PrefixModel()
#: The log-probs of the made-up engine lie some nats from those of the model, so that every bound binds somewhere.
CORRECTIONS = [
    Truncated(),
    Truncated(level="sequence", batch_normalize=True),
    Clipped(level="geometric", opsm_delta=0.1),
    Masked(veto=0.1),
    Rejection(criteria=(Criterion(over="token", at_least=0.3, at_most=3.0),)),
    Rejection(criteria=(Criterion(statistic="k3", over="mean", at_most=0.5),)),
]


def scored(samples):
    """The model's log-probs of each row's policy tokens, row by row."""
    ones = np.ones(1)
    with torch.no_grad():
        batches = [collate([s], ones) for s in samples]
        return [policy_logprobs(MODEL.packed_logits(b), b).float().numpy() for b in batches]


def loss_of(samples, reduction, max_tokens=10_000):
    total = torch.zeros((), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows over the budget are part of the test
        batches = [b for part in pack_minibatches(samples, 1, reduction, max_tokens) for b in part]
    for batch in batches:
        logprobs = policy_logprobs(MODEL.packed_logits(batch), batch)
        given_ = LossInputs(
            logprobs, batch.old_logprobs, batch.sampler_logprobs, batch.advantages, batch.weights, batch.trajectory_ids,
            n_minibatch_tokens=batch.n_minibatch_tokens,
        )  # fmt: skip
        total = total + PPOClip()(given_).loss
    return total


@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
@settings(max_examples=15)
@given(step=steps(), max_tokens=st.integers(1, 40), kind=st.sampled_from(["token_mean", "seq_mean_token_mean"]))
def test_neither_layout_nor_micro_batches_change_the_corrected_gradient(correction, step, max_tokens, kind):
    reduction = Reduction(kind=kind)
    folded, unfolded = (make_samples(*step, layout)[0] for layout in ("trajectory", "generation"))
    rows, metrics = correct(folded, scored(folded), correction)
    expected = MODEL.gradient(loss_of(rows, reduction))
    split, same = correct(unfolded, scored(unfolded), correction)
    assert same == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for samples in (rows, split):
        found = MODEL.gradient(loss_of(samples, reduction, max_tokens))
        assert torch.allclose(found, expected, atol=1e-5)


@given(step=steps())
def test_corrected_rows_are_the_rows_with_more_said_about_them(step):
    samples, _ = make_samples(*step)
    assume(samples)
    old = scored(samples)
    rows, metrics = correct(samples, old, Truncated())
    for row, sample, logprobs in zip(rows, samples, old, strict=True):
        same = ("token_ids", "mask", "sampler_logprobs", "advantages")
        assert all(np.array_equal(getattr(row, name), getattr(sample, name)) for name in same)
        assert np.array_equal(row.old_logprobs[row.mask], logprobs) and not row.old_logprobs[~row.mask].any()
        ratio = np.exp(logprobs.astype(float) - sample.sampler_logprobs[sample.mask])
        assert row.correction[row.mask] == pytest.approx(np.minimum(ratio, 2), rel=1e-5)
    assert metrics["loss/sampler_rejected_share"] == 0


def two_trajectories():
    """Rows of 2 and 4 sampled tokens whose engine said −0.5, and trainer's log-probs that make w = 1 but for one 6."""
    made = group(trajectory(generation([0], [1, 2])), trajectory(generation([0], [3, 4, 5, 1])))
    samples, _ = make_samples([made], [constant_credit(made, [1.0, -1.0])])
    old = [np.full(s.n_policy_tokens, -0.5, np.float32) for s in samples]
    old[1][2] += np.log(6)
    return samples, old


def test_a_masked_token_still_counts_and_a_rejected_one_does_not():
    samples, old = two_trajectories()
    token = Rejection(criteria=(Criterion(over="token", at_most=5),))
    for correction, expected in (
        (Masked(), [1 / 6] * 2 + [1 / 6, 1 / 6, 0, 1 / 6]),
        (token, [1 / 5] * 5),  # five tokens are left, and they are a batch of five
    ):
        rows, _ = correct(samples, old, correction)
        [[batch]] = pack_minibatches(rows, 1, Reduction(), 100)
        assert batch.weights.tolist() == pytest.approx(expected)
    # Per trajectory: 1 / (2 · 2) and 1 / (2 · 3).
    [[batch]] = pack_minibatches(correct(samples, old, token)[0], 1, Reduction(kind="seq_mean_token_mean"), 100)
    assert batch.weights.tolist() == pytest.approx([1 / 4] * 2 + [1 / 6] * 3)
    assert batch.n_minibatch_tokens == 5


def test_a_rejected_trajectory_is_gone():
    samples, old = two_trajectories()
    rows, metrics = correct(samples, old, Rejection(criteria=(Criterion(over="mean", at_most=1.5),)))  # 6^(1/4) = 1.565
    assert [row.sequence for row in rows] == [samples[0].sequence]
    assert metrics["loss/sampler_dropped_share"] == 1 / 2 and metrics["loss/sampler_rejected_share"] == 4 / 6
    [[batch]] = pack_minibatches(rows, 1, Reduction(kind="seq_mean_token_mean"), 100)
    assert batch.weights.tolist() == pytest.approx([1 / 2] * 2)
    assert len(minibatches(rows, 2)) == 1


def test_nothing_may_be_left():
    samples, old = two_trajectories()
    rows, metrics = correct(samples, [o - 20 for o in old], Truncated(veto=1e-4))
    assert rows == [] and metrics["loss/sampler_dropped_share"] == 1 and metrics["loss/sampler_ess"] == 0


def test_what_does_not_fit_is_an_error():
    samples, old = two_trajectories()
    with pytest.raises(DataError, match="do not match the rows"):
        correct(samples, old[::-1], Truncated())
    with pytest.raises(DataError, match="must be finite"):
        correct(samples, [o * np.nan for o in old], Truncated())
    with pytest.raises(DataError, match="a correction changes the sign of a token's advantage"):
        correct(samples, old, lambda given_: CorrectionOutput(-torch.ones(6)))
    rows, _ = correct(samples, old, Truncated())
    with pytest.raises(DataError, match="some rows have figures that others lack"):
        collate([rows[0], samples[1]], np.ones(2))
    ours, theirs = (
        replace(rows[0], correction=rows[0].correction * 2),
        replace(samples[1], old_logprobs=rows[1].old_logprobs),
    )
    counts = [s.n_policy_tokens for s in (ours, theirs)]
    assert collate([ours, theirs], np.ones(2)).weights.tolist() == [2.0] * counts[0] + [1.0] * counts[1]
    with pytest.raises(DataError, match="differ in length"):
        replace(rows[0], correction=np.ones(1, np.float32))
