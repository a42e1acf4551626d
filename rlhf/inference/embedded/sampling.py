"""Sampling of one token per row, reproducible whatever else is in the batch, with exact log-probs.

Randomness is counter-based: the uniform number behind a token is a hash of (seed of the request, place of the token),
so no generator has a state that other requests could move. The token is found by inverting the cumulative
distribution in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

#: Increment and multipliers of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of each row of a batch; all `[N]`.

    Attributes:
        temperature: 0 is greedy.
        top_p: in (0, 1]; 1 keeps all.
        top_k: 0 keeps all.
        uniform: in [0, 1), see `uniforms`.
    """

    temperature: Floats
    top_p: Floats
    top_k: Ints
    uniform: Floats


def request_key(seed: int) -> np.uint64:
    """Hash a request's seed to its key: any integer seed, neighbouring seeds far apart."""
    return np.uint64(_mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64))[0])


def uniforms(keys: Keys, places: Ints) -> Floats:
    """Uniform numbers in [0, 1) with 53 random bits, one for each (request key, token place), `[N]`."""
    bits = _mix(keys + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: Keys) -> Keys:
    """SplitMix64 finaliser: a bijection of 64-bit integers in which each input bit flips half the output."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits: `[N, V]`, any float dtype; computed with in float32.
        rows: settings of the N rows.

    Returns:
        Token ids int64 `[N]` and their log-probs float32 `[N]` in nats: of the distribution sampled from, that is
        log_softmax(logits / temperature) renormalised over what top-k and then top-p keep. A greedy row (temperature
        0) has the log-prob of its token at temperature 1, since that of its point mass is always 0 and tells nothing.
        Rows with NaN in their logits have NaN as log-prob.
    """
    logp = distributions(logits, rows)
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    uniform = torch.from_numpy(rows.uniform).to(logits.device)[:, None]
    # u < 1 keeps the product below the last entry; the first entry above it has positive probability.
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_(max=logits.shape[1] - 1)
    greedy = rows.temperature == 0
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(logits.device)[:, None], logp.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logp.gather(-1, tokens)[:, 0]


def distributions(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Log-probs `[N, V]` float32 after temperature, top-k and top-p; -inf where a token is cut off."""
    scores = logits.float()
    greedy = rows.temperature == 0
    temperature = np.where(greedy, 1.0, rows.temperature)
    if (temperature != 1.0).any():
        # The largest score becomes 0 first, so that a tiny temperature overflows to -inf and never to NaN.
        scores = scores - scores.amax(-1, keepdim=True)
        scores = scores / torch.from_numpy(temperature.astype(np.float32)).to(logits.device)[:, None]
    logp = scores.log_softmax(-1)
    cut = np.flatnonzero(~greedy & ((rows.top_p < 1.0) | (rows.top_k > 0)))
    if len(cut):
        index = torch.from_numpy(cut).to(logits.device)
        logp[index] = _truncate(logp[index], rows.top_k[cut], rows.top_p[cut])
    return logp


def _truncate(logp: Tensor, top_k: Ints, top_p: Floats) -> Tensor:
    """Keep the k likeliest tokens, of these the smallest set with probability p, and renormalise; `[M, V]`.

    Ties go to the lower id. At least one token stays.
    """
    n_vocab = logp.shape[1]
    ordered, order = logp.sort(dim=-1, descending=True, stable=True)
    k = torch.from_numpy(np.where(top_k > 0, top_k, n_vocab)).to(logp.device)[:, None]
    ordered = ordered.masked_fill(torch.arange(n_vocab, device=logp.device) >= k, -torch.inf)
    probs = ordered.double().softmax(-1)
    before = probs.cumsum(-1) - probs
    p = torch.from_numpy(top_p).to(logp.device)[:, None]
    ordered = ordered.masked_fill((before >= p) & (p < 1), -torch.inf)
    return torch.full_like(logp, -torch.inf).scatter(-1, order, ordered).log_softmax(-1)
