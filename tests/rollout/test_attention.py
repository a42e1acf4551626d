from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf.errors import ModelError
from rlhf.inference.embedded import attention
from rlhf.inference.embedded.attention import RowPlan, packed_forward, shared_prefixes, use_packed_attention
from rlhf.inference.embedded.kv_cache import KVCache, SlotPlan
from tests.rollout.tiny_models import FAMILIES, N_VOCAB, blas_keeps_rows, lora_model, tiny_model

LENGTHS = [5, 17, 1, 100, 64, 63, 5]


def make_rows(lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, N_VOCAB, (n,), generator=generator) for n in lengths]


def relative_gap(left, right):
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(left, right, strict=True))


def plain_and_packed(model, lengths, packed=None):
    """Selected logits and parameter gradients of a plain pass row by row, and of one packed pass."""
    rows = make_rows(lengths)
    select = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(1))[:40]
    parameters = [p for p in model.parameters() if p.requires_grad]
    plain = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])[select]
    factors = torch.randn(plain.shape, generator=torch.Generator().manual_seed(2))
    plain_gradient = torch.autograd.grad((plain * factors).sum(), parameters)
    use_packed_attention(model)
    if packed:
        packed(model)
    logits = packed_forward(model, torch.cat(rows), lengths, select)
    model.zero_grad()
    (logits * factors).sum().backward()
    return plain, plain_gradient, logits, [p.grad for p in parameters]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_a_plain_pass_over_each_row(family):
    plain, plain_gradient, logits, gradient = plain_and_packed(tiny_model(family), LENGTHS)
    assert logits.shape == (40, N_VOCAB)
    assert torch.allclose(logits, plain, atol=2e-5)
    assert relative_gap(gradient, plain_gradient) < 1e-5


def test_packed_rows_equal_a_plain_pass_with_an_adapter():
    plain, plain_gradient, logits, gradient = plain_and_packed(lora_model(), LENGTHS)
    assert torch.allclose(logits, plain, atol=2e-5)
    assert relative_gap(gradient, plain_gradient) < 1e-5


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_keeps_rows_apart():
    def checkpoint(model):
        model.train()
        model.gradient_checkpointing_enable()
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())

    plain, plain_gradient, logits, gradient = plain_and_packed(tiny_model(), LENGTHS, checkpoint)
    assert torch.allclose(logits, plain, atol=2e-5)
    assert relative_gap(gradient, plain_gradient) < 1e-5


def test_without_selection_all_logits_come_back():
    model = tiny_model()
    use_packed_attention(model)
    rows = make_rows(LENGTHS)
    everything = packed_forward(model, torch.cat(rows), LENGTHS)
    assert everything.shape == (sum(LENGTHS), N_VOCAB)
    some = torch.tensor([3, 200, 7])
    assert torch.allclose(packed_forward(model, torch.cat(rows), LENGTHS, some), everything[some], atol=1e-5)
    assert packed_forward(model, torch.cat(rows), LENGTHS, some[:0]).shape == (0, N_VOCAB)


def test_a_row_ignores_its_neighbours_and_its_own_future():
    model = tiny_model()
    use_packed_attention(model)
    rows = make_rows([20, 30, 20])
    before = packed_forward(model, torch.cat(rows), [20, 30, 20]).detach()
    rows[0] = (rows[0] + 1) % N_VOCAB
    rows[1][25:] = (rows[1][25:] + 1) % N_VOCAB
    after = packed_forward(model, torch.cat(rows), [20, 30, 20]).detach()
    assert torch.equal(after[20:45], before[20:45])
    assert torch.equal(after[50:], before[50:])
    assert not torch.allclose(after[:20], before[:20], atol=0.1)
    assert not torch.allclose(after[45:50], before[45:50], atol=0.1)


def dense_rows(query, key, value, lengths, scale):
    """One softmax over all tokens with everything else masked: the definition."""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(row))
    allowed = (row[:, None] == row) & (place[:, None] >= place)
    shared = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(shared, 1)) * scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(shared, 1))


@given(st.lists(st.integers(1, 120), min_size=1, max_size=12), st.sampled_from([(4, 2), (3, 3), (6, 1)]))
@settings(max_examples=30, deadline=None)
def test_row_plan_equals_the_definition(lengths, heads):
    torch.manual_seed(sum(lengths))
    n = sum(lengths)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64, requires_grad=True) for h in (heads[0], heads[1], heads[1]))
    factors = torch.randn(n, heads[0], 8, dtype=torch.float64)
    got = RowPlan(lengths).attend(0, q, k, v, 0.3, 0.0)
    expected = dense_rows(q, k, v, lengths, 0.3)
    assert torch.allclose(got, expected, atol=1e-10)
    for a, b in zip(
        torch.autograd.grad((got * factors).sum(), (q, k, v)),
        torch.autograd.grad((expected * factors).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-10)


#: Of rows, how many tokens they take of the row before, and how many they go on with. Few tokens are shared, or many; a
#: row begins another, or is equal to it; branches have branches.
BRANCHES = [(0, 60), (40, 20), (40, 35), (55, 5), (0, 9), (30, 30), (30, 0), (30, 80), (110, 0)]


def branching_rows():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.zeros(0, dtype=torch.int64)]
    for n, more in BRANCHES:
        rows.append(torch.cat([rows[-1][:n], torch.randint(0, N_VOCAB, (more,), generator=generator)]))
    return rows[1:]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=8), st.integers(1, 4))
def test_as_many_tokens_are_computed_as_there_are_beginnings(rows, shortest):
    lengths, ids = np.array([len(row) for row in rows]), np.concatenate(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SHORTEST_SHARED", shortest)
        source = shared_prefixes(ids, lengths)
    starts = np.cumsum(lengths) - lengths
    beginnings = [tuple(row[: k + 1]) for row in rows for k in range(len(row))]
    assert all(beginnings[place] == beginnings[at] for place, at in enumerate(source))
    assert (source[source] == source).all()
    n_shared = np.add.reduceat(source != np.arange(len(ids)), starts)
    assert not ((n_shared > 0) & (n_shared < shortest)).any()
    if shortest == 1:
        assert len(set(source.tolist())) == len(set(beginnings))


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_shared_tokens_are_attended_as_if_each_row_had_its_own(heads):
    lengths, ids = [len(row) for row in branching_rows()], torch.cat(branching_rows()).numpy()
    plan = RowPlan(lengths, source=shared_prefixes(ids, np.array(lengths)))
    # Taken over: 40, 40 and 55 of the first rows, then 30, 30 and 30 or all 110, and nothing of what is shorter.
    assert plan.n_tokens - plan.n_computed == 40 + 40 + 55 + 30 + 30 + 110
    torch.manual_seed(0)
    given_ = [torch.randn(plan.n_computed, h, 8, dtype=torch.float64) for h in (heads[0], heads[1], heads[1])]
    factors = torch.randn(plan.n_computed, heads[0], 8, dtype=torch.float64)
    q, k, v = (x.clone().requires_grad_() for x in given_)
    got = plan.attend(0, q, k, v, 0.3, 0.0)
    (got * factors).sum().backward()
    own_q, own_k, own_v = (x.clone().requires_grad_() for x in given_)
    everything = dense_rows(own_q[plan.token_of], own_k[plan.token_of], own_v[plan.token_of], lengths, 0.3)
    (everything[plan.kept] * factors).sum().backward()
    assert torch.allclose(got, everything[plan.kept], atol=1e-10)
    for ours, theirs in ((q, own_q), (k, own_k), (v, own_v)):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-10)


@pytest.mark.parametrize("made", [*FAMILIES, "adapter", "checkpointing"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rows_that_begin_alike_equal_a_plain_pass_over_each_row(made):
    model = lora_model() if made == "adapter" else tiny_model(made if made in FAMILIES else next(iter(FAMILIES)))
    rows = branching_rows()
    lengths, parameters = [len(row) for row in rows], [p for p in model.parameters() if p.requires_grad]
    plain = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])
    factors = torch.randn(plain.shape, generator=torch.Generator().manual_seed(2))
    plain_gradient = torch.autograd.grad((plain * factors).sum(), parameters)
    use_packed_attention(model)
    if made == "checkpointing":
        model.train()
        model.gradient_checkpointing_enable()
    logits = packed_forward(model, torch.cat(rows), lengths)
    (logits * factors).sum().backward()
    assert torch.allclose(logits, plain, atol=2e-5)
    assert relative_gap([p.grad for p in parameters], plain_gradient) < 1e-5
    select = torch.tensor([sum(lengths) - 1, 3, 61, 61])  # 61 is a token of the second row that it shares
    assert torch.allclose(packed_forward(model, torch.cat(rows), lengths, select), plain[select], atol=2e-5)


def play_segments(steps, n_slots, heads, dtype):
    """Feed segments step by step to a cache; the results, and what dense attention over each whole slot gives."""
    n_heads, n_groups = heads
    cache = KVCache(n_slots, 500)
    said = {slot: ([], []) for slot in range(n_slots)}
    torch.manual_seed(0)
    for step in steps:
        slots = np.array(sorted(step), np.int64)
        counts = np.array([step[s] for s in slots], np.int64)
        starts = np.array([len(said[s][0]) for s in slots], np.int64)
        n_tokens = int(counts.sum()) + 3  # padding tokens at the end
        q, k, v = (torch.randn(n_tokens, h, 8).to(dtype) for h in (n_heads, n_groups, n_groups))
        cache.reserve(int(slots[-1]) + 1, int((starts + counts).max()))
        plan = SlotPlan(cache, slots, starts, counts, n_tokens, torch.device("cpu"))
        out = plan.attend(0, q, k, v, 0.3, 0.0)
        first = 0
        for slot, count in zip(slots, counts, strict=True):
            keys, values = said[slot]
            keys.extend(k[first : first + count])
            values.extend(v[first : first + count])
            whole_q = torch.zeros(len(keys), n_heads, 8, dtype=torch.float64)
            whole_q[len(keys) - count :] = q[first : first + count].double()
            dense = dense_rows(whole_q, torch.stack(keys).double(), torch.stack(values).double(), [len(keys)], 0.3)
            yield out[first : first + count].double(), dense[len(keys) - count :]
            first += count


@given(
    st.lists(st.dictionaries(st.integers(0, 7), st.one_of(st.just(1), st.integers(1, 150)), min_size=1), max_size=5),
    st.sampled_from([(4, 2), (3, 3), (5, 1)]),
)
@settings(max_examples=30, deadline=None)
def test_slot_plan_equals_the_definition(steps, heads):
    kept = []
    for step in steps:  # no slot grows beyond the cache
        step = {s: n for s, n in step.items() if sum(k.get(s, 0) for k in kept) + n <= 500}
        if step:
            kept.append(step)
    for got, expected in play_segments(kept, 8, heads, torch.float32):
        assert torch.allclose(got, expected, atol=1e-5)


def test_slot_plan_in_bfloat16():
    steps = [{0: 20, 3: 7, 4: 1}, {0: 1, 4: 30}, {0: 1, 3: 1, 4: 1}]
    for got, expected in play_segments(steps, 5, (4, 2), torch.bfloat16):
        assert torch.allclose(got, expected, atol=0.03)


@pytest.mark.skipif(not blas_keeps_rows(), reason="matrix products of this machine round a row by its neighbours")
@pytest.mark.parametrize("heads", [(6, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_a_neighbour_does_not_change_the_last_bit(heads, count):
    # Left to itself, BLAS sums the rows of the shorter slot in blocks that depend on the longer one, between 192 and
    # 384 keys; the lengths are close enough for the two to share a call.
    torch.manual_seed(0)
    past, new = ([torch.randn(n, 2 * max(heads), 32) for n in lengths] for lengths in ((200, 216), (count, count)))

    def attend(slots):
        cache = KVCache(2, 400)
        cache.reserve(2, 400)
        for tokens, start in ((past, 0), (new, 200)):
            parts = [tokens[s] for s in slots]
            counts = np.array([len(p) for p in parts])
            starts = np.array([0 if start == 0 else len(past[s]) for s in slots])
            both = torch.cat(parts)
            key, value = both[:, : heads[1]], both[:, max(heads) : max(heads) + heads[1]]
            plan = SlotPlan(cache, np.array(slots), starts, counts, len(both), torch.device("cpu"))
            out = plan.attend(0, both[:, : heads[0]], key, value, 0.2, 0.0)
        assert len(plan._spans) == 1
        return out[:count]

    assert torch.equal(attend([0]), attend([0, 1]))


def test_long_prompts_are_cut_into_pieces_that_share_calls():
    # 300 queries are pieces of 128, 128 and 44; two slots side by side share each of the three calls.
    cache = KVCache(2, 400)
    cache.reserve(2, 300)
    plan = SlotPlan(cache, np.array([0, 1]), np.array([0, 0]), np.array([300, 300]), 600, torch.device("cpu"))
    assert [(s.first, s.last, s.width, s.n_keys) for s in plan._spans] == [
        (0, 2, 128, 128),
        (0, 2, 128, 256),
        (0, 2, 44, 304),
    ]


def test_the_cache_keeps_what_it_holds_when_it_grows():
    cache = KVCache(8, 1000)
    cache.reserve(2, 10)
    held = torch.randn(20, 1, 8)
    plan = SlotPlan(cache, np.array([0, 1]), np.array([0, 0]), np.array([10, 10]), 20, torch.device("cpu"))
    plan.attend(0, held, held, held, 1.0, 0.0)
    small = cache.n_bytes
    cache.reserve(8, 1000)
    keys, _ = cache.buffers(0, held, held)
    assert torch.equal(keys[:2, 0, :10].reshape(20, 8), held[:, 0])
    assert cache.n_bytes > small
    cache.copy(1, 7, 4)
    assert torch.equal(keys[7, 0, :4], held[10:14, 0])
    large = cache.n_bytes
    cache.clear()
    assert cache.n_bytes == 0
    cache.reserve(1, 1)
    cache.buffers(0, held, held)
    assert cache.n_bytes == large, "it begins with the size that it had"


def test_an_unprepared_model_is_refused():
    with pytest.raises(ModelError, match="use_packed_attention"):
        packed_forward(tiny_model(), torch.arange(4), [4])


class DropsArguments(nn.Module):
    """A model class that does not pass keyword arguments on: rows would see each other without any sign."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids, position_ids, **_):
        return self.inner(input_ids=input_ids, position_ids=position_ids)


def test_a_model_that_drops_the_plan_is_refused():
    model = tiny_model()
    use_packed_attention(model)
    with pytest.raises(
        ModelError,
        match="does not pass keyword arguments",
    ):
        packed_forward(DropsArguments(model), torch.arange(4), [2, 2])


def test_lengths_must_sum_to_the_tokens():
    model = tiny_model()
    use_packed_attention(model)
    with pytest.raises(ValueError, match="sum"):
        packed_forward(model, torch.arange(5), [2, 2])
    with pytest.raises(ValueError, match="at least 1"):
        packed_forward(model, torch.arange(4), [4, 0])


def test_a_prepared_model_still_generates_and_takes_padded_batches():
    plain, packed = tiny_model(attention="sdpa"), tiny_model(attention="sdpa")
    use_packed_attention(packed)
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(packed.generate(ids, **arguments), plain.generate(ids, **arguments))


def test_learned_positions_follow_each_row():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=N_VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
    model = GPT2LMHeadModel(config).eval()
    rows = make_rows([9, 30])
    plain = torch.cat([model(row[None]).logits[0] for row in rows])
    use_packed_attention(model)
    assert torch.allclose(packed_forward(model, torch.cat(rows), [9, 30]), plain, atol=2e-5)
