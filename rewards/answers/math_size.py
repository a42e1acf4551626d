"""Bounds the numbers of a formula before it is worked out: `9^{9^{9}}` has 369 million digits.

Numbers are replaced by their logarithms, and powers, factorials, products, sums and fractions of numbers by that of
their result, from the inside out. What has variables stays; a power of a variable is as large as its exponent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

#: Digits of a number, and exponents of anything else, up to which algebra is let near a formula.
MOST_DIGITS = 100_000.0
#: Steps of replacing; a longer formula of nothing but numbers is too large to be worked out, whatever its value.
_MOST_STEPS = 400

_N = r"⟨([^⟨⟩]*)⟩"
_CONSTANTS = {r"\pi": "3.1416", r"\phi": "1.6180", "e": "2.7183", "i": "1"}
_CONSTANT = re.compile(r"\\pi(?![a-z])|\\phi(?![a-z])|(?<![a-zA-Z\\])[ei](?![a-zA-Z])")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_EXPONENT = re.compile(rf"\^\{{?[+-]?{_N}")


def is_huge(text: str) -> bool:
    """True if a number has more than 100,000 digits, or an exponent above 100,000."""
    if "^" not in text and "!" not in text:
        return False
    text = re.sub(r"\\(?:left|right|cdot|times|[,;! ])|\s+", lambda m: "*" if m[0] in _TIMES else "", text)
    text = _CONSTANT.sub(lambda m: _CONSTANTS[m[0]], text.replace("**", "^"))
    text = re.sub(r"\^(\d)(?=\d)", r"^{\1}*", text)  # 2^10 is 2^1 and a 0
    text = _NUMBER.sub(lambda m: _written(_log(m[0])), text)
    for _ in range(_MOST_STEPS):
        before = text
        for pattern, result in _RULES:
            text, n = pattern.subn(lambda m, result=result: _written(result(*map(float, m.groups()))), text, count=1)  # type: ignore[misc]
            if n:
                break
        if any(not abs(float(x)) <= MOST_DIGITS for x in re.findall(_N, text)):
            return True
        if text == before:
            return any(float(x) > math.log10(MOST_DIGITS) for x in _EXPONENT.findall(text))
    return True


_TIMES = (r"\cdot", r"\times")


def _log(number: str) -> float:
    """The decimal logarithm of a number; of 0, that of a small one."""
    whole, _, rest = number.partition(".")
    whole = whole.lstrip("0")
    if len(whole) > 300:
        return float(len(whole))
    value = float(f"{whole or '0'}.{rest or '0'}")
    return math.log10(value) if value > 0 else -9.0


def _written(log: float) -> str:
    return f"⟨{log!r}⟩"


def _power(base: float, exponent: float) -> float:
    return base * 10**exponent if exponent < 300 and base else (math.inf if base else 0.0)


def _factorial(log: float) -> float:
    return math.lgamma(10**log + 1) / math.log(10) if log < 300 else math.inf


#: Innermost first: brackets around a number, then what binds closest.
_RULES: tuple[tuple[re.Pattern[str], Callable[..., float]], ...] = (
    (re.compile(rf"\({_N}\)"), lambda x: x),
    (re.compile(rf"\\[dt]?frac\{{{_N}\}}\{{{_N}\}}"), lambda x, y: x - y),
    (re.compile(rf"\\sqrt\{{{_N}\}}"), lambda x: x / 2),
    (re.compile(rf"{_N}!"), _factorial),
    (re.compile(rf"{_N}\^(?:\{{[+-]?{_N}\}})(?!!)"), _power),
    (re.compile(rf"{_N}\^{_N}(?![!^])"), _power),
    (re.compile(rf"\{{{_N}\}}(?=\^)"), lambda x: x),
    (re.compile(rf"{_N}\*?{_N}(?![!^])"), lambda x, y: x + y),
    (re.compile(rf"(?<![\^*⟩/]){_N}/{_N}(?![!^])"), lambda x, y: x - y),
    (re.compile(rf"(?<![\^*⟩/]){_N}[+-]{_N}(?![!^*⟨/])"), lambda x, y: max(x, y) + 0.31),
)
