from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.inference.embedded.sampling import SamplingRows, distributions, request_key, sample, uniforms


def rows(n, *, temperature=1.0, top_p=1.0, top_k=0, uniform=None):
    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (n,)).copy()

    uniform = np.linspace(0, 0.999, n) if uniform is None else uniform
    kept = column(top_p, float), column(top_k, np.int64)
    return SamplingRows(column(temperature, float), *kept, column(uniform, float))


LOGITS = torch.tensor([[math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125]),
        # Squared probabilities 16 : 4 : 1 : 1 over 22.
        ({"temperature": 0.5}, [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        # A tie at the border goes to the lower id.
        ({"top_k": 3}, [4 / 7, 2 / 7, 1 / 7, 0]),
        # 0.5 alone is less than 0.6, 0.5 + 0.25 is enough.
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        # After top-k the two have 2/3 and 1/3; 2/3 is at least 0.6, so one stays.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.125, 0.125]),
        # Scores divided by this overflow float32.
        ({"temperature": 1e-39}, [1, 0, 0, 0]),
        # Greedy ignores what is cut off; its log-prob is that at temperature 1.
        ({"temperature": 0.0, "top_k": 1}, [0.5, 0.25, 0.125, 0.125]),
    ],
)
def test_distributions(settings, expected):
    probs = distributions(LOGITS, rows(1, **settings)).exp()
    assert torch.allclose(probs, torch.tensor([expected], dtype=torch.float32), atol=1e-6)


def test_the_inverse_of_the_cumulative_distribution():
    # Cumulative 0.5, 0.75, 0.875, 1: each uniform falls into the token whose interval holds it.
    uniform = [0.0, 0.49, 0.51, 0.74, 0.76, 0.88, 1 - 2**-53]
    tokens, logprobs = sample(LOGITS.repeat(7, 1), rows(7, uniform=uniform))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 3, 3]
    expected = [math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.125)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_impossible_tokens_are_never_sampled():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    tokens, logprobs = sample(logits.repeat(101, 1), rows(101))
    assert set(tokens.tolist()) == {1, 3}
    assert torch.allclose(logprobs, torch.tensor(math.log(0.5)).expand(101))


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 0.0, 0.0]])
    tokens, logprobs = sample(logits, rows(2, temperature=0.0))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_not_a_number_shows_in_the_logprob_of_its_row_only():
    logits = torch.zeros(2, 4)
    logits[1, 2] = torch.nan
    _, logprobs = sample(logits, rows(2))
    assert logprobs.isfinite().tolist() == [True, False]


@given(st.integers(0, 2**32), st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=1, max_size=6), st.data())
@settings(max_examples=50, deadline=None)
def test_a_row_does_not_depend_on_the_others(seed, temperatures, data):
    n = len(temperatures)
    logits = torch.randn(n, 11, generator=torch.Generator().manual_seed(seed)) * 3
    top_p = data.draw(st.lists(st.sampled_from([0.2, 0.9, 1.0]), min_size=n, max_size=n))
    top_k = data.draw(st.lists(st.sampled_from([0, 1, 3]), min_size=n, max_size=n))
    together = rows(n, temperature=temperatures, top_p=top_p, top_k=top_k)
    tokens, logprobs = sample(logits, together)
    for i in range(n):
        alone = rows(1, temperature=temperatures[i], top_p=top_p[i], top_k=top_k[i], uniform=together.uniform[i])
        token, logprob = sample(logits[i : i + 1], alone)
        assert token.item() == tokens[i].item()
        assert logprob.item() == pytest.approx(logprobs[i].item(), abs=1e-6)


@given(st.integers(0, 2**32), st.sampled_from([0.5, 1.0, 1.7]), st.sampled_from([0.3, 0.8, 1.0]), st.integers(0, 12))
@settings(max_examples=50, deadline=None)
def test_what_is_kept_is_the_smallest_set_and_sums_to_one(seed, temperature, top_p, top_k):
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(seed)) * 2
    probs = distributions(logits, rows(1, temperature=temperature, top_p=top_p, top_k=top_k)).double().exp()[0]
    full = (logits.double() / temperature).softmax(-1)[0]
    kept = probs > 0
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)
    assert torch.allclose(probs[kept], full[kept] / full[kept].sum(), atol=1e-5)
    assert full[kept].min() >= (full[~kept].max() if (~kept).any() else 0)
    assert kept.sum() <= (top_k or 10)
    best = full.sort(descending=True).values[: top_k or 10]
    best = best / best.sum()
    assert best[: kept.sum() - 1].sum() < top_p + 1e-6


def test_samples_follow_the_distribution():
    # Chi-squared of 20,000 draws over 4 tokens: 3 degrees of freedom, 0.999 quantile 16.3.
    n = 20_000
    uniform = uniforms(np.full(n, request_key(7)), np.arange(n))
    tokens, _ = sample(LOGITS.repeat(n, 1), rows(n, uniform=uniform))
    counts = np.bincount(tokens.numpy(), minlength=4)
    expected = n * np.array([0.5, 0.25, 0.125, 0.125])
    assert ((counts - expected) ** 2 / expected).sum() < 16.3


def test_uniforms_of_neighbouring_seeds_and_places_are_independent():
    keys = np.array([request_key(s) for s in range(300)])
    grid = np.stack([uniforms(keys, np.full(300, place)) for place in range(300)])
    assert grid.min() >= 0
    assert grid.max() < 1
    assert grid.mean() == pytest.approx(0.5, abs=4 / math.sqrt(12 * grid.size))
    # Correlation of 90,000 pairs has a standard error of 1/300.
    for left, right in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / 300


def test_uniforms_are_those_of_splitmix64():
    # From state 0 the generator gives 0xE220A8397B1DCDAF first, then 0x6E789E6AA1B965F4.
    got = uniforms(np.zeros(2, np.uint64), np.array([0, 1]))
    assert got.tolist() == [(0xE220A8397B1DCDAF >> 11) / 2**53, (0x6E789E6AA1B965F4 >> 11) / 2**53]


@given(st.integers(), st.integers())
def test_any_integer_is_a_seed(left, right):
    if left % 2**64 != right % 2**64:
        assert request_key(left) != request_key(right)
