"""Ranked search in a handful or in millions of texts: BM25, by bm25s, with ties told apart.

The library adds up scores; which of two texts with one score comes first is settled here, by their order, so that a
search gives one list in any process.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence

from environments.packages import import_from

_WORD = re.compile(r"\w+")


def tokenize(text: str) -> list[str]:
    """Lower-case words of a text, without stemming or stop words."""
    return _WORD.findall(text.lower())


def installed() -> str:
    """Name and version of the library, for the run's record; empty where it is not installed."""
    try:
        return f"bm25s {importlib.metadata.version('bm25s')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


class Index:
    """Texts to search in. Raises MissingPackageError where bm25s is not installed."""

    def __init__(self, texts: Sequence[str]) -> None:
        found = [tokenize(text) for text in texts]
        self._known = {word for text in found for word in text}
        self._n = len(texts)
        self._scores = import_from("bm25s", "bm25s", "search").BM25(method="lucene", k1=1.2, b=0.75)
        if self._known:
            self._scores.index(found, show_progress=False)

    def best(self, query: str, n: int | None = None) -> list[int]:
        """Return the numbers of the `n` texts that match best, or of all that match, best first.

        A text matches if it has a word of the query. Of equal scores the earlier text comes first.
        """
        asked = [word for word in tokenize(query) if word in self._known]
        if not asked:
            return []
        scores = self._scores.get_scores(asked).tolist()
        # Sums of small floats differ in the last digits with the order of words.
        ranked = sorted((-round(score, 4), i) for i, score in enumerate(scores) if score > 0)
        return [i for _, i in ranked[:n]]
