"""Ranking metrics of an ordered answer: NDCG, recall, reciprocal rank."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers import extract
from rlhf.data import Verdict
from rlhf.settings import STRICT

_MAX_ITEMS = 1_000
_BULLET = re.compile(r"^\s*(?:[-*•]|\(?\d{1,4}[.):]|\[\d{1,4}\])\s+")


def ndcg(ranked: Sequence[str], gains: Mapping[str, float], k: int | None = None) -> float:
    """NDCG: Σ g_i / log2(i + 1) over the first k, over that of the best order; repeats do not count.

    Gains 3, 2, 1 of a, b, c; ranked b, a, c: (2 + 3/1.584963 + 1/2) / (3 + 2/1.584963 + 1/2) = 4.392789 / 4.761860
    = .922495. No item with a gain: 0. Source: Järvelin and Kekäläinen, 2002, with linear gains.
    """
    best = _dcg(sorted(gains.values(), reverse=True)[:k])
    return _dcg([gains.get(item, 0.0) for item in ranked[:k]]) / best if best else 0.0


def _dcg(gains: Sequence[float]) -> float:
    return math.fsum(gain / math.log2(i + 2) for i, gain in enumerate(gains))


def recall(ranked: Sequence[str], gains: Mapping[str, float], k: int | None = None) -> float:
    """Recall: share of the items with a gain among the first k; 0 where there are none."""
    wanted = {item for item, gain in gains.items() if gain > 0}
    return len(wanted & set(ranked[:k])) / len(wanted) if wanted else 0.0


def reciprocal_rank(ranked: Sequence[str], gains: Mapping[str, float], k: int | None = None) -> float:
    """Reciprocal rank of the first item with a gain; 0 where none is among the first k."""
    places = [i for i, item in enumerate(ranked[:k], 1) if gains.get(item, 0) > 0]
    return 1 / places[0] if places else 0.0


def overlap(ranked: Sequence[str], gains: Mapping[str, float], k: int | None = None) -> float:
    """Rank-biased overlap with the order of the gains, by that of the best list: Σ_d p^(d−1) A_d, over as many depths.

    A_d is the share that the first d of both have in common. Gains 3, 2, 1 of a, b, c; ranked b, a, c, p = .9:
    (0 + .9 + .81) / (1 + .9 + .81) = .630996. Source: Webber, Moffat, Zobel, 2010, cut at the reference's length.
    """
    p = 0.9
    best = [item for item, gain in sorted(gains.items(), key=lambda pair: -pair[1]) if gain > 0][:k]
    shares = [len({*best[:d]} & {*ranked[:d]}) / d for d in range(1, len(best) + 1)]
    most = math.fsum(p**i for i in range(len(best)))
    return math.fsum(p**i * share for i, share in enumerate(shares)) / most if best else 0.0


_METRICS = {"ndcg": ndcg, "recall": recall, "reciprocal_rank": reciprocal_rank, "overlap": overlap}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ranking:
    """NDCG, recall, reciprocal rank or rank-biased overlap of a list of answers, best first.

    The answer is a JSON list, or one item a line (with or without numbers and bullets), or one line with commas, in
    tags, in a box or as the whole text. An item that is named again is left out. The reference is a JSON object of item
    to gain, or a list in the same forms, whose items have gain 1. Items are compared without case.
    ReasonRank, arXiv 2508.07050, adds NDCG, recall and overlap of the first 10, each with a weight: three of these in a
    recipe.
    """

    inline: ClassVar[bool] = True
    reads_reply: ClassVar[bool] = True

    metric: Literal["ndcg", "recall", "reciprocal_rank", "overlap"] = "ndcg"
    """Ranking metric; all are between 0 and 1."""
    k: Annotated[int, Field(ge=1)] | None = None
    """Number of answers that count; null counts all."""

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge a text; never raises."""
        text = extract.after_thinking(answer)
        ranked = items(extract.tagged(text) or extract.boxed(text) or text)
        value = _METRICS[self.metric](ranked, _gains(reference), self.k)
        return Verdict(
            min(max(value, 0.0), 1.0), why=f"{len(ranked)} items, first {ranked[0][:40]!r}" if ranked else "no items"
        )


def items(text: str) -> list[str]:
    """Return the items of a list in the order of their first mention."""
    listed = _json(text)
    if not isinstance(listed, list):
        lines = [_BULLET.sub("", line) for line in text.strip().splitlines() if line.strip()]
        listed = lines[0].split(",") if len(lines) == 1 else lines
    plain = (" ".join(str(x).split()).casefold().strip("`\"'") for x in listed[:_MAX_ITEMS])
    return list(dict.fromkeys(x for x in plain if x))


def _gains(reference: str) -> dict[str, float]:
    given = _json(reference)
    if isinstance(given, dict):
        found = {" ".join(str(k).split()).casefold(): v for k, v in given.items()}
        return {k: float(v) for k, v in found.items() if isinstance(v, int | float) and 0 <= v < 1e9}
    return dict.fromkeys(items(reference), 1.0)


def _json(text: str) -> object:
    try:
        return json.loads(text) if len(text) < extract.MAX_TEXT else None
    except (ValueError, RecursionError):
        return None
