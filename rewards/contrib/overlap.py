"""ROUGE and BLEU of an answer, by the libraries that papers quote."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from rewards.answers.extract import after_thinking
from rlhf.data import Verdict
from rlhf.settings import STRICT

#: ROUGE-L is quadratic in the number of words.
_MAX_TEXT = 20_000


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Rouge:
    """ROUGE of an answer against its reference, between 0 and 1, by Google's `rouge-score`.

    "the cat sat" for "the cat sat down", ROUGE-L: precision 3/3, recall 3/4, F 6/7 = .857143.
    """

    variant: Literal["rouge1", "rouge2", "rougeL"] = "rougeL"
    """Single words, pairs of words, or the longest common subsequence of words."""
    measure: Literal["f", "recall", "precision"] = "f"
    """Measure of overlap."""
    stem: bool = False
    """Stem words, so that `cats` is `cat`; English only."""

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge a text; never raises."""
        return Verdict(self.score(after_thinking(answer), reference), why=f"{self.variant} {self.measure}")

    def score(self, text: str, reference: str) -> float:
        """Return the number for two texts, of which the first 20,000 characters count."""
        if text.strip() and text == reference:
            return 1.0  # also where it has no word that the library knows
        found = _rouge(self.variant, self.stem).score(reference[:_MAX_TEXT], text[:_MAX_TEXT])[self.variant]
        return float(found.fmeasure if self.measure == "f" else getattr(found, self.measure))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Bleu:
    """BLEU of an answer against its reference, between 0 and 1, by `sacrebleu` (sentence BLEU, effective order)."""

    max_order: Literal[1, 2, 3, 4] = 4
    """The longest n-grams that count."""

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge a text; never raises."""
        text = after_thinking(answer)
        if text.strip() and text == reference:
            return Verdict(1.0, why="equal")
        score = _bleu(self.max_order).sentence_score(text[:_MAX_TEXT], [reference[:_MAX_TEXT]]).score
        return Verdict(min(float(score) / 100, 1.0), why=f"BLEU {score:.1f}")


@cache
def _rouge(variant: str, stem: bool) -> Any:
    from rouge_score import rouge_scorer

    return rouge_scorer.RougeScorer([variant], use_stemmer=stem)


@cache
def _bleu(max_order: int) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(effective_order=True, max_ngram_order=max_order)
