"""Validation of the verdicts that rewards return."""

from __future__ import annotations

import math
from dataclasses import replace

from rlhf.data import Verdict
from rlhf.data.untrusted import cut, number, shown, slots, text
from rlhf.errors import RewardError

_EXPECTED = "a finite number, a Verdict, or a dictionary with a number `score`"


def checked_verdict(said: object, where: str, n_turns: int | None = None) -> Verdict:
    """Verdict of Python's own types from a reward's result; a long reason is cut.

    Of a dictionary, as functions for verl return, it is the entry `score`.

    Args:
        said: whatever a reward has returned.
        where: the reward.
        n_turns: turns that it was shown; None does not look at their number and sum.

    Raises:
        RewardError: it is neither a finite number nor a Verdict or a dictionary of such, or the values of the turns do
            not fit.
    """
    found = slots(said, Verdict, ("value", "why", "per_turn"))
    value, why, per_turn = found or (said.get("score", said) if type(said) is dict else said, "", None)
    total, reason = number(value), text(why)
    if total is None:
        raise RewardError("returned no finite number", where=where, got=shown(value), expected=_EXPECTED)
    if reason is None:
        raise RewardError("Verdict.why is not a text", where=where, got=shown(why), expected="a str")
    turns = None if per_turn is None else _turns(per_turn, total, where, n_turns)
    return Verdict(total, cut(reason), turns)


def _turns(values: object, total: float, where: str, n_turns: int | None) -> tuple[float, ...]:
    if type(values) is not tuple and type(values) is not list:
        raise RewardError("per_turn is no tuple", where=where, got=shown(values), expected="a number for each turn")
    if n_turns is not None and len(values) != n_turns:
        raise RewardError(
            "per_turn does not match the turns",
            where=where,
            got=f"{len(values)} values",
            expected=f"{n_turns} values",
        )
    turns = [number(value) for value in values]
    finite = tuple(turn for turn in turns if turn is not None)
    if len(finite) < len(turns):
        odd = values[turns.index(None)]
        raise RewardError("per_turn holds no finite number", where=where, got=shown(odd), expected="finite numbers")
    together = total_of(finite, where)
    if n_turns and not math.isclose(together, total, rel_tol=1e-6, abs_tol=1e-9):
        raise RewardError("per_turn does not sum to the value", where=where, got=f"{together:g}", expected=f"{total:g}")
    return finite


def total_of(values: tuple[float, ...], where: str) -> float:
    """Return the sum of finite numbers. Raises RewardError where that is beyond what a float holds."""
    try:
        total = math.fsum(values)
    except OverflowError:
        total = math.inf
    if not math.isfinite(total):
        raise RewardError(
            "the sum is no finite number",
            where=where,
            got=", ".join(f"{x:g}" for x in values[:8]),
            expected=_EXPECTED,
        )
    return total


def earned(verdict: Verdict, n_given: int) -> Verdict:
    """Take away what a reward says of the first `n_given` turns, which are not the policy's doing."""
    if not n_given or verdict.per_turn is None:
        return verdict
    per_turn = (0.0,) * n_given + verdict.per_turn[n_given:]
    return replace(verdict, value=total_of(per_turn, "the turns that were not given"), per_turn=per_turn)
