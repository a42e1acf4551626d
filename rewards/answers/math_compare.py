r"""Equality of formulas: by structure, by value of leaves, and else by computer algebra.

Lists of solutions and sets are compared without order, points and matrices with it, intervals with their brackets.
`same` is called in a worker process that may be killed (`rewards.worker_pool`): algebra has no bound of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from rewards.answers import math_numbers
from rewards.answers.math_text import normal

Equal = Callable[[str, str], bool]

_MAX_ITEMS = 60
_DEGREES = r"^{\circ}"
_NAME = r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_(?:\{[^{}]*\}|\w))?(?:\([a-zA-Z](?:,\s?[a-zA-Z])*\))?"
_ASSIGNED = re.compile(rf"({_NAME}|\({_NAME}(?:,\s?{_NAME})+\))\s*(?:=|\\approx)\s*(?![=<>])(.+)", re.DOTALL)
_MEMBER = re.compile(rf"({_NAME})\s*\\in(?![a-z])\s*(.+)", re.DOTALL)
_CHAIN = re.compile(r"\s*(<|>|\\le(?![a-z])|\\ge(?![a-z])|\\lt(?![a-z])|\\gt(?![a-z]))\s*")
_BUILDER = re.compile(rf"\\\{{\s*{_NAME}\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?(?:\||:)\s*(.+)\\\}}", re.DOTALL)
_OR = re.compile(
    r",?\s*(?:\\text\{\s*(?:or|and)\s*\}|(?<![a-zA-Z\\])(?:or|and)(?![a-zA-Z])|;|\\lor(?![a-z])|\\text\{,\s*\})\s*",
    re.IGNORECASE,
)
_AND = re.compile(
    r",?\s*(?:\\text\{\s*and\s*\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-z]))\s*", re.IGNORECASE
)
_LABEL = re.compile(r"\(([A-Za-z])\).*|([A-Za-z])\s*[.):].*|([A-Za-z])", re.DOTALL)
_CHOICE = re.compile(  # with its value, and not with another choice
    r"\(([A-E])\)(?!.*(?<!\w)\([A-J]\)|\s*(?:and|or)\b)"
    r"(?:\s*(?=[\d.$-]|\\(?:frac|sqrt|pi)(?![a-z]))|\s+(?=\w))(.+)",
    re.DOTALL,
)
_CHOSEN = re.compile(r"\(?([A-E])[).:]\s*(.+)", re.DOTALL)
_CLOCK = re.compile(r"(\d{1,2}) ?: ?([0-5]\d)(?: ?: ?([0-5]\d))?(?: ?([ap])\.? ?m\.?)?", re.IGNORECASE)
_IN_BASE = re.compile(r"[0-9A-Fa-f]+_\{?\d+\}?")
_ENV = re.compile(r"\\begin\s*\{pmatrix\}(.*)\\end\s*\{pmatrix\}(\^T|\^\{T\}|\^\\top)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Shape:
    """Structure of a formula.

    Attributes:
        kind: leaf, list (no order), set, tuple, matrix, or union (of intervals).
        items: the parts; of a leaf its text, of a matrix its entries row by row.
        name: the variable it is given for, as in `x = 5`; empty without one.
        frame: brackets of a tuple, rows and columns of a matrix.
    """

    kind: str
    items: tuple[str, ...]
    name: str = ""
    frame: str = ""


def same(answer: str, reference: str, equal: Equal) -> bool:
    """True if `answer` equals `reference`.

    Args:
        answer: a formula, as found by `rewards.answers.extract`.
        reference: the right one.
        equal: decides about two leaves that are no plain numbers.
    """
    a, r = of_choice(normal(answer), normal(reference))
    return _decided(quick(a, r), lambda: _same(a, r, equal, 0))


def of_choice(a: str, r: str) -> tuple[str, str]:
    r"""Answer and reference to compare, of a choice with its value such as `\textbf{(B)}\ 12`: either part, or both."""
    theirs = _CHOICE.fullmatch(_untexted(r))
    if theirs is None:
        return a, r
    answer = _untexted(a).strip()
    if (both := _CHOSEN.fullmatch(answer)) is not None:
        return (both[2], theirs[2]) if both[1] == theirs[1] else ("", r)
    return (answer.strip("()"), theirs[1]) if re.fullmatch(r"[A-E]|\([A-E]\)", answer) else (a, theirs[2])


def quick(a: str, r: str) -> bool | None:
    """Decide about two normal texts where that takes no algebra; None where it does."""
    if not a or not r or not re.search(r"\w|\\", a):
        return a == r != ""
    if _squeezed(a) == _squeezed(r):
        return True
    if (clock := _same_clock(a, r)) is not None:
        return clock
    if (_DEGREES in a) != (_DEGREES in r):  # 25 C for 25°C
        plain = [_squeezed(_untexted(text.replace(_DEGREES, ""))) for text in (a, r)]
        if plain[0] == plain[1]:
            return True
    one, other = math_numbers.read(a), math_numbers.read(r)
    if one is not None and other is not None:
        return math_numbers.same(one, other)
    if _IN_BASE.fullmatch(a) or _IN_BASE.fullmatch(r):
        return False  # 101_2 is itself alone, however it could be read
    words = [_words(a), _words(r)]
    if words[1]:
        return words[0] == words[1] or _label(a, r)
    if re.fullmatch(r"[A-Z]", r.strip("() ")) and re.match(r"\(?[A-Za-z]\s*[).:]", _untexted(a)):
        return _label(a, r)
    return None


def _same_clock(a: str, r: str) -> bool | None:
    """Whether two times of the day are the same; None where none is one, or one alone may be a ratio.

    Two that both look like times are never compared as ratios: 10:24 is not 5:12, as 2:40 is not 1:20.
    """
    one, other = (_CLOCK.fullmatch(_untexted(text)) for text in (a, r))
    if one is None or other is None:
        clock = one or other
        return False if clock is not None and (clock[4] or not int(clock[1])) else None
    halves = {half.lower() for half in (one[4], other[4]) if half}  # as of units, one of them may lack it
    times = [(int(clock[1]), clock[2], clock[3] or "00") for clock in (one, other)]
    return times[0] == times[1] and len(halves) < 2


def _decided(found: bool | None, otherwise: Callable[[], bool]) -> bool:
    return otherwise() if found is None else found


def _squeezed(text: str) -> str:
    text = re.sub(r"(\\[a-zA-Z]+) +(?=[a-zA-Z])|(?<=\d)\s+(?=\d)", r"\1@", text)
    text = re.sub(r"\s+", "", text)
    return re.sub(r"\{(\w)\}", r"\1", text)


def _words(text: str) -> str:
    """Return a text of words, folded; empty for anything that may be a formula."""
    plain = _untexted(text)
    if re.search(r"[\\^_=<>+*/{}|\d]", plain) or not re.search(r"[^\W\d_]{3,}", plain):
        return ""
    words = re.sub(r"[^\w\s-]", " ", plain).casefold().split()
    return " ".join(w for w in words if w not in ("the", "a", "an"))


def _label(a: str, r: str) -> bool:
    """True if both name the same choice, one of them with its text."""
    label = r.strip("() .")
    found = _LABEL.fullmatch(_untexted(a).strip())
    return len(label) == 1 and found is not None and found[found.lastindex or 0].upper() == label.upper()


def _untexted(text: str) -> str:
    return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)


def _same(a: str, r: str, equal: Equal, depth: int) -> bool:
    if depth > 6:
        return False
    one, other = shape(a), shape(r)
    one, other = _point(one, other), _point(other, one)
    if one.name and other.name and _squeezed(one.name) != _squeezed(other.name):
        return equal(a, r) if one.kind == other.kind == "leaf" else False
    if one.kind == other.kind == "leaf":
        return _leaves(one, other, a, r, equal, depth)
    if any(
        x.kind == "set" and y.kind == "leaf" and r"\emptyset" in "".join(x.items)
        for x, y in ((one, other), (other, one))
    ):
        return False  # a set that holds the empty set is not empty
    one, other = _fitted(one, other), _fitted(other, one)
    one, other = _unnamed(one, other)
    if len(one.items) != len(other.items) or len(one.items) > _MAX_ITEMS:
        return _union(one, other, a, r, equal)
    if {one.kind, other.kind} <= {"list", "set", "union"}:
        return _unordered(one.items, other.items, equal, depth)
    if one.kind != other.kind or one.frame != other.frame:
        return False
    pairs = zip(one.items, other.items, strict=True)
    return all(_decided(quick(x, y), lambda x=x, y=y: _same(x, y, equal, depth + 1)) for x, y in pairs)  # type: ignore[misc]


def _leaves(one: Shape, other: Shape, a: str, r: str, equal: Equal, depth: int) -> bool:
    x, y = one.items[0], other.items[0]
    if (x, y) != (a, r):
        if bool(one.name) != bool(other.name) and re.search(r"=", a if other.name else r):
            return equal(a, r)  # y = 2x + 1 and 2x - y + 1 = 0
        found = quick(x, y)
        if found is not None:
            return found
        if depth < 6 and (shape(x).kind != "leaf" or shape(y).kind != "leaf"):
            return _same(x, y, equal, depth + 1)
        if one.name and other.name and not re.search(r"[<>=]", x + y):
            return equal(x, y) or equal(a, r)
        return equal(x, y)
    return equal(a, r)


def _point(one: Shape, other: Shape) -> Shape:
    """Point (2, 3) from `x = 2, y = 3`, in the order of the other point's names, else alphabetical."""
    values = _values(one)
    if other.kind != "tuple" or other.frame != "()" or not values or len(values) != len(other.items):
        return one
    order = split(_squeezed(other.name)[1:-1], ",") if other.name else sorted(values, key=str.casefold)
    return Shape("tuple", tuple(values[n] for n in order), other.name, "()") if set(order) == set(values) else one


def _values(one: Shape) -> dict[str, str]:
    """Values by name of a list such as `x = 2, y = 3`; empty of any other, and where a name comes twice."""
    found = [_ASSIGNED.fullmatch(item) for item in one.items] if one.kind == "list" and not one.name else []
    values = {_squeezed(m[1]): m[2].strip() for m in found if m is not None}
    return values if len(values) == len(one.items) else {}


def _unnamed(one: Shape, other: Shape) -> tuple[Shape, Shape]:
    """Two ordered tuples, where the other gives values by name, as `x = 2, y = 3`, and this one, `2, 3`, does not.

    Names that differ in their index alone, as of two roots, give no order.
    """
    values = _values(other)
    n_names = len({name.partition("_")[0] for name in values})
    if one.kind not in ("list", "set") or n_names < max(2, len(values)) or any(map(_ASSIGNED.fullmatch, one.items)):
        return one, other
    return Shape("tuple", one.items), Shape("tuple", tuple(values.values()))


def _fitted(one: Shape, other: Shape) -> Shape:
    """Brackets reinterpreted as the other side has them: list as point, set as list."""
    if one.kind == "leaf" and other.kind in ("list", "set", "union"):
        apart = tuple(split(one.items[0], ",", grouped=False))  # 100,200 may be one number or two
        return Shape("list", apart if len(apart) == len(other.items) else one.items, one.name)
    if one.kind == "list" and other.kind == "tuple" and other.frame == "()" and len(one.items) == 2 and not one.name:
        return one
    if (
        one.kind == "tuple"
        and other.kind in ("list", "set", "union")
        and (len(other.items) == 1 or other.kind == "union")
    ):
        return Shape("list", (one.frame[0] + ", ".join(one.items) + one.frame[1],), one.name)
    if (
        one.kind == "matrix"
        and other.kind == "tuple"
        and one.frame.split("x")[0 if one.frame.startswith("1x") else 1] == "1"
    ):
        return Shape("tuple", one.items, one.name, other.frame if other.frame == "()" else "")
    return one


def _union(one: Shape, other: Shape, a: str, r: str, equal: Equal) -> bool:
    """Compare where the numbers of parts differ: sets of the same reach may be cut differently."""
    if "union" not in (one.kind, other.kind):
        return False
    if all(item[:1] in "([" for item in one.items + other.items):  # the algebra reads "or" between them as "and"
        a, r = (r"\cup ".join(side.items) for side in (one, other))
    return equal(a, r)


def _unordered(ours: tuple[str, ...], theirs: tuple[str, ...], equal: Equal, depth: int) -> bool:
    """True if there is a one-to-one matching of `ours` with `theirs`."""
    left = list(theirs)
    for x in ours:
        for i, y in enumerate(left):
            if _decided(quick(x, y), lambda x=x, y=y: _same(x, y, equal, depth + 1)):  # type: ignore[misc]
                del left[i]
                break
        else:
            return False
    return not left


def shape(text: str) -> Shape:
    """Read how a normal text is built."""
    text = text.strip()
    if (matrix := _ENV.fullmatch(text)) is not None:
        return _matrix(matrix[1], bool(matrix[2]))
    if (member := _MEMBER.fullmatch(text)) is not None:
        return replace(shape(member[2]), name=member[1])
    if (builder := _BUILDER.fullmatch(text)) is not None:
        return replace(shape(builder[1]), name="")  # the variable of a set is anybody's
    if (chain := _interval(text)) is not None:
        return chain
    if (both := _overlap(text)) is not None:
        return both
    parts = _split_or(text)
    if len(parts) > 1:
        return _merged([shape(p) for p in parts])
    if (assigned := _ASSIGNED.fullmatch(text)) is not None and len(split(text, "=")) == 2:
        inner = shape(assigned[2])
        return Shape(inner.kind, inner.items, assigned[1], inner.frame)
    if len(sides := split(text, "=")) > 2 and re.fullmatch(_NAME, sides[0].strip()):
        return Shape("leaf", (sides[-1].strip(),), sides[0].strip())
    pieces = re.split(r"\\cup(?![a-z])", text)
    if len(pieces) > 1:
        return Shape("union", tuple(p.strip() for p in pieces))
    return _bracketed(text) or _signs(text)


def _merged(shapes: list[Shape]) -> Shape:
    """Concatenated list of several parts; a union where intervals are among them."""
    items = [
        i
        for s in shapes
        for i in ((s.frame[0] + ", ".join(s.items) + s.frame[1],) if s.kind == "tuple" and s.frame else s.items)
    ]
    names = {s.name for s in shapes if s.name}
    if len(names) > 1:
        return Shape("list", tuple(f"{s.name} = {i}" for s in shapes for i in s.items))
    union = any(
        s.kind == "tuple" and ("[" in s.frame or "]" in s.frame or r"\infty" in "".join(s.items)) for s in shapes
    )
    return Shape("union" if union else "list", tuple(items), names.pop() if names else "")


def _bracketed(text: str) -> Shape | None:
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes(text, 1):
        inner = text[2:-2].strip()
        return Shape("set", _distinct(split(inner, ",", grouped=False)) if inner else ())
    if text[:1] == "{" and text[-1:] == "}" and _closes(text, 0) and len(split(text[1:-1], ",", grouped=False)) > 1:
        return Shape("set", _distinct(split(text[1:-1], ",", grouped=False)))
    if text.startswith(r"\langle") and text.endswith(r"\rangle"):
        return Shape("tuple", tuple(split(text[7:-7], ",", grouped=False)), frame="()")
    if text[:1] in "([" and text[-1:] in ")]" and text[:1] and _closes(text, 0):
        parts = split(text[1:-1], ",", grouped=False)
        if len(parts) > 1:
            return Shape("tuple", tuple(parts), frame=text[0] + text[-1])
    return None


def _signs(text: str) -> Shape:
    r"""Write out one `\pm`."""
    if text.count(r"\pm") == 1 and r"\mp" not in text:
        return Shape("list", tuple(text.replace(r"\pm", s, 1).strip().removeprefix("+").strip() for s in "+-"))
    return Shape("leaf", (text,))


def _distinct(parts: list[str]) -> tuple[str, ...]:
    """The members of a set, each once, and both where one has two signs."""
    return tuple(dict.fromkeys(item for part in parts for item in (_signs(part).items if r"\pm" in part else (part,))))


def _interval(text: str) -> Shape | None:
    r"""Interval of `a < x \le b`, `x > 3` and the like; None where the middle is no variable."""
    sides, signs = _CHAIN.split(text)[::2], _CHAIN.split(text)[1::2]
    if len(signs) not in (1, 2) or len(split(text, ",")) > 1 or len(_split_or(text)) > 1:
        return None
    signs = [{r"\lt": "<", r"\gt": ">"}.get(s, s) for s in signs]
    if len(signs) == 1:
        left, right = sides
        if not re.fullmatch(_NAME, left.strip()) and re.fullmatch(_NAME, right.strip()):
            left, right, signs = right, left, [_turned(signs[0])]
        if not re.fullmatch(_NAME, left.strip()) or re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", right)):
            return None
        closed = "le" in signs[0] or "ge" in signs[0]
        if signs[0] in (">", r"\ge"):
            return Shape("tuple", (right.strip(), r"\infty"), left.strip(), ("[" if closed else "(") + ")")
        return Shape("tuple", (r"-\infty", right.strip()), left.strip(), "(" + ("]" if closed else ")"))
    low, name, high = (s.strip() for s in sides)
    if not re.fullmatch(_NAME, name) or (signs[0] in _DOWN) != (signs[1] in _DOWN):
        return None
    if signs[0] in _DOWN:
        low, high, signs = high, low, [_turned(s) for s in reversed(signs)]
    return Shape("tuple", (low, high), name, ("[" if "le" in signs[0] else "(") + ("]" if "le" in signs[1] else ")"))


def _overlap(text: str) -> Shape | None:
    """Interval between two inequalities, such as `x > 3 and x < 5`.

    Returns:
        None for other texts; `x < 3 and x > 5` is one of them, by which either is meant.
    """
    parts = _AND.split(text)
    sides = [side for part in parts if (side := _interval(part.strip())) is not None]
    if not len(parts) == len(sides) == 2 or sides[0].name != sides[1].name:
        return None
    low, high = sorted(sides, key=lambda side: side.items[1] != r"\infty")
    if low.items[1] != r"\infty" or high.items[0] != r"-\infty":
        return None
    begin, end = math_numbers.read(low.items[0]), math_numbers.read(high.items[1])
    if begin is None or end is None or begin.value >= end.value:
        return None
    return Shape("tuple", (low.items[0], high.items[1]), low.name, low.frame[0] + high.frame[1])


_DOWN = (">", r"\ge")


def _turned(sign: str) -> str:
    return {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}[sign]


def _matrix(body: str, transposed: bool) -> Shape:
    rows = [
        [cell.strip() for cell in row.split("&")]
        for row in re.split(r"\\cr(?![a-z])(?:\s*\[[^\]]*\])?", body)
        if row.strip()
    ]
    if not rows or len({len(row) for row in rows}) != 1:
        return Shape("leaf", (body,))
    if transposed:
        rows = [list(column) for column in zip(*rows, strict=True)]
    return Shape("matrix", tuple(c for row in rows for c in row), frame=f"{len(rows)}x{len(rows[0])}")


def _split_or(text: str) -> list[str]:
    parts = [p.strip() for piece in _OR.split(text) for p in split(piece, ",")]
    return (
        [p for p in parts if p]
        if not re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text.replace(" ", "")) or ", " in text
        else [text]
    )


def split(text: str, mark: str, *, grouped: bool = True) -> list[str]:
    """Split at `mark` outside all brackets, and unless told otherwise not within 1,000."""
    parts, depth, begin = [], 0, 0
    i = 0
    while i < len(text):
        char = text[i]
        if char == "\\" and text[i : i + 2] in (r"\{", r"\}"):
            depth += 1 if text[i + 1] == "{" else -1
            i += 2
            continue
        if text.startswith((r"\begin", r"\langle"), i):
            depth += 1
        elif text.startswith((r"\end", r"\rangle"), i):
            depth -= 1
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == mark and depth <= 0 and not (mark == "," and grouped and _thousands(text, i)):
            parts.append(text[begin:i].strip())
            begin = i + 1
        i += 1
    return [*parts, text[begin:].strip()]


def _thousands(text: str, i: int) -> bool:
    """True if the comma at `i` groups digits, as in 1,000 but not in 1, 000 or (1,200) of a pair."""
    before, after = (
        re.search(r"(?<![\d.])\d{1,3}(?:,\d{3})*$", text[max(0, i - 24) : i]),
        re.match(r"\d{3}(?!\d)", text[i + 1 : i + 5]),
    )
    return before is not None and after is not None and before[0] != "0"


def _closes(text: str, begin: int) -> bool:
    """True if the bracket at `begin` closes at the end of the text."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False
