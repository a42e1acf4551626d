"""Grouping of texts by similarity."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher


def similar_clusters(texts: Sequence[str], threshold: float) -> list[int]:
    """Cluster number of each text: the first cluster whose first member is similar by `threshold`.

    Likeness is `difflib.SequenceMatcher(None, text, first member).ratio()`, in [0, 1]. It is computed only where an
    upper bound, which is cheaper by far, does not rule it out: once per text and cluster.
    """
    first_members: list[_FirstMember] = []
    known: dict[str, int] = {}
    for text in texts:
        if text in known:
            continue
        for number, member in enumerate(first_members):
            if member.is_like(text, threshold):
                known[text] = number
                break
        else:
            known[text] = len(first_members)
            first_members.append(_FirstMember(text))
    return [known[text] for text in texts]


class _FirstMember:
    """A text that others are compared with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matcher: SequenceMatcher[str] | None = None  # dear to make, and seldom needed
        self.places: dict[str, int] = {}  # bit i of a character's number says whether it is the text's i-th
        for i, character in enumerate(text):
            self.places[character] = self.places.get(character, 0) | 1 << i

    def is_like(self, text: str, threshold: float) -> bool:
        """True if the similarity ratio of `text` to the member is at least `threshold`."""
        if not self._has_in_common(text, threshold):
            return False
        if self.matcher is None:
            self.matcher = SequenceMatcher(None, "", self.text)
        self.matcher.set_seq1(text)
        return self.matcher.ratio() >= threshold

    def _has_in_common(self, text: str, threshold: float) -> bool:
        """True if the longest common subsequence is long enough: an upper bound of what `difflib` matches.

        A column of the table of common subsequences is the bits of one number (Hyyrö, Bit-parallel LCS-length
        computation revisited, 2004): 0 where the length grows. Stops as soon as too much is missing.
        """
        n, m = len(self.text), len(text)
        if n + m and 2.0 * min(n, m) / (n + m) < threshold:
            return False
        every = (1 << n) - 1
        column, places = every, self.places
        for i, character in enumerate(text, start=1):
            hit = column & places.get(character, 0)
            column = (column + hit) | (column - hit)
            if i % 16 == 0 or i == m:
                common = n - (column & every).bit_count()
                if 2.0 * (common + m - i) / (n + m) < threshold:
                    return False
        return True
