"""Ranked search in a handful or in millions of texts: Lucene's BM25, by bm25s, with ties told apart.

The library adds up scores; which of two texts with one score comes first is settled here, by their order, so that a
search gives one list in any process.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any

from rlhf.extras import import_optional

_WORD = re.compile(r"\w+")


def tokenize(text: str) -> list[str]:
    """The words of a text in lower case, in order, without stemming or stop words."""
    return _WORD.findall(text.lower())


def installed() -> str:
    """Name and version of the library, for the run's record; empty where it is not installed."""
    try:
        return f"bm25s {importlib.metadata.version('bm25s')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


class Index:
    """Texts to search in, by BM25 with k1 = 1.2 and b = 0.75; the first search that needs the library loads it."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._found = list(map(tokenize, texts))
        self._known = frozenset[str]().union(*self._found)
        self._scores: Any = None

    def require(self) -> Index:
        """Load the library now. Raises MissingPackageError where it is not installed."""
        found = self._found  # empty only once there are scores
        if self._scores is None:
            bm25s = import_optional("bm25s", "search", "a package is not installed", "rlhf.text_search")
            scores = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
            if self._known:
                scores.index(found, show_progress=False)
            self._scores, self._found = scores, []
        return self

    def scored(self, query: str, n: int | None = None) -> list[tuple[int, float]]:
        """Return the `n` texts that match best, or all that match, as (number, score), best first.

        A text matches if it has a word of the query. Of equal scores the earlier text comes first.

        Raises:
            MissingPackageError: bm25s is not installed.
        """
        asked = [word for word in tokenize(query) if word in self._known]
        if not asked:
            return []
        scores = self.require()._scores.get_scores(asked).tolist()
        # Sums of small floats differ in the last digits with the order of words.
        ranked = sorted((-round(score, 4), i) for i, score in enumerate(scores) if score > 0)
        return [(i, -negative) for negative, i in ranked[:n]]

    def best(self, query: str, n: int | None = None) -> list[int]:
        """Numbers of the texts of `scored`."""
        return [i for i, _ in self.scored(query, n)]
