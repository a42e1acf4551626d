"""Every loss of the catalogue on packed rows: layouts, micro-batches, padding and observations leave no trace."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.batching.pack import is_split, pack_minibatches
from rlhf.batching.samples import make_samples
from rlhf.catalog import CATALOG
from rlhf.data import Credit
from rlhf.errors import DataError
from rlhf.losses.policy_loss import LossInputs, whole_of
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.losses.trajectories import trajectories_of
from rlhf.registry import resolve
from tests.batching.batch_parts import VOCABULARY, PrefixModel, generation, group, policy_logprobs, steps, trajectory

MODEL, FROZEN, BEFORE = (PrefixModel(seed) for seed in range(3))
NEEDED = {"kdrl": {"teacher": "somewhere", "teacher_coef": 0.5}}
LOSSES = {kind: resolve("loss", kind, base=Path())(**NEEDED.get(kind, {})) for kind in CATALOG["loss"]}
#: Not of `turn`: replies with nothing between them are one in a row of both, and two in rows of their own.
LOSSES["ppo_clip_trajectory"] = PPOClip(ratio="trajectory")
every_loss = pytest.mark.parametrize("kind", LOSSES)


def packed(samples, reduction, max_tokens=10_000):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows over the budget are part of the test
        return [b for part in pack_minibatches(samples, 1, reduction, max_tokens) for b in part]


def gradient(kind, samples, max_tokens=10_000):
    """Gradient in the model's parameters; old log-probs are those of the sampler."""
    loss = LOSSES[kind]
    reduction = Reduction(kind=(getattr(loss, "reductions", ()) or ("token_mean",))[0])
    batches = packed(samples, reduction, max_tokens)
    if not batches:
        return MODEL.gradient(torch.zeros(()))
    made = [inputs_of(batch) for batch in batches]
    columns = ("advantages", "trajectory_ids", "group_ids")
    policy, old = (torch.cat([getattr(m, name) for m in made]) for name in ("policy_logprobs", "old_logprobs"))
    figures = trajectories_of(policy, old, *(torch.cat([getattr(b, name) for b in batches]) for name in columns))
    shared = {"trajectories": figures, "whole": whole_of(made)}
    return MODEL.gradient(torch.stack([loss(replace(m, **shared)).loss for m in made]).sum())


def inputs_of(batch):
    """Everything that a loss may ask for; reference and teacher are a second model, the means are of a third."""
    logits = MODEL.packed_logits(batch)[batch.select]
    log_p = logits.log_softmax(-1)
    with torch.no_grad():
        other, before = (m.packed_logits(batch) for m in (FROZEN, BEFORE))
        theirs = policy_logprobs(other, batch)
    return LossInputs(
        log_p.gather(-1, batch.targets[:, None]).squeeze(-1),
        batch.sampler_logprobs, batch.sampler_logprobs, batch.advantages, batch.weights, batch.trajectory_ids,
        ref_logprobs=theirs, entropy=-(log_p.exp() * log_p).sum(-1), n_minibatch_tokens=batch.n_minibatch_tokens,
        token_positions=batch.token_positions, log_normalizers=logits.logsumexp(-1),
        ref_log_normalizers=other[batch.select].logsumexp(-1), mean_logprobs=log_p.detach().mean(-1),
        old_mean_logprobs=before[batch.select].log_softmax(-1).mean(-1), teacher_logprobs=theirs,
        off_policy=batch.off_policy,
    )  # fmt: skip


def rows_of(step, layout="trajectory"):
    """Rows with advantages halved: none beyond 1."""
    samples, _ = make_samples(*step, layout)
    return [replace(s, advantages=s.advantages / 2) for s in samples]


@every_loss
@settings(max_examples=15)
@given(step=steps(), max_tokens=st.integers(1, 40))
def test_neither_layout_nor_micro_batches_change_the_gradient(kind, step, max_tokens):
    folded, unfolded = (rows_of(step, layout) for layout in ("trajectory", "generation"))
    expected = gradient(kind, folded)
    for samples in (folded, unfolded):
        assert torch.allclose(gradient(kind, samples, max_tokens), expected, atol=1e-8)


@every_loss
@settings(max_examples=10)
@given(step=steps(), n_extra=st.integers(1, 4))
def test_tokens_that_nobody_sampled_change_nothing(kind, step, n_extra):
    samples = rows_of(step)

    def padded(s):
        names = ("mask", "sampler_logprobs", "advantages", "versions")
        grown = {name: np.pad(getattr(s, name), (0, n_extra)) for name in names}
        return replace(s, token_ids=np.pad(s.token_ids, (0, n_extra), constant_values=VOCABULARY - 1), **grown)

    # Rows of other lengths are multiplied in another order, which a processor may round in another way.
    assert torch.allclose(gradient(kind, [padded(s) for s in samples]), gradient(kind, samples), rtol=1e-9, atol=1e-12)


def test_token_positions_number_the_policy_tokens_of_a_trajectory_across_its_rows():
    # Trajectory 0 has rows of two and one sampled tokens, trajectory 1 one of one; each row is a micro-batch.
    first = group(trajectory(generation([0], [1, 2]), generation([5], [3])), trajectory(generation([0], [3])))
    samples, _ = make_samples([first], [Credit((((1.0, 1.0), (1.0,)), ((1.0,),)))])
    batches = packed(samples, Reduction(), max_tokens=1)
    found = sorted((b.trajectory_ids.tolist(), b.token_positions.tolist(), b.targets.tolist()) for b in batches)
    assert found == [([0], [3], [3]), ([0, 0], [0, 1], [1, 2]), ([1], [0], [3])]
    [together] = packed(samples, Reduction())
    assert together.token_positions.tolist() == [0, 1, 3, 0]  # a gap before each reply


def test_figures_of_rows_reach_the_tokens_that_are_trained_on():
    samples, _ = make_samples([group(trajectory(generation([0], [1, 2])))], [Credit((((1.0, 1.0),),))])
    row = np.array([0.0, -2.0, np.nan], np.float32)
    [own] = packed(samples, Reduction())
    assert own.off_policy is None and own.teacher_logprobs is None and own.old_mean_logprobs is None
    sample = replace(
        samples[0],
        teacher_logprobs=row,
        off_policy=np.array([False, True, False]),
        old_mean_logprobs=np.array([0.0, -1.0, -3.0], np.float32),
    )
    [batch] = packed([sample, replace(sample, off_policy=None, sequence=1)], Reduction())
    assert batch.off_policy.tolist() == [True, False, False, False]
    np.testing.assert_array_equal(batch.teacher_logprobs.numpy(), np.tile(row[1:], 2))
    assert batch.old_mean_logprobs.tolist() == [-1.0, -3.0, -1.0, -3.0]
    kept = sample.masked(np.array([False, False, True]))
    assert kept.n_policy_tokens == 1 and not kept.off_policy.any()
    assert kept.old_mean_logprobs.tolist() == [0.0, 0.0, -3.0] and np.isnan(kept.teacher_logprobs[2])
    with pytest.raises(DataError, match="figures that others lack"):
        packed([sample, replace(samples[0], sequence=1)], Reduction())
    with pytest.raises(DataError, match="cannot be off-policy"):
        replace(sample, off_policy=np.array([True, False, False]))
    with pytest.raises(DataError, match="must not be infinite"):
        replace(sample, teacher_logprobs=np.array([0.0, -np.inf, 0.0], np.float32))
    with pytest.raises(DataError, match="differ in length"):
        replace(sample, off_policy=np.array([True]))


@settings(max_examples=15)
@given(step=steps(), max_tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_rows_of_another_leave_no_trace_of_layout_either(step, max_tokens, seed):
    # Whole trajectories are another's, as demonstrations are.
    others = np.random.default_rng(seed).random(99) < 0.5

    def mixed(layout):
        rows = rows_of(step, layout)
        return [replace(s, off_policy=s.mask.copy()) if others[s.sequence] else s for s in rows]

    expected = gradient("luffy", mixed("trajectory"))
    assert torch.allclose(gradient("luffy", mixed("generation"), max_tokens), expected, atol=1e-8)


def test_whether_anything_is_split_over_micro_batches():
    # Trajectories 0 and 1 of group 0 and trajectory 2 of group 1; the first has two rows.
    first = group(trajectory(generation([0], [1]), generation([5], [2])), trajectory(generation([0], [3])))
    second = group(trajectory(generation([0], [4])))
    credits = [Credit((((1.0,), (1.0,)), ((1.0,),))), Credit((((1.0,),),))]
    samples, _ = make_samples([first, second], credits)
    two = [packed(part, Reduction())[0] for part in (samples[:2], samples[2:])]
    assert not is_split(two, "trajectory") and is_split(two, "group")
    assert is_split([packed([s], Reduction())[0] for s in samples], "trajectory")
    three = [packed(part, Reduction())[0] for part in (samples[:3], samples[3:])]
    assert not is_split(three, "group") and not is_split(three[:1], "group") and not is_split([], "group")
    assert three[0].group_ids.tolist() == [0, 0, 0] and three[1].trajectory_ids.tolist() == [2]
