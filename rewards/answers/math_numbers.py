r"""Plain numbers as people write them, read exactly: `1,234.5`, `-3/4`, `1\frac{1}{2}`, `2.5 \times 10^{3}`, `5 cm`.

Texts are those of `rewards.answers.math_text.normal`. What is more than a number with a unit is not read here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

#: Decimals with this many significant digits count as equal to what they round or cut off.
DIGITS = 6
#: Longer numerals are compared as texts; numbers beyond 10^±MAX_EXPONENT are not written out.
_MAX_NUMERAL = 1_000
_MAX_EXPONENT = 400

_INT = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+(?!\d)|\d+"
_BODY = re.compile(
    rf"(?P<sign>[-+]\s?)?(?:"
    rf"(?P<whole>\d+)\s*\\frac\{{(?P<top>\d+)\}}\{{(?P<bottom>\d+)\}}"
    rf"|(?P<whole2>\d+) (?P<top2>[1-9]\d*)/(?P<bottom2>\d+)"
    rf"|\\frac\{{(?P<sign3>-?)(?P<top3>\d+(?:\.\d+)?)\}}\{{(?P<sign4>-?)(?P<bottom3>\d+(?:\.\d+)?)\}}"
    rf"|\(?(?P<top4>\d+)\)?\s?/\s?\(?(?P<bottom4>\d+)\)?"
    rf"|(?P<int>{_INT})?(?P<decimals>\.\d*)?"
    rf")(?P<power>\s?(?:\\times|\\cdot|x|X)\s?10\s?(?:\^\s?(?:\{{\s?(?P<exp>[-+]?\d+)\s?\}}|(?P<exp1>-?\d+)))?)?"
)
_POWER = re.compile(r"(?P<sign>-?)10\s?\^\s?(?:\{\s?(?P<exp>[-+]?\d+)\s?\}|(?P<exp1>\d+))")
_CURRENCY = re.compile(r"^([-+]?)\s*(?:USD|EUR|US\$|[$€£¥₹])\s*|\s*(?:dollars?|euros?|USD|EUR|[$€£¥₹])$", re.IGNORECASE)
_AMOUNT = re.compile(r"([-+]?)\s*\\?\$\s*([\d,]*\.?\d+)\.?")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|per cent|%|\\%)\s*\}|percent|per cent|percentage points?)$")
_DEGREES = re.compile(r"\^\{\\circ\}\s*(?:\\text\{\s*)?([CF])?\s*\}?$")
_UNIT_FORM = re.compile(
    r"(?:\\text\{\s*)?([a-zA-Zµ/][a-zA-Zµ ./]{0,40}?)\.?\s*(?:\})?(\s*\^\s*\{?\s*-?\d\s*\}?|[23](?![\d]))?\s*\}?$"
)

_NAMED_POWER = re.compile(r"(square|sq|cubic|cu)\b\.?\s*([a-zA-Z][^\d]*)", re.IGNORECASE)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_BETWEEN_PARTS = re.compile(r"(?<=[a-zA-Z.])(?:\s*,\s*|\s+)(?:and\s+)?(?=\d)")
_MAX_PARTS = 4

#: Name of a unit -> (dimension, how many of the dimension's base unit it is).
_UNITS: dict[str, tuple[str, Fraction]] = {}
for _dimension, _table in (
    ("length", "mm 1/1000 cm 1/100 dm 1/10 m 1 km 1000 meter 1 metre 1 kilometer 1000 kilometre 1000"),
    ("length", "millimeter 1/1000 millimetre 1/1000 centimeter 1/100 centimetre 1/100 mile 201168/125 mi 201168/125"),
    ("length", "in 127/5000 inch 127/5000 inche 127/5000 foot 381/1250 feet 381/1250 ft 381/1250 yard 1143/1250"),
    ("mass", "mg 1/1000000 milligram 1/1000000 g 1/1000 gram 1/1000 kg 1 kilogram 1 t 1000 tonne 1000"),
    ("time", "ms 1/1000 s 1 sec 1 second 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400 week 604800"),
    ("volume", "ml 1/1000 mL 1/1000 milliliter 1/1000 millilitre 1/1000 l 1 L 1 liter 1 litre 1"),
    ("angle", "degree 1 deg 1"),
    ("radian", "radian 1 rad 1"),
    ("mass", "lb 45359237/100000000 pound 45359237/100000000 oz 45359237/1600000000 ounce 45359237/1600000000"),
    ("money", "cent 1/100"),
):
    for _name, _size in re.findall(r"(\w+) (\S+)", _table):
        _UNITS[_name] = (_dimension, Fraction(_size))


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was written down.

    Attributes:
        value: exactly what is written.
        digits: significant digits of a decimal; None for whole numbers and fractions, which are exact.
        step: what the last digit of a decimal stands for; 0 for exact numbers.
        percent: whether it is written as a percentage; `value` is then the number before the sign.
        unit: as written, without powers of its own being looked into; empty without one.
        currency: of an amount of money; empty without one, as in a formula between dollars.
    """

    value: Fraction
    digits: int | None = None
    step: Fraction = Fraction(0)
    percent: bool = False
    unit: str = ""
    currency: str = ""

    def is_of_another_currency(self, other: Number) -> bool:
        """True if both are amounts of money, in two currencies."""
        return bool(self.currency and other.currency) and self.currency != other.currency


def read(text: str) -> Number | None:
    """Return the number that `text` is, or None."""
    text = text.strip()
    if not text or len(text) > _MAX_NUMERAL or not any(map(str.isdigit, text)):
        return None
    if (whole := _added(text)) is not None:
        return whole
    unit, percent, currency = "", False, _currency(text)
    text = _CURRENCY.sub(r"\1", text).strip()
    if degrees := _DEGREES.search(text):
        text, unit = text[: degrees.start()].rstrip(), f"degree {degrees[1] or ''}".strip()
    match = _POWER.fullmatch(text)
    if match:
        power = _exponent(match)
        return None if power is None else Number(power * (-1 if match["sign"] else 1))
    shorter = _PERCENT.sub("", text)
    if shorter != text:
        text, percent = shorter, True
    match = _BODY.match(text)
    if match is None or not any(map(str.isdigit, match[0])):
        return None
    rest = text[match.end() :].strip()
    if rest:
        found = _UNIT_FORM.fullmatch(rest)
        apart = text[match.end()] == " " or len(found[1].strip()) > 1 if found else False
        if found is None or percent or not apart or not _is_unit(found[1]):
            return None  # 5m is a product, 5 m is a length
        unit = found[1].strip() + re.sub(r"[^-\d]", "", found[2] or "")
    number = _number(match)
    if number is None:
        return None
    word, _, others = unit.partition(" ")
    scale, unit = (_SCALES[word.lower()], others) if word.lower() in _SCALES else (1, unit)
    if (named := _NAMED_POWER.fullmatch(unit)) is not None:
        unit = named[2] + ("2" if named[1].lower().startswith("s") else "3")
    return Number(number[0] * scale, number[1], number[2] * scale, percent, unit, currency)


def _added(text: str) -> Number | None:
    """Sum of quantities of smaller and smaller known units, in the first of them; None of another text.

    `2 hours and 30 minutes` are 2.5 hours.
    """
    parts = _BETWEEN_PARTS.split(_TEXT.sub(r"\1", text))
    if not 2 <= len(parts) <= _MAX_PARTS:
        return None
    numbers = [number for part in parts if (number := read(part)) is not None and number.value >= 0]
    units = [unit for number in numbers if (unit := _known(number.unit)) is not None]
    if len(units) < len(parts) or len({dimension for dimension, _ in units}) > 1:
        return None
    sizes = [size for _, size in units]
    if any(small >= large for large, small in pairwise(sizes)):
        return None
    value = sum(number.value * size for number, size in zip(numbers, sizes, strict=True)) / sizes[0]
    return Number(Fraction(value), unit=numbers[0].unit)


def is_known(unit: str) -> bool:
    """True for the name of a unit that can be converted, or is money."""
    return _known(unit) is not None or _CURRENCY.fullmatch(unit) is not None


def _currency(text: str) -> str:
    """Name of the currency that is written before or behind a number; empty without one."""
    found = _CURRENCY.search(text)
    name = found[0].strip("+- ").lower().removesuffix("s") if found else ""
    return {"$": "dollar", "us$": "dollar", "usd": "dollar", "€": "euro", "eur": "euro"}.get(name, name)


def money(text: str, formula: str) -> Number | None:
    r"""Parse an amount of money, or None, in any currency: `\$0.50`, `$5`, `50 cents`, `5 dollars`.

    Args:
        text: as it was written.
        formula: its normal text, which lacks `$` as the mark around a formula.
    """
    sign = _AMOUNT.fullmatch(text.strip())
    number = read(sign[1] + sign[2] if sign else formula)
    if number is None or sign:
        return number and replace(number, currency="dollar")
    if _CURRENCY.search(number.unit or formula):
        return replace(number, unit="")
    kind, size = _known(number.unit) or ("", Fraction(1))
    return replace(number, value=number.value * size, step=number.step * size, unit="") if kind == "money" else None


#: Words behind a number that multiply it.
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


def _is_unit(word: str) -> bool:
    """True if this can be a unit: a known one, or a word of several letters."""
    words = word.split()
    if not words or len(words) > 3 or any(_NO_UNIT.fullmatch(w) for w in words) or _PART.fullmatch(words[-1]):
        return False
    return _known(word) is not None or len(word.strip()) >= 3 or _PLAIN.fullmatch(word.strip()) is not None


#: Words that make more of a number than a number with a unit.
_NO_UNIT = re.compile(
    r"or|and|not|is|are|if|but|any|other|all|no|than|more|less|about|at|between|to|either|mod|times|plus|minus|divided"
    r"|over|pi|root|squared|cubed|factorial|half|halves|thirds|quarters|tenths|hundredths|first|pairs?",
    re.IGNORECASE,
)
#: Words that make a fraction where they are last: 3 fifths, not 3 fifth graders.
_PART = re.compile(
    r"thirds?|fourths?|quarters?|fifths?|sixths?|sevenths?|eighths?|ninths?|(?:ten|hundred|thousand|million)ths?",
    re.IGNORECASE,
)


#: Short names of units that cannot be converted here.
_PLAIN = re.compile(r"mph|kph|N|J|W|Pa|V|A|K|Hz|lb|oz|eV|kW|am|pm")


def _known(unit: str) -> tuple[str, Fraction] | None:
    name = unit.strip()
    for form in (name, name.lower(), name.lower().removesuffix("s")):
        if form in _UNITS:
            return _UNITS[form]
    return None


def _number(match: re.Match[str]) -> tuple[Fraction, int | None, Fraction] | None:
    sign = -1 if (match["sign"] or "").strip() == "-" else 1
    power = _exponent(match) if match["power"] else Fraction(1)
    if power is None:
        return None
    if match["power"] and match["exp"] is None and match["exp1"] is None:
        power = Fraction(10)
    for n in ("", "2"):
        if match[f"top{n}"]:
            if not int(match[f"bottom{n}"]):
                return None
            part = Fraction(int(match[f"top{n}"]), int(match[f"bottom{n}"]))
            return sign * (int(match["whole" + n]) + part) * power, None, Fraction(0)
    for n in ("3", "4"):
        if match[f"top{n}"]:
            top, bottom = Fraction(match[f"top{n}"]), Fraction(match[f"bottom{n}"])
            if n == "3":
                top, bottom = top * (-1 if match["sign3"] else 1), bottom * (-1 if match["sign4"] else 1)
            return (sign * top / bottom * power, None, Fraction(0)) if bottom else None
    whole, decimals = re.sub("[ ,]", "", match["int"] or ""), (match["decimals"] or "").removeprefix(".")
    if not whole and not decimals:
        return None
    value = Fraction(int(whole + decimals), 10 ** len(decimals)) * power * sign
    if not decimals:
        return value, None, Fraction(0)
    return value, len((whole + decimals).lstrip("0")), power / 10 ** len(decimals)


def _exponent(match: re.Match[str]) -> Fraction | None:
    exponent = match["exp"] or match["exp1"]
    if exponent is None:
        return Fraction(10)
    if len(exponent) > 6 or abs(int(exponent)) > _MAX_EXPONENT:
        return None
    return Fraction(10) ** int(exponent)


def same(answer: Number, reference: Number) -> bool:
    """True if two numbers are the same.

    Exact numbers have to be equal. A decimal with at least six significant digits may be the other one rounded, or cut
    off: 0.333333 is 1/3, 0.33 is not. A percentage is also the number that it stands for (50 % is 0.5), and may be
    asked for without its sign (50 % is 50, where the reference says 50 % or the answer does). Units that are known are
    converted (50 cm is 0.5 m); of two others the names have to be equal; a unit that only one of them has is left out.
    """
    if answer.is_of_another_currency(reference):
        return False
    if answer.unit and reference.unit and not _same_name(answer.unit, reference.unit):
        ours, theirs = in_one_unit(answer, reference)
        return ours is not None and ours == theirs
    return any(close(value, wanted, answer, reference) for value, wanted in readings(answer, reference))


def readings(answer: Number, reference: Number) -> list[tuple[Fraction, Fraction]]:
    """List the pairs of values that may be compared: where only one has a percent sign, also without it."""
    meant = (plain(answer), plain(reference))
    return [meant] if answer.percent == reference.percent else [meant, (answer.value, reference.value)]


def close(value: Fraction, wanted: Fraction, answer: Number, reference: Number) -> bool:
    """True if two values are equal, or one rounds the other to at least six significant digits."""
    if value == wanted:
        return True
    steps = [
        n.step / (100 if n.percent else 1) for n in (answer, reference) if n.digits is not None and n.digits >= DIGITS
    ]
    if not steps:
        return False
    if len(steps) == 2:
        step = max(steps)
        coarse, fine = (value, wanted) if steps[0] == step else (wanted, value)
        return abs(fine - coarse) <= step / 2 or math.trunc(fine / step) * step == coarse
    return abs(value - wanted) < steps[0]


def _same_name(a: str, b: str) -> bool:
    ours, theirs = _one_spelling(a), _one_spelling(b)
    if ours.partition(" ")[0] == theirs.partition(" ")[0] == "degree" and "degree" in (ours, theirs):
        return True  # of an angle, or of a temperature whose scale only one names
    return ours == theirs or (_known(a) is not None and _known(a) == _known(b))


def _one_spelling(unit: str) -> str:
    """Name of a unit in one spelling: lower case, singular, scales of temperature in full."""
    name = " ".join(unit.lower().replace(".", "").split())
    name = re.sub(r"^deg(?:ree)?s?\b", "degree", name)
    name = re.sub(r"^degree ([cf])$", lambda m: {"c": "degree celsius", "f": "degree fahrenheit"}[m[1]], name)
    name, power = name.rstrip("-0123456789"), name[len(name.rstrip("-0123456789")) :]
    return (name.removesuffix("s") if len(name) > 3 and not name.endswith("celsius") else name) + power


def plain(number: Number) -> Fraction:
    """Return the intended number; a percentage is divided by 100."""
    return number.value / 100 if number.percent else number.value


def in_one_unit(one: Number, other: Number) -> tuple[Fraction, Fraction] | tuple[None, None]:
    """Return both values in the same unit, or Nones where one cannot be converted into the other."""
    if _same_name(one.unit, other.unit):
        return one.value, other.value
    a, b = (re.fullmatch(r"(.*?)(-?\d?)", n.unit) for n in (one, other))
    if a is None or b is None or (a[2] or "1") != (b[2] or "1"):
        return None, None
    ours, theirs = _known(a[1]), _known(b[1])
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return None, None
    power = int(a[2] or 1)
    return one.value * ours[1] ** power, other.value * theirs[1] ** power
