"""Feature hashing: texts as vectors of hashed words and character trigrams, without a model."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

#: Characters that are read of a text, from its begin; what follows changes nothing.
MAX_CHARS = 10_000
#: Stands for a text in which there is nothing to read, so that two of them are alike.
_NOTHING = "\x00"


@lru_cache(maxsize=4096)
def embedded(text: str, dim: int) -> Vector:
    """Return the unit vector `[dim]` of a text: signed counts of its features, hashed, and divided by their length.

    v[h(f) mod dim] += ±1 for each feature f, the sign being another bit of the hash; then v / ‖v‖. Features are the
    words, and the runs of three characters, of the text in small letters with single spaces. The same text has the same
    vector in every process. Texts that share nothing have a cosine near 0, of either sign, about 1 / √dim in size. A
    text without anything to read has a vector of its own; so has one whose counts happen to cancel out.

    Source: feature hashing, Weinberger and others, arXiv 0902.2206.
    """
    counts = np.zeros(dim, np.float32)
    for feature in _features(text[:MAX_CHARS]):
        place = zlib.crc32(feature.encode("utf-8", "surrogatepass"))
        counts[(place >> 1) % dim] += 1 if place & 1 else -1
    if not counts.any():
        counts[zlib.crc32(_NOTHING.encode()) % dim] = 1
    vector: Vector = counts / np.float32(np.linalg.norm(counts))
    vector.flags.writeable = False  # it is shared
    return vector


def _features(text: str) -> Iterator[str]:
    words = " ".join(text.casefold().split())
    if not words:
        return
    yield from (f"word {word}" for word in re.findall(r"\w+", words))
    padded = f" {words} "
    yield from (padded[i : i + 3] for i in range(len(padded) - 2))
