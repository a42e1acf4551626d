"""Packing: budgets, alignment, minibatches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.batching.pack import WithoutPadding, adapters_of, collate, minibatches, pack, pack_minibatches, shapes_of
from rlhf.batching.samples import Sample, make_samples
from rlhf.errors import DataError
from rlhf.losses.reduction import Reduction
from tests.batching.batch_parts import constant_credit, generation, group, steps, trajectory


def row(length, sequence=0, trained=1, group=0):
    """A row of that length whose last tokens are trained."""
    mask = np.arange(length) >= length - trained
    zeros = np.zeros(length, np.float32)
    return Sample(np.arange(length), mask, zeros, mask.astype(np.float32), sequence, group)


lengths = st.lists(st.integers(2, 12), max_size=20)


def test_longest_first_into_the_tightest_space():
    # 6 opens the first; 5 the second (10 - 6 < 5); 4 fills the first, which is the tighter; 3 and 2 fill the second.
    assert pack([row(n) for n in (2, 3, 4, 5, 6)], 10) == [[2, 4], [0, 1, 3]]


def test_a_group_after_the_other():
    # By length alone the 4 of group 1 would fill what the 6 of group 0 leaves, and both prompts be computed twice.
    groups = ((6, 0), (5, 1), (4, 1), (3, 0))
    assert pack([row(n, group=g) for n, g in groups], 10) == [[0, 3], [1, 2]]
    assert pack([row(n) for n, _ in groups], 10) == [[0, 2], [1, 3]]
    # Four processes have one row each, whatever its group.
    assert pack([row(n, group=g) for n, g in groups], 10, n_least=4) == [[0], [1], [2], [3]]


@given(st.lists(st.tuples(st.integers(2, 12), st.integers(0, 3)), max_size=20), st.integers(12, 40))
def test_every_row_once_within_the_budget(chosen, budget):
    lengths = [n for n, _ in chosen]
    bins = pack([row(n, group=group) for n, group in chosen], budget)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= budget for members in bins)
    assert all(members == sorted(members) for members in bins)
    # At most one micro-batch is half empty or more: two such would have been one.
    assert sum(2 * sum(lengths[i] for i in members) <= budget for members in bins) <= 1


def test_a_row_over_the_budget_is_alone_and_warned_about():
    with pytest.warns(UserWarning, match="1 of 3 rows are longer"):
        assert pack([row(2), row(9), row(3)], 5) == [[1], [0, 2]]


def test_collate_aligns_targets_with_the_position_before():
    first = Sample(
        token_ids=np.array([10, 11, 12, 13]),
        mask=np.array([False, True, False, True]),
        sampler_logprobs=np.array([0, -1, 0, -2], np.float32),
        advantages=np.array([0, 0.5, 0, -0.5], np.float32),
        sequence=4,
        group=0,
    )
    batch = collate([first, row(2, sequence=5)], np.array([0.25, 0.5]))
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 0, 1]
    assert batch.lengths.tolist() == [4, 2]
    assert batch.select.tolist() == [0, 2, 4]  # never 3, the last token of the first row
    assert batch.targets.tolist() == [11, 13, 1]
    assert batch.sampler_logprobs.tolist() == [-1, -2, 0]
    assert batch.advantages.tolist() == [0.5, -0.5, 1]
    assert batch.weights.tolist() == [0.25, 0.25, 0.5]
    assert batch.trajectory_ids.tolist() == [4, 4, 5]
    assert batch.n_minibatch_tokens == 3
    kinds = {t.dtype for t in (batch.sampler_logprobs, batch.advantages, batch.weights)}
    assert kinds == {torch.float32}
    integers = (batch.token_ids, batch.lengths, batch.select, batch.targets, batch.trajectory_ids)
    assert {t.dtype for t in integers} == {torch.int64}


@given(step=steps(), budget=st.integers(4, 60))
@pytest.mark.filterwarnings("ignore:.*longer than the micro-batch")
def test_logits_are_selected_within_the_row_and_weights_cover_the_minibatch(step, budget):
    samples, counters = make_samples(*step)
    for batches in pack_minibatches(samples, 1, Reduction(), budget):
        assert sum(b.weights.sum().item() for b in batches) == pytest.approx(1)
        assert {b.n_minibatch_tokens for b in batches} == {counters["batch/n_policy_tokens"]}
        for batch in batches:
            starts = set(np.cumsum([0, *batch.lengths.tolist()]).tolist())
            assert not {i + 1 for i in batch.select.tolist()} & starts
            assert torch.equal(batch.token_ids[batch.select + 1], batch.targets)


rows_of_trajectories = st.lists(st.integers(1, 3), max_size=8)


@given(rows_of_trajectories, st.integers(1, 5), st.integers(0, 2**32))
def test_minibatches_keep_trajectories_whole(n_rows, n_minibatches, seed):
    samples = [row(2, sequence) for sequence, n in enumerate(n_rows) for _ in range(n)]
    split = minibatches(samples, n_minibatches, np.random.default_rng(seed))
    assert len(split) == min(n_minibatches, len(n_rows))
    sequences = [sorted({s.sequence for s in part}) for part in split]
    assert sorted(x for part in sequences for x in part) == list(range(len(n_rows)))
    assert sum(map(len, split)) == len(samples)
    sizes = [len(part) for part in sequences]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert all([s.sequence for s in part] == sorted(s.sequence for s in part) for part in split)
    again = minibatches(samples, n_minibatches, np.random.default_rng(seed))
    assert [[id(s) for s in part] for part in again] == [[id(s) for s in part] for part in split]


def test_minibatches_are_shuffled_by_the_generator_only():
    samples = [row(2, sequence) for sequence in range(32)]
    in_order = [[s.sequence for s in part] for part in minibatches(samples, 2)]
    assert in_order == [list(range(16)), list(range(16, 32))]
    shuffled = [
        [[s.sequence for s in part] for part in minibatches(samples, 2, np.random.default_rng(seed))] for seed in (0, 1)
    ]
    assert shuffled[0] != in_order and shuffled[0] != shuffled[1]


def test_weights_are_those_of_the_minibatch_not_of_the_step():
    samples = [row(4, 0, trained=1), row(4, 1, trained=3)]
    weights = [[b.weights.tolist() for b in batches] for batches in pack_minibatches(samples, 2, Reduction(), 100)]
    assert weights == [[[1.0]], [[pytest.approx(1 / 3)] * 3]]


def test_a_batch_on_a_device_keeps_ids_and_lengths_of_rows_where_they_are():
    batch = collate([row(3), row(5, trained=2)], np.ones(2))
    there = batch.to("meta")
    assert there.targets.is_meta and there.weights.is_meta and there.old_logprobs is None
    assert there.token_ids is batch.token_ids and there.lengths is batch.lengths and there.select is batch.select
    assert there.n_minibatch_tokens == batch.n_minibatch_tokens == 3
    assert batch.to("cpu") is batch and there.to("meta") is there


def test_no_minibatches_is_an_error():
    with pytest.raises(DataError, match="no minibatches"):
        minibatches([row(2)], 0)


def test_micro_batches_are_laid_out_when_asked_for_and_equal_each_time():
    samples = [row(6, 0, trained=2), replace(row(5, 1), adapter="critic"), row(4, 1, trained=3), row(3, 2)]
    [batches] = pack_minibatches(samples, 1, Reduction(), 10)
    assert len(batches) == len(WithoutPadding(batches)) == 2
    assert batches[0] is not batches[0] and torch.equal(batches[0].weights, batches[0].weights)
    assert [b.lengths.tolist() for b in batches[1:]] == [batches[1].lengths.tolist()]
    assert [(b.lengths.tolist(), counts) for b, counts in WithoutPadding(batches)] == [
        (b.lengths.tolist(), True) for b in batches
    ]


def test_shapes_and_adapters_are_known_without_laying_out():
    samples = [row(6, 0, trained=2), replace(row(5, 1), adapter="critic"), row(4, 1, trained=3), row(3, 2)]
    [batches] = pack_minibatches(samples, 1, Reduction(), 10)
    assert shapes_of(batches) == shapes_of(list(batches)) == [(b.lengths.tolist(), len(b.targets)) for b in batches]
    assert adapters_of(batches) == adapters_of(list(batches)) == {"", "critic"}


def test_rows_share_the_ids_of_their_generations_and_batches_are_int64():
    made = group(trajectory(generation([1, 2], [3]), generation([1, 2, 3, 4], [5])))
    first, second = make_samples([made], [constant_credit(made, [1.0])], "generation")[0]
    assert first.token_ids.dtype == second.token_ids.dtype == np.int32 and not second.token_ids.flags.writeable
    assert collate([first, second], np.ones(2)).token_ids.tolist() == [1, 2, 3, 1, 2, 3, 4, 5]


def test_routing_is_laid_out_beside_rows_that_have_none():
    experts = np.arange(3 * 2 * 2, dtype=np.int16).reshape(3, 2, 2)  # 3 tokens, 2 layers, 2 experts
    routed, plain = replace(row(3), routing=experts), row(2)
    found = collate([plain, routed], np.ones(2)).routing
    assert found is not None and found.dtype == torch.int16
    assert (found[:2] == -1).all() and (found[2:].numpy() == experts).all()
    assert collate([plain], np.ones(1)).routing is None
    with pytest.raises(DataError, match="differ in length"):
        replace(plain, routing=experts)
