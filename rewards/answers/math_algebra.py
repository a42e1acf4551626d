"""Equality of two formulas by computer algebra: parsed by math-verify, tried at numbers, simplified, compared.

Runs in a worker process (`rewards.worker_pool`), for sympy knows no time limit. It is the only module here that imports
sympy, and it does so when it is called.
"""

from __future__ import annotations

import logging
import random
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rewards.answers import math_numbers
from rewards.answers.math_compare import same
from rewards.answers.math_size import is_huge

_DIGITS = 50
_SAME = 1e-35
_N_POINTS = 8
_MAX_DEPTH = 50
_BAD = re.compile(r"[@#~`\"?]|\\(?:input|include|def|newcommand)")
#: Integrals, sums, limits, derivatives and the like, which are to be worked out unless the reference has them too.
_TO_DO = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim|gcd|lcm)(?![a-zA-Z])|\\frac\{(?:d|\\partial)\}\{(?:d|\\partial)\s*[a-z]\}"
)
#: Unit at the end of a formula; of one letter it could be a variable, unless the other side has a unit too.
_UNIT = re.compile(
    r"(?<=\S)(?:\s*\\text\s*\{\s*([a-zA-Z][a-zA-Z. ]*?)\s*\}|\s([a-zA-Z]))\s*(\^\s*(?:\d|\{\s*\d\s*\}))?\s*\Z"
)
_HUGE = re.compile(r"\^\s*\{?\s*-?\d{6,}|\d{5,}\s*!|!\s*!|[\d}]\s*\)\s*!|\^\s*\{?\s*\d+\s*\^\s*\{?\s*\d{2,}")


def judge(answer: str, reference: str) -> bool:
    """True if `answer` equals `reference`, by computer algebra. Raises whatever a library raises."""
    return same(answer, reference, equal)


def equal(answer: str, reference: str) -> bool:
    """Compare two leaves: numbers by value, the rest as formulas."""
    if (
        _BAD.search(answer)
        or not answer
        or not reference
        or bool(_HUGE.search(answer)) != bool(_HUGE.search(reference))
    ):
        return False
    if max(_depth(answer), _depth(reference)) > _MAX_DEPTH:
        return False
    if _to_do(_last_side(answer)) - _to_do(reference):  # unlike "the integral = 1/2", where the work is done
        return False
    if is_huge(answer) or is_huge(reference):
        return _spelt(answer) == _spelt(reference)
    scale = _scale(answer, reference)
    ours, theirs = parsed(answer), parsed(reference)
    if ours is None or theirs is None or scale is None:
        return False
    if scale != 1:
        import sympy

        return isinstance(ours, sympy.Expr) and _equal(ours * sympy.Rational(*scale.as_integer_ratio()), theirs)
    for text, other in ((answer, theirs), (reference, ours)):
        number = math_numbers.read(text)
        if (
            number is not None
            and number.digits is not None
            and not number.unit
            and (near := _near(number, other)) is not None
        ):
            return near
    return _equal(ours, theirs)


def _scale(answer: str, reference: str) -> Fraction | None:
    """How many units of the reference one of the answer is, 1 where one lacks it; None of units that do not compare."""
    found = [_UNIT.search(answer), _UNIT.search(reference)]
    if not any(unit is not None and unit[1] for unit in found):
        return Fraction(1)
    one, other = (math_numbers.read(f"1 {unit[1] or unit[2]}{unit[3] or ''}" if unit else "") for unit in found)
    if one is None or other is None or not one.unit or not other.unit:
        return Fraction(1)
    ours, theirs = math_numbers.in_one_unit(one, other)
    return None if ours is None or theirs is None else ours / theirs


def _last_side(text: str) -> str:
    """Text behind the last equals sign outside brackets."""
    depth, begin = 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "=" and not depth:
            begin = at + 1
    return text[begin:]


def _to_do(text: str) -> set[str]:
    """Integrals, sums, derivatives and the like in a formula, each once."""
    return set(_TO_DO.findall(re.sub(r"(?<=[{}])\s+", "", text)))


def _spelt(text: str) -> str:
    """A formula without white space and needless brackets, to be compared as a text."""
    text = re.sub(r"\s+|\\left|\\right", "", text)
    text = re.sub(r"\{\(([^(){}]*)\)\}", r"{\1}", text)
    return re.sub(r"\{(\w)\}", r"\1", text)


def _depth(text: str) -> int:
    """Nesting depth of the brackets in `text`."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """Return `text` as a sympy object with exact numbers, or None."""
    import sympy
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if re.search(r"\\text\s*\{\s*[a-zA-Z]{2,}\s*\}", text):
        text = re.sub(r"\\text\s*\{\s*[a-zA-Z. ]{2,}\s*\}\s*$", "", text)
    number = math_numbers.read(text)
    if number is not None:
        value = number.value / 100 if number.percent else number.value
        return sympy.Rational(value.numerator, value.denominator)
    text = _repeating(text.replace(r"^{\circ}", ""))
    found = parse(
        rf"\boxed{{{text}}}",
        [LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not found or isinstance(found[0], str):
        return None
    made = found[0]
    if isinstance(made, sympy.Expr):
        made = sympy.nsimplify(made, rational=True) if made.has(sympy.Float) else made
        if not made.has(sympy.Sum, sympy.Product):
            constants = {"i": sympy.I, "e": sympy.E}
            made = made.xreplace(
                {s: constants[s.name] for s in made.free_symbols if isinstance(s, sympy.Symbol) and s.name in constants}
            )
    return made


def _repeating(text: str) -> str:
    r"""Write `0.1\overline{6}` as a fraction."""

    def exact(match: re.Match[str]) -> str:
        whole, fixed, period = match[1], match[2], match[3]
        value = Fraction(int(whole + fixed + period) - int(whole + fixed), (10 ** len(period) - 1) * 10 ** len(fixed))
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    return re.sub(r"(\d+)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}", exact, text)


def _near(number: math_numbers.Number, other: Any) -> bool | None:
    """True if a constant expression has the value that a decimal shows; None if it has none."""
    import sympy

    if not isinstance(other, sympy.Expr) or other.free_symbols or other.has(sympy.oo, sympy.zoo, sympy.nan):
        return None
    value = other.evalf(_DIGITS)
    if not value.is_real or not (value.is_Float or value.is_Rational):
        return False
    exact = math_numbers.Number(Fraction(int(value * 10**45), 10**45))
    wanted = number.value / 100 if number.percent else number.value
    if other.is_Rational:
        exact = math_numbers.Number(Fraction(int(other.p), int(other.q)))
    return math_numbers.close(wanted, exact.value, number, exact)


def _equal(ours: Any, theirs: Any) -> bool:
    import sympy
    from math_verify import verify

    if isinstance(ours, sympy.Expr) and isinstance(theirs, sympy.Expr):
        if ours == theirs:
            return not ours.has(sympy.zoo, sympy.nan)  # 1/0 is nothing, and not 2/0
        tried = _tried(ours, theirs)
        if tried is not None:
            return tried
        return bool(sympy.simplify(ours - theirs) == 0)
    if isinstance(ours, sympy.Eq) and isinstance(theirs, sympy.Eq):
        return _same_equation(ours, theirs)
    if isinstance(ours, sympy.Eq) and isinstance(theirs, sympy.Expr) and ours.lhs.is_Symbol:
        return _equal(ours.rhs, theirs)
    if isinstance(theirs, sympy.Eq) and isinstance(ours, sympy.Expr) and theirs.lhs.is_Symbol:
        return _equal(ours, theirs.rhs)
    if isinstance(ours, sympy.Set) and isinstance(theirs, sympy.Set):
        return bool(ours == theirs or sympy.SymmetricDifference(ours, theirs).is_empty)
    return bool(verify(theirs, ours, timeout_seconds=None, allow_set_relation_comp=True))


def _same_equation(ours: Any, theirs: Any) -> bool:
    """True if two equations have the same solutions: differences of sides equal up to a factor."""
    import sympy

    if isinstance(ours.rhs, sympy.Set) or isinstance(theirs.rhs, sympy.Set):
        return bool(ours == theirs)
    if (wanted := _solution(theirs)) is not None:  # an equation that is still to be solved is no answer to it
        found = _solution(ours)
        return found is not None and found[0] == wanted[0] and _equal(found[1], wanted[1])
    one, other = ours.lhs - ours.rhs, theirs.lhs - theirs.rhs
    if one.free_symbols != other.free_symbols or one == 0 or other == 0:
        return bool(ours == theirs)
    ratio = sympy.simplify(one / other)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def _solution(equation: Any) -> tuple[Any, Any] | None:
    """Variable and value of an equation such as `x = 5`, either way round; None of any other."""
    for one, other in ((equation.lhs, equation.rhs), (equation.rhs, equation.lhs)):
        if one.is_Symbol and not other.free_symbols:
            return one, other
    return None


def _tried(ours: Any, theirs: Any) -> bool | None:
    """Equality by values at fixed random points; None where none gives two real or complex numbers.

    Expressions that differ as formulas differ nearly everywhere, and those that agree at eight points to 35 digits
    are the same. Every second point is negative; where a value is not real there, it says nothing, for the variables
    may be meant to be positive.
    """
    import sympy

    ours, theirs = ours.doit(), theirs.doit()
    if ours.is_Rational and theirs.is_Rational:
        return bool(ours == theirs)
    if any(x.has(sympy.zoo, sympy.nan) for x in (ours, theirs)):
        return False
    if ours.has(sympy.oo) or theirs.has(sympy.oo):
        return bool(ours == theirs)
    if not all(isinstance(x, sympy.Expr) for x in (ours, theirs)) or ours.atoms(sympy.core.function.AppliedUndef):
        return None
    symbols = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    draw, n_equal = random.Random(0), 0
    for i in range(_N_POINTS if symbols else 1):
        point = {s: sympy.Rational(draw.randint(10_001, 39_999) * (-1 if i % 2 else 1), 10_007) for s in symbols}
        if any(s.is_integer for s in symbols) or _needs_integers(ours, theirs):
            point = {s: sympy.Integer(draw.randint(2, 12)) for s in symbols}
        a, b = (complex_value(x.subs(point)) for x in (ours, theirs))
        if a is None or b is None:
            continue
        real = [abs(x.imag) < _SAME for x in (a, b)]
        if symbols and i % 2 and not all(real):
            continue
        if abs(a - b) > _SAME * (1 + abs(a)):
            return False
        n_equal += 1
    return True if n_equal else None


def _needs_integers(*formulas: Any) -> bool:
    import sympy

    return any(f.has(sympy.factorial, sympy.binomial, sympy.Sum, sympy.Product) for f in formulas)


def complex_value(expression: Any) -> Any:
    """Value of `expression` to fifty digits as an mpmath number, or None where it has none."""
    import mpmath

    value = expression.evalf(_DIGITS, maxn=200)
    if not value.is_number or value.has(*_nothing()):
        return None
    try:
        with mpmath.workdps(_DIGITS):
            real, imaginary = value.as_real_imag()
            return mpmath.mpc(mpmath.mpf(str(real)), mpmath.mpf(str(imaginary)))
    except (TypeError, ValueError):
        return None


def _nothing() -> tuple[Any, ...]:
    import sympy

    return (sympy.oo, sympy.zoo, sympy.nan)
