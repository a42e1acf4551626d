"""Verifier of multiple-choice answers."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers import extract
from rewards.answers.denial import without_denied
from rlhf.data import Verdict
from rlhf.settings import STRICT

#: Choices one beside another: `A or B`, `(A), (B) and C`; not `B, I think`.
_LISTED = re.compile(r"\(?\b[A-Z]\b\)?(?:(?:,|/|\s+or|\s+and)+\s*\(?(?:[A-HJ-Z]|I(?!\s+[a-z]))\b\)?)+")
_ALONE = re.compile(r"(?<![\w'])\(?\**([A-Za-z])\**(?:\)|(?![\w']))")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MultipleChoice:
    r"""1 if the answer names the reference's letter and no other, else 0.

    The letter is looked for in tags, a box, behind "the answer is" or "option", or in a text that begins with it, as in
    `B`, `(B)`, `b.` and `B) because ...`; else the only letter of the choices that stands alone, in upper case, in the
    last line. "A or B" and "AB" name two, and are wrong. A letter that is denied (`rewards.answers.denial`) is not
    named: "The
    answer is not B" names none, "A, not B" names A.
    """

    inline: ClassVar[bool] = True
    examples: ClassVar[tuple[tuple[str, str], ...]] = (("The answer is (B).", "B"), ("C) 5", "(C)"))

    n_choices: Annotated[int, Field(ge=2, le=26)] = 5
    """Number of choices, from A on; more where the reference is one of the letters after."""

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge a text; never raises."""
        wanted = extract.boxed(reference) or reference
        alone = re.fullmatch(r"\W*([A-Za-z])\W*", wanted)
        n = max(self.n_choices, ord(alone[1].upper()) - ord("A") + 1 if alone else 0)
        right, said = self.letters(wanted, n), self.letters(self._found(without_denied(answer)), n)
        named = "".join(sorted(said)) or "no choice"
        return Verdict(float(len(said) == 1 and said == right), why=f"names {named}, not {reference[:20]}"[:80])

    def letters(self, text: str, n: int | None = None) -> set[str]:
        """Return the letters that a short text names, among the first `n`, or `n_choices`."""
        text = re.sub(r"\\text(?:bf|it|rm)?\s*\{([^{}]*)\}|[$*]", r"\1", text).strip()
        text = re.sub(r"^(?:option|choice)\s+(?=\(?[A-Za-z]\b)", "", text, flags=re.IGNORECASE)
        head = re.match(r"\(?([A-Za-z])(?:\)|[.:](?=\s|$))\s*(?!or\b|and\b)", text)
        head = head or re.match(r"([A-Z])\s+(?:\((?![A-Z]\))|[-–—]\s+(?![A-Z]\b))", text)
        if head is not None and (len(text) > 8 or not _ALONE.search(text, head.end())):
            found = [head[1]]
        else:
            found = [m[1] for m in _ALONE.finditer(text) if m[1].isupper() or len(text) <= 3]
            found += list(text) if re.fullmatch(r"[A-Z]{2,5}", text) else []
        last = chr(ord("A") + (n or self.n_choices) - 1)
        names = {letter.upper() for letter in found if letter.upper() <= last}
        # "A" and "I" are words too: in longer texts they count only beside another choice, or where no other stands.
        listed = {letter for match in _LISTED.finditer(text) for letter in re.findall(r"\b[A-Z]\b", match[0])}
        words = {"A", "I"} - listed
        return names - words or names if len(text) > 20 else names

    def _found(self, answer: str) -> str:
        text = extract.after_thinking(answer)
        inner = extract.tagged(text) or extract.boxed(text) or extract.after_phrase(text)
        if inner is not None:
            return inner
        options = re.findall(
            r"\b(?:option|choice)[ \t]*(?:is|:)?[ \t]*\(?\**([A-Za-z])\b", text[-2_000:], re.IGNORECASE
        )
        if options:
            return str(options[-1])
        head = re.match(r"\s*\(?[A-Za-z](?:[).:]|\s*\Z)", text)
        return text.strip()[:200] if head else text.strip().rpartition("\n")[2][-200:]
