"""Re-ranker of entries trained by REINFORCE on their use: scores, sampling, gradient.

Pure functions. Vectors are hashed bags of words, so that nothing is loaded and equal texts are equal vectors anywhere.

Source: RMM, arXiv 2503.08026.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rlhf.text_search import tokenize

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Learnt weights of the reranker.

    Attributes:
        query: W_q, `[D, D]`.
        entry: W_m, `[D, D]`.
    """

    query: Array
    entry: Array

    @classmethod
    def nothing(cls, dim: int) -> Weights:
        """Before anything is learnt: the order is that of the vectors."""
        return cls(np.zeros((dim, dim)), np.zeros((dim, dim)))

    def after(self, step: Weights, lr: float) -> Weights:
        """W + lr · step."""
        return Weights(self.query + lr * step.query, self.entry + lr * step.entry)


def vector(text: str, dim: int) -> Array:
    """Hashed bag of words `[D]`, signed and of length 1; 0 for no words."""
    found = np.zeros(dim)
    for word in tokenize(text):
        code = crc32(word.encode("utf-8", "ignore"))
        found[code % dim] += 1.0 if code >> 31 else -1.0
    length = float(np.linalg.norm(found))
    return found / length if length else found


def scores(weights: Weights, query: Array, entries: Array) -> Array:
    """Scores `[K]` of entries `[K, D]` for a query `[D]`.

    s_i = q′ · m′_i with q′ = q + W_q q and m′_i = m_i + W_m m_i.
    """
    found: Array = (entries + entries @ weights.entry.T) @ (query + weights.query @ query)
    return found


def draw(values: Sequence[float], k: int, tau: float, seed: str) -> list[int]:
    """The numbers of `k` values, in order.

    The highest of s + τ g with g = −log(−log u), which is a draw without putting back by softmax(s / τ) of what is
    left; at τ = 0 the highest s, the earlier of equal ones.
    """
    rng = random.Random(seed)
    noise = [-log(-log(min(max(rng.random(), 1e-300), 1 - 1e-16))) for _ in values] if tau else [0.0] * len(values)
    perturbed = [value + tau * g for value, g in zip(values, noise, strict=True)]
    return sorted(range(len(values)), key=lambda i: (-perturbed[i], i))[:k]


def gradient(
    weights: Weights,
    query: Array,
    entries: Array,
    order: Sequence[int],
    rewards: Sequence[float],
    *,
    tau: float,
    baseline: float,
) -> Weights:
    """REINFORCE gradient Σ_j (Σ_{l≥j} (R_l − b)) ∇ log p_j, an unbiased estimate of ∇ E[Σ_l R_l].

    A draw has no part in the rewards of those before it, so each counts what came with it and after it.

    Args:
        weights: that the draw was made with.
        query: `[D]`.
        entries: `[K, D]` all that could be drawn.
        order: what was drawn, numbers of `entries`.
        rewards: of each that was drawn, in order.
        tau: τ of the draw, above 0.
        baseline: b.
    """
    moved_query, moved = query + weights.query @ query, entries + entries @ weights.entry.T
    values = moved @ moved_query
    still = np.cumsum((np.asarray(rewards, dtype=np.float64) - baseline)[::-1])[::-1]
    of_scores, left = np.zeros(len(values)), np.ones(len(values), dtype=bool)  # Σ_j A_j ∂ log p_j / ∂ s
    for chosen, advantage in zip(order, still, strict=True):
        odds = np.where(left, np.exp((values - values[left].max()) / tau), 0.0)
        of_scores -= advantage / tau * odds / odds.sum()
        of_scores[chosen] += advantage / tau
        left[chosen] = False
    of_query, of_entry = np.outer(of_scores @ moved, query), np.outer(moved_query, of_scores @ entries)
    return Weights(of_query.astype(np.float64), of_entry.astype(np.float64))
