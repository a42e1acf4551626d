"""Two ways to look for texts: by their words, and by vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlhf.errors import StoreError
from rlhf.text_search import Index, tokenize

Vector = NDArray[np.float32]


class Encoder(Protocol):
    """Makes vectors of texts.

    Attributes:
        name: says which encoder it is; a store never compares vectors of two of them.
    """

    name: str

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return `[N, D]`, one row per text."""


def in_common(one: str, other: str) -> float:
    """Word overlap of two texts, |A ∩ B| / |A ∪ B|; 0 where there are none."""
    a, b = set(tokenize(one)), set(tokenize(other))
    return len(a & b) / max(len(a | b), 1)


def by_words(query: str, texts: Sequence[str], k: int) -> list[tuple[int, float]]:
    """Return the `k` best texts that share a word with `query`, as (number, BM25 score), best first.

    Lucene's BM25 with k1 = 1.2 and b = 0.75, words in lower case, no stemming. Of equal scores the earlier text comes
    first. Nothing is found among no texts, or for no known word.

    Raises:
        MissingPackageError: bm25s is not installed.
    """
    return Index(texts).scored(query, k)


def by_vectors(query: Vector, vectors: Sequence[Vector], k: int) -> list[tuple[int, float]]:
    """Return the `k` vectors of the highest cosine with `query`, as (number, cosine), best first.

    Exact, over all of them: `[D]` against `[N, D]`. A vector of length 0 has cosine 0 with everything. Of equal
    cosines, to 6 digits, the earlier comes first.
    """
    if not vectors:
        return []
    matrix = np.stack(vectors).astype(np.float64)
    if matrix.shape[1] != query.shape[0]:
        raise StoreError(
            "the query vector differs in length from the stored vectors",
            where="agents.stores.search",
            got=f"{query.shape[0]} numbers",
            expected=f"{matrix.shape[1]}, as the store's encoder gives",
        )
    lengths = np.linalg.norm(matrix, axis=1) * np.linalg.norm(query.astype(np.float64))
    cosines = (matrix @ query.astype(np.float64)) / np.where(lengths > 0, lengths, np.inf)
    ranked = sorted((-round(float(cosine), 6), i) for i, cosine in enumerate(cosines))
    return [(i, -negative) for negative, i in ranked[:k]]
