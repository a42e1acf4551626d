"""Verifier of numeric answers, within a tolerance."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers import extract, math_numbers
from rewards.answers.math_compare import of_choice
from rewards.answers.math_text import normal
from rlhf.data import Verdict
from rlhf.settings import STRICT

_Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Numeric:
    """1 if |answer − reference| ≤ max(`abs_tol`, `rel_tol` · |reference|), else 0; of plain numbers only.

    Numbers are read exactly: 1,234.5, −3/4, 1½, 2.5e3, 50 %. Units that are known are converted, others have to be the
    same, and one that only one side has is left out. A percentage is the number it stands for, or that number without
    its sign where the other side has none. With `rel_tol: 0.01`, 99 is 100 and 98.9 is not. Of a sentence the last
    number counts, unless it is denied or one of several: "not 7", "12 or 13". Of a reference with its choice, `(B) 12`,
    the value counts.
    """

    inline: ClassVar[bool] = True
    examples: ClassVar[tuple[tuple[str, str], ...]] = (("The answer is 1,000.", "1000"), ("3/4", "0.75"))

    where: extract.Where = "auto"
    """Place of the answer, as for `math`."""
    rel_tol: _Tolerance = 1e-6
    """Share of the reference that the answer may be off."""
    abs_tol: _Tolerance = 0.0
    """Absolute tolerance; needed where references are 0."""

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge a text; never raises."""
        found = extract.find(answer, self.where)
        said, right = of_choice(normal(found or ""), normal(extract.boxed(reference) or reference))
        number = math_numbers.read(said) if said else None
        if number is None and said and found and (last := extract.only_number(found)):
            number = math_numbers.read(normal(last))
        wanted = math_numbers.read(of_choice("", right)[1])
        if number is None or wanted is None:
            return Verdict(0.0, why="no number in the answer" if wanted else "the reference is no number")
        if number.is_of_another_currency(wanted):
            return Verdict(0.0, why=f"in {number.currency}, not in {wanted.currency}")
        if number.unit and wanted.unit:
            value, target = math_numbers.in_one_unit(number, wanted)
            if value is None or target is None:
                return Verdict(0.0, why=f"in {number.unit[:20]}, not in {wanted.unit[:20]}")
            pairs = [(value, target)]
        else:
            pairs = math_numbers.readings(number, wanted)
        is_right = any(self._is_close(value, target) for value, target in pairs)
        return Verdict(float(is_right), why=f"{found[:60] if found else ''} against {reference[:60]}")

    def _is_close(self, value: Fraction, target: Fraction) -> bool:
        return abs(value - target) <= max(Fraction(self.abs_tol), Fraction(self.rel_tol) * abs(target))
