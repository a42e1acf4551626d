"""Answers to questions, compared as the benchmarks do: exact match and F1 of words after normalisation."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from rewards.answers import extract
from rlhf.data import Verdict
from rlhf.settings import STRICT

_MARKS = str.maketrans("", "", string.punctuation)


def normal(text: str) -> str:
    """Normalised answer as SQuAD's script: lower case, no ASCII punctuation, articles or repeated spaces."""
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_MARKS)).split())


def _compared(text: str) -> str:
    """Normalised answer; of one that has nothing but articles its words, of one that has no words its marks."""
    return normal(text) or " ".join(text.lower().translate(_MARKS).split()) or text.strip()


def references(reference: str) -> list[str]:
    """Return the answers that count: those of a JSON list of texts, else the reference alone."""
    if reference.lstrip().startswith("["):
        try:
            listed = json.loads(reference)
        except (ValueError, RecursionError):
            return [reference]
        if isinstance(listed, list) and listed and all(isinstance(x, str) for x in listed):
            return listed
    return [reference]


def exact(answer: str, reference: str) -> bool:
    """Exact match with one of the references after normalisation; an empty answer equals none."""
    said = _compared(answer)
    return bool(said) and any(said == _compared(text) for text in references(reference))


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words; the best over the references.

    "the red big ball" for "a red ball": 2 of 3 words are right, both of 2 are found, so 2·(2/3)·1/(2/3 + 1) = .8.
    """
    said = _compared(answer).split()
    return max(_f1(said, _compared(text).split()) for text in references(reference))


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class QuestionAnswer:
    """Exact match or word F1 of an answer with its reference, or the best of a JSON list.

    Both are lower-cased and lose punctuation and articles before they are compared, as in SQuAD.
    """

    inline: ClassVar[bool] = True

    metric: Literal["exact", "f1"] = "exact"
    """`exact` gives 0 or 1; `f1` gives part marks."""
    where: extract.Where = "auto"
    """Place of the answer; `whole` takes all of the text. `auto` takes tags, a box or what follows "the answer is",
    else all of the text. What follows a phrase ends with its sentence; for `exact` the rest of the line counts too, as
    names have commas and full stops."""

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge a text; never raises."""
        found = self._found(answer)
        value = f1(found[0], reference) if self.metric == "f1" else float(any(exact(x, reference) for x in found))
        return Verdict(value, why=f"{found[0][:60]!r} for {reference[:60]!r}")

    def _found(self, answer: str) -> list[str]:
        """Text of the answer; of one behind a phrase its sentence, and all of its line."""
        if self.where not in ("auto", "phrase"):
            return [extract.find(answer, self.where) or ""]
        text = extract.after_thinking(answer)
        found = (extract.tagged(text) or extract.boxed(text)) if self.where == "auto" else None
        if found is None and (sentence := extract.after_phrase(text)) is not None:
            return [sentence, extract.after_phrase(text, to="line") or ""]
        return [found or (text[-extract.MAX_ANSWER :] if self.where == "auto" else "")]
