"""Verifier of mathematical answers, in whatever form they are written."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers import extract
from rewards.answers.math_compare import of_choice, quick
from rewards.answers.math_numbers import close, money
from rewards.answers.math_text import normal
from rewards.worker_pool import Pool, RaisedError, TooSlow
from rlhf.data import Verdict
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Maths:
    r"""1 if the answer equals the reference as mathematics, else 0.

    The answer is looked for in the text (`where`); the reference is the answer, alone, boxed or behind `####`. Compared
    are numbers exactly (a decimal with six significant digits may be rounded), lists and sets without order, points and
    matrices with it, intervals with their brackets, inequalities as intervals, equations up to a factor, words without
    case, and everything else by computer algebra (math-verify and sympy) in processes that are killed at `limit_s`:
    an answer on which the algebra does not end is wrong. Several boxes in one breath are a list; else the last counts.
    Of a reference with its choice, `(B) 12`, the letter or the value is right.

    It may be called from any thread. `docs/rewards.md` counts its errors on the suite of `rewards/suites/math.jsonl`.
    """

    where: extract.Where = "auto"
    r"""Place of the answer: `boxed`, `tag` (`<answer>`), `phrase` ("the answer is"), `last_number`, `whole`, or `auto`,
    the first of tag, box, phrase, whole text, last formula, last sentence and last number that is there."""
    limit_s: Annotated[float, Field(gt=0, le=60)] = 3.0
    """Processor seconds of the algebra for one answer."""

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge a text. Raises MissingPackageError without math-verify, RewardError without worker processes."""
        wanted = extract.boxed(reference) or reference.rpartition("####")[2].strip()
        if answer.strip() == reference.strip() != "":
            return Verdict(1.0, why="the reference itself")
        found = extract.find(answer, self.where)
        if found is None:
            return Verdict(0.0, why="no answer found")
        if len(wanted) > extract.MAX_ANSWER:
            return Verdict(0.0, why="the reference is too long to compare with")
        ours, theirs = normal(found), normal(wanted)
        amount, of = money(found, ours), money(wanted, theirs)
        if amount is not None and of is not None:
            is_right = not amount.is_of_another_currency(of) and close(amount.value, of.value, amount, of)
            return _verdict(is_right, found, wanted)
        decided = quick(*of_choice(ours, theirs))
        if decided is not None:
            return _verdict(decided, found, wanted)
        try:
            return _verdict(_pool().call(found, wanted, limit_s=self.limit_s), found, wanted)
        except TooSlow as error:
            return Verdict(0.0, why=f"{found[:80]!r} cannot be compared: {error}")
        except RaisedError as error:
            return Verdict(0.0, why=f"{found[:80]!r} cannot be compared: {error.got}")


def _verdict(right: bool, found: str, wanted: str) -> Verdict:
    return Verdict(float(right), why=f"{found[:80]!r} is {'' if right else 'not '}{wanted[:80]!r}")


@cache
def _pool() -> Pool:
    return Pool("rewards.answers.math_algebra:judge")
