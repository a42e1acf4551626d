"""Two ways to look for texts: by their words, and by vectors."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlhf.errors import MissingPackageError, StoreError

Vector = NDArray[np.float32]

_WORD = re.compile(r"\w+")


class Encoder(Protocol):
    """Makes vectors of texts.

    Attributes:
        name: says which encoder it is; a store never compares vectors of two of them.
    """

    name: str

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return `[N, D]`, one row per text."""
        ...


def tokenize(text: str) -> list[str]:
    """The words of a text in lower case, in order."""
    return _WORD.findall(text.lower())


def in_common(one: str, other: str) -> float:
    """Word overlap of two texts, |A ∩ B| / |A ∪ B|; 0 where there are none."""
    a, b = set(tokenize(one)), set(tokenize(other))
    return len(a & b) / max(len(a | b), 1)


class Words:
    """The words of texts, made ready for `by_words` with many queries."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._found = list(map(tokenize, texts))
        self._known = frozenset[str]().union(*self._found)
        self._scores_of: Any = None

    def nearest(self, query: str, k: int) -> list[tuple[int, float]]:
        """See `by_words`."""
        asked = [word for word in tokenize(query) if word in self._known]
        if not asked:
            return []
        if self._scores_of is None:
            scores_of = _bm25s().BM25(method="lucene", k1=1.2, b=0.75)
            scores_of.index(self._found, show_progress=False)
            self._scores_of = scores_of
        scores = self._scores_of.get_scores(asked).tolist()
        # Sums of small floats differ in the last digits with the order of words.
        ranked = sorted((-round(score, 4), i) for i, score in enumerate(scores) if score > 0)
        return [(i, -negative) for negative, i in ranked[:k]]


def by_words(query: str, texts: Sequence[str], k: int) -> list[tuple[int, float]]:
    """Return the `k` best texts that share a word with `query`, as (number, BM25 score), best first.

    Lucene's BM25 with k1 = 1.2 and b = 0.75, words in lower case, no stemming. Of equal scores the earlier text comes
    first. Nothing is found among no texts, or for no known word.

    Raises:
        MissingPackageError: bm25s is not installed.
    """
    return Words(texts).nearest(query, k)


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


def _bm25s() -> Any:
    try:
        return importlib.import_module("bm25s")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "a package is not installed",
            where="agents.stores.search",
            got=f"no module named {error.name}",
            expected="the extra 'search'",
            hint="pip install 'rlhf-agents[search]'",
        ) from error
