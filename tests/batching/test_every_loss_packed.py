"""Every loss of the catalogue on packed rows: layouts, micro-batches, padding and observations leave no trace."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from batch_parts import VOCABULARY, PrefixModel, generation, group, policy_logprobs, steps, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.batching.pack import is_split, pack_minibatches
from rlhf.batching.samples import make_samples
from rlhf.catalog import CATALOG, resolve
from rlhf.data import Credit
from rlhf.losses.policy_loss import LossInputs
from rlhf.losses.reduction import Reduction
from rlhf.losses.trajectories import trajectories_of

MODEL = PrefixModel()
LOSSES = {kind: resolve("loss", kind, base=Path())() for kind in CATALOG["loss"]}
every_loss = pytest.mark.parametrize("kind", LOSSES)


def packed(samples, reduction, max_tokens=10_000):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows over the budget are part of the test
        return [b for part in pack_minibatches(samples, 1, reduction, max_tokens) for b in part]


def gradient(kind, samples, max_tokens=10_000):
    """Gradient in the model's parameters; old log-probs are those of the sampler."""
    loss = LOSSES[kind]
    reduction = Reduction(kind=getattr(loss, "reductions", ("token_mean",))[0])
    batches = packed(samples, reduction, max_tokens)
    if not batches:
        return MODEL.gradient(torch.zeros(()))
    logits = [MODEL.packed_logits(batch) for batch in batches]
    policy = [policy_logprobs(x, batch) for x, batch in zip(logits, batches, strict=True)]
    columns = ("sampler_logprobs", "advantages", "sequence_ids", "group_ids")
    whole = trajectories_of(torch.cat(policy), *(torch.cat([getattr(b, name) for b in batches]) for name in columns))
    total = torch.zeros((), dtype=torch.float64)
    for x, logprobs, batch in zip(logits, policy, batches, strict=True):
        log_p = torch.log_softmax(x[batch.select], -1)
        made = LossInputs(
            logprobs, batch.sampler_logprobs, batch.sampler_logprobs, batch.advantages, batch.weights,
            batch.sequence_ids, entropy=-(log_p.exp() * log_p).sum(-1), trajectories=whole,
            n_minibatch_tokens=batch.n_minibatch_tokens,
        )  # fmt: skip
        total = total + loss(made).loss
    return MODEL.gradient(total)


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
        grown = {name: np.pad(getattr(s, name), (0, n_extra)) for name in ("mask", "sampler_logprobs", "advantages")}
        return replace(s, token_ids=np.pad(s.token_ids, (0, n_extra), constant_values=VOCABULARY - 1), **grown)

    assert torch.equal(gradient(kind, [padded(s) for s in samples]), gradient(kind, samples))


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
    assert three[0].group_ids.tolist() == [0, 0, 0] and three[1].sequence_ids.tolist() == [2]
