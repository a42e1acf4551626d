"""Penalties for how something is said: over and over, or in another language than asked for."""

from __future__ import annotations

import unicodedata
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers.text import everything_said
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT


def repeated(text: str, n: int) -> float:
    """1 − distinct/all of the runs of `n` words; 0 where there is none.

    "a b a b a b" has the pairs ab, ba, ab, ba, ab: 2 of 5 distinct, .6 repeated.
    """
    words = text.casefold().split()
    runs = list(zip(*(words[i:] for i in range(n)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Repetition:
    """Repetition penalty: −`penalty` times the share of repeated `n`-grams of words.

    Source: Demystifying Long Chain-of-Thought Reasoning, arXiv 2502.03373, as a share of the whole text.
    """

    is_penalty: ClassVar[bool] = True
    inline: ClassVar[bool] = True

    n: Annotated[int, Field(ge=1, le=100)] = 20
    """Words of a run. Small ones punish ordinary language."""
    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Penalty of a text that only repeats itself."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Look at all replies, thoughts included; never raises."""
        share = repeated(everything_said(trajectory), self.n)
        return Verdict(-self.penalty * share, why=f"{share:.1%} of the runs of {self.n} words were said before")


Script = Literal["latin", "cyrillic", "greek", "arabic", "hebrew", "devanagari", "thai", "hangul", "han", "japanese"]
#: How the names of a script's letters begin in Unicode.
_NAMES: dict[str, tuple[str, ...]] = {
    "han": ("CJK",),
    "japanese": ("CJK", "HIRAGANA", "KATAKANA"),
}


def in_script(text: str, script: str) -> float:
    """Share of the letters of `text` that belong to `script`; 1 where it has none. "Да, yes": 2 of 5 are Cyrillic."""
    starts = _NAMES.get(script, (script.upper(),))
    letters = [c for c in text if c.isalpha()]
    known = {c: unicodedata.name(c, "").replace("FULLWIDTH ", "").startswith(starts) for c in set(letters)}
    return sum(known[c] for c in letters) / len(letters) if letters else 1.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LanguageConsistency:
    """Share of letters in the script of the language, or the missing share as a penalty.

    By script, which is what a policy that mixes languages changes; English and French are the same to it. A share of
    `min_share` is worth 1, so that names and quotations cost nothing.

    Source: DeepSeek-R1, arXiv 2501.12948, which counts words of the target language.
    """

    inline: ClassVar[bool] = True

    script: Script = "latin"
    """The script of the language."""
    min_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share from which on nothing is missing."""
    penalty: bool = False
    """Give the value minus 1: 0 for the right script, −1 for another throughout."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict:
        """Look at all replies, thoughts included; never raises."""
        share = in_script(everything_said(trajectory), self.script)
        value = min(share / self.min_share, 1.0)
        return Verdict(value - self.penalty, why=f"{share:.1%} of the letters are {self.script}")
