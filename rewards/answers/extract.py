"""Answer extraction from text: in a box, in tags, in code fences, behind a phrase, or at its end.

Every function here is linear in the length of the text and raises nothing; answers are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from rewards.answers import math_numbers
from rewards.answers.denial import is_denied

#: Ways to find an answer, as recipes name them.
Where = Literal["auto", "boxed", "tag", "phrase", "last_number", "whole"]

#: Longer answers are no answers: nobody asked for them, and comparing them costs time.
MAX_ANSWER = 4_000
#: Only so much of the end of a text is searched, and only so many boxes of it, for formulas and numbers less.
MAX_TEXT = 200_000
_MAX_BOXES = 100
_TAIL = 20_000

_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s*([-+−]?\d+(?:[.,/]\d+)*)|\s+([A-Z])\b)")
_PHRASE = re.compile(
    r"(?:\banswers?\b[ \t]*(?:\([^()\n]{0,30}\)[ \t]*)?(?:(?:is|are|=|:|would be|must be|comes to)[ \t:*]*)+"
    r"|####|\b(?:result|solution)[ \t]*(?:is|are|:)"
    r"|(?:\btherefore|\bthus|\bhence|\bso|∴)[ \t,]+(?:the )?(?:answer|result|solution|value)[ \t]+(?:is|are|=))",
    re.IGNORECASE,
)
#: What a phrase says about an answer that was given before: `This answer is well known`, `The result is verified`.
_ABOUT_BEFORE = re.compile(r"\b(?:this|that|these|those|above)\s+(?:final\s+)?\Z", re.IGNORECASE)
_JUDGEMENT = re.compile(
    r"\s+(?:\w+ly\s+|indeed\s+|also\s+)?(?:correct|right|valid|verified|confirmed|clear|supported|based|justified|consistent"
    r"|reasonable|well[ -]known)(?=[.,;!]|\s*\Z|\s+(?:and|as|because|by|for|from|given|in|on|since|to|with)\b)",
    re.IGNORECASE,
)
_ABOUT = re.compile(r"\A(?:approx\.?|approximately|ca\.)\s+(?=[-−\d$\\(])")
#: What ends an answer within its line. Behind digits a comma may part values, unless a clause follows.
_END = re.compile(
    r"\n|(?<=[^\s.])\.(?=\s|$)|[!?](?=\s|$)|(?<![\d}])[,;](?=\s+[a-z]{3,})| because | since "
    r"|[,;](?=\s+(?:which|because|since|as|so|therefore|and (?:s?he|it|they|we))\b)"
    r"|\s\((?=(?:that is|which|because|since|as|so|i\.e\.)[\s,])"
)
_NUMBER = re.compile(  # with a ratio, or a time of the day
    r"(?<![\w.])(?<!\d,)[-+−]?(?:\d+(?::\d+)+(?:\s*[ap]\.?m\b\.?)?|\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.\d+|\d+)(?:[eE][-+]?\d+)?(?:/\d+)?(?:\s*\\?%)?"
)
_UNIT_BETWEEN = re.compile(r"\s*([a-zA-Z]+)\.?(?:\s*,)?\s+(?:and\s+)?")
_MONTH = re.compile(
    r"\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?\s*\Z"
)
_NOT = re.compile(r"\b(?:not|never|cannot)\b|n't\b|\\n(?:eq?|ot)\b|≠|!=")
#: Denied is what is more than the number that follows, and not that number: `There can't be more than 6`.
_BOUND = re.compile(r"\b(?:more|less|better|fewer)(?: \w+)? than[\s$*]*\Z")
_CLAUSE = re.compile(r"[.,:;\n]|\b(?:so|then|therefore|hence|thus|and)\b")
#: Denied phrases before the one that counts, at most.
_MAX_PHRASES = 10
#: What stands between numbers of which none is said to be the answer.
_LISTED = re.compile(r"[\s$]*(?:,|;|\b(?:or|and|to)\b|-)?[\s$]*(?:\b(?:or|and)\b)?[\s$]*", re.IGNORECASE)
_MATHS = re.compile(r"\$\$([^$]{1,1000})\$\$|\$([^$\n]{1,1000})\$|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.DOTALL)
#: What may stand between boxes that give the values of one answer together.
_JOINT = re.compile(r"(?:\s|\$|\\[\[\]()]|\\text\{|\\quad|\\,|[,;}]|\band\b|\bor\b)*\Z", re.IGNORECASE)


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`; nothing where thinking has begun (again) and not ended."""
    after = text[-MAX_TEXT:].rpartition("</think>")[2]
    return "" if "<think>" in after else after


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Begin, end and content of every closed, outermost `\boxed{...}`, or `\boxed 5`."""
    found: list[tuple[int, int, str]] = []
    place = 0
    for match in list(_BOX.finditer(text))[-_MAX_BOXES:]:
        if match.start() < place:
            continue
        if token := match[1] or match[2]:
            found.append((match.start(), place := match.end(), token))
            continue
        depth, i, limit = 1, match.end(), min(len(text), match.end() + MAX_ANSWER)
        while i < limit and depth:
            if text[i] == "\\":
                i += 1
            elif text[i] in "{}":
                depth += 1 if text[i] == "{" else -1
            i += 1
        if depth == 0:
            found.append((match.start(), i, text[match.end() : i - 1].strip()))
            place = i
    return found


def boxed(text: str) -> str | None:
    r"""Content of the last box; adjacent boxes, as in `\boxed{1} and \boxed{2}`, are a list."""
    found = boxes(text)
    if not found:
        return None
    values = [found[-1][2]]
    for (_, end, value), (begin, _, _) in zip(reversed(found[:-1]), reversed(found), strict=False):
        if begin - end > 60 or "\n" in text[end:begin] or not _JOINT.match(text[end:begin]):
            break
        if value not in values:
            values.append(value)
    inner = ", ".join(reversed(values))[:MAX_ANSWER]
    return boxed(inner) if boxes(inner) else inner or None


def tagged(text: str, tag: str = "answer") -> str | None:
    """Return what the last `<tag>...</tag>` holds, or None."""
    close, open_ = f"</{tag}>", f"<{tag}>"
    end = text.rfind(close)
    begin = text.rfind(open_, 0, end) if end >= 0 else -1
    inner = text[begin + len(open_) : end].strip() if begin >= 0 else ""
    return inner[:MAX_ANSWER] or None


def after_phrase(text: str, to: Literal["sentence", "line"] = "sentence") -> str | None:
    """Text after the last "the answer is", "Answer:", "####" or the like, to the end of its sentence or line.

    Phrases that are denied, as in "I doubt that the answer is", do not count; empty where there is no other. Remarks
    about an answer, as in "This answer is correct", count only where there is no other.
    """
    phrases = list(_PHRASE.finditer(text))[-_MAX_PHRASES:]
    stated = [found for found in reversed(phrases) if not is_denied(text[: found.start()])]
    if not stated:
        return "" if phrases else None
    last = next((found for found in stated if not _is_remark(text, found)), stated[0])
    rest = text[last.end() : last.end() + MAX_ANSWER].lstrip(" \t:*")
    if rest.startswith("\n"):
        rest = rest.lstrip()
    if to == "sentence":
        rest = _ABOUT.sub("", rest, count=1)
    if maths := _MATHS.match(rest):
        tail = rest[maths.end() :].partition("\n")[0]
        if not re.match(r"\s*(?:,|and|or)\s*[$\\]", tail):
            return maths[0][:MAX_ANSWER]
    if to == "line":
        return rest.partition("\n")[0].strip(" \t*`") or None
    line = _END.split(rest, maxsplit=1)[0]
    return line.strip(" \t*`")[:MAX_ANSWER] or None


def _is_remark(text: str, phrase: re.Match[str]) -> bool:
    """True if a phrase affirms an answer given before it; what denies one is no remark."""
    begin, end = phrase.start(), phrase.end()
    behind = text[end - 1 : end + 100] if phrase[0][-1].isspace() else text[end : end + 100]
    if phrase[0].rstrip()[-1] in ":=#*" or is_denied("", " is" + behind):
        return False
    if _ABOUT_BEFORE.search(text[max(0, begin - 40) : begin]):
        return re.match(r"\s+[a-z]{2}", behind) is not None
    return _JUDGEMENT.match(behind) is not None


def last_number(text: str) -> str | None:
    """Last number of the text, verbatim; None where there is none, or it is in a question or quote.

    >>> last_number("It takes 5 hours 30 minutes."), last_number("3 cups and 4 spoons")
    ('5 hours 30 minutes', '4')
    """
    tail = text[-_TAIL:]
    places = [found.span() for found in _NUMBER.finditer(tail)]
    if not places or re.match(r"\s*[?'\"`]", tail[places[-1][1] : places[-1][1] + 9]):
        return None
    begin, end = places[-1]
    first = _first_of_last(tail, places)
    whole = _quantity(tail, places[first][0], end) if first < len(places) - 1 else None
    return (whole or tail[begin:end])[:MAX_ANSWER]


def _first_of_last(tail: str, places: Sequence[tuple[int, int]]) -> int:
    """Index of the first number of the last quantity, which may have several units: `5 hours 30 minutes`."""
    first = len(places) - 1
    while first > 0 and _is_unit(tail[places[first - 1][1] : places[first][0]]):
        first -= 1
    return first


def _quantity(tail: str, begin: int, end: int) -> str | None:
    """Text of a quantity of several units, with that of its last number; None where the units do not go together."""
    unit = re.match(r"\s*[a-zA-Z]*", tail[end:])
    whole = tail[begin:end] + (unit[0] if unit else "")
    return whole if math_numbers.read(whole) else None


def only_number(text: str) -> str | None:
    """Last number of a claim, verbatim; None where there is none, it is denied, or it is one of a list.

    Quantities of several units are one: `2 hours and 30 minutes`. A day of a month is none.

    >>> only_number("12 apples at $2 cost $24"), only_number("not 7"), only_number("12 or 13")
    ('24', None, None)
    """
    tail = text[-_TAIL:]
    places = [(0, 0), *(found.span() for found in _NUMBER.finditer(tail))]
    if len(places) == 1:
        return None
    last, end = 1 + _first_of_last(tail, places[1:]), places[-1][1]
    begin, between = places[last][0], tail[places[last - 1][1] : places[last][0]]
    if (last > 1 and _LISTED.fullmatch(between)) or _MONTH.search(between) or is_denied(tail[:begin], tail[end:]):
        return None
    if _NOT.search(_CLAUSE.split(between)[-1]) and not re.search(r"\bbut\b", between) and not _BOUND.search(between):
        return None
    if last == len(places) - 1:
        return last_number(tail)
    return _quantity(tail, begin, end)


def _is_unit(between: str) -> bool:
    """True if a known unit, and no more than `and`, stands between two numbers."""
    unit = _UNIT_BETWEEN.fullmatch(between)
    return unit is not None and math_numbers.is_known(unit[1])


def last_maths(text: str) -> str | None:
    """Return the last formula between dollars or brackets; formulas in one breath are a list. Empty if denied."""
    found = list(_MATHS.finditer(text := text[-_TAIL:]))
    if not found:
        return None
    values = [found[-1]]
    for match in reversed(found[:-1]):
        between = text[match.end() : values[-1].start()]
        if not re.fullmatch(r"\s*(?:,|and|or|, and|, or)\s*", between):
            break
        values.append(match)
    if is_denied(text[: values[-1].start()], text[values[0].end() :]):
        return ""
    return ", ".join(next(g for g in m.groups() if g is not None) for m in reversed(values))[:MAX_ANSWER]


def find(text: str, where: Where, tag: str = "answer") -> str | None:
    """Return the answer in `text`, or None where there is none.

    With `auto` the first of these that is there counts, whatever it holds: tags, a box, a phrase such as "the answer
    is", the whole text where it is short and no prose, the last formula, what the last line says something is, the last
    number.
    """
    text = after_thinking(text)
    if where == "whole":
        return text.strip()[:MAX_ANSWER] or None
    if where == "boxed":
        return boxed(text)
    if where == "tag":
        return tagged(text, tag)
    if where == "phrase":
        return after_phrase(text) or None
    if where == "last_number":
        return last_number(text)
    inner = tagged(text, tag)
    if inner is not None:
        text = inner
    if (found := boxed(text)) is not None:
        return found
    if _BOX.search(text):  # a box that was never closed, or is empty
        return None
    if inner is not None:
        return inner if len(inner) < 400 else None
    for way in (after_phrase, _bare, last_maths, _said, only_number):
        if (found := way(text)) is not None:
            return found or None
    return None


_WORDS = re.compile(r"(?<![\\\w])[a-zA-Z\u00c0-\u024f\u0400-\u04ff\u4e00-\u9fff]{2,}")
_NOT_WORDS = re.compile(
    r"\\(?:text|mathrm|textbf)\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[a-z]*\}(?:\s*\{[clr| ]*\})?|\\[a-zA-Z]+"
)
#: Words that stand in formulas, as functions, between solutions or behind numbers.
_IN_FORMULAS = re.compile(
    r"and|or|pi|sqrt|cbrt|abs|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|ln|log|exp|inf|infty|infinity|oo|np|math|mod|percent",
    re.IGNORECASE,
)
_LAST = re.compile(r".*\b(?:is|are|be|equals)[ \t]+(not\b)?(.{1,200}?)[.!]?[ \t]*\Z")
_BOLD = re.compile(r".*\*\*([^*]{1,100})\*\*[^*]{0,100}\Z")


def _said(text: str) -> str | None:
    """Claim or bold text in the last line; empty where it is a denial."""
    line = text.strip()[-1_000:].rpartition("\n")[2]
    if (found := _LAST.match(line)) is not None:
        if found[1]:
            return ""
        if _bare(claim := found[2].strip("* ")):
            return "" if is_denied(line[: found.start(2)]) else claim
    bold = _BOLD.match(line)
    if bold is None or not _bare(bold[1]):
        return None
    return "" if is_denied(line[: bold.start(1) - 2], line[bold.end(1) + 2 :]) else bold[1].strip()


_WITH_UNIT = re.compile(
    r"\$?[-+−]?[\d.,/\s]*[\d.]\$?(?:\s*(?:×|\*)\s*10\^?[\d⁰¹²³⁴⁵⁶⁷⁸⁹⁻-]+)?\s*[^\W\d_][^\d=.,?'\"]{0,30}[.²³]?(?:\^\{?\d\}?)?"
)


def _bare(text: str) -> str | None:
    """Whole text where it is a bare answer: a formula, a number with its unit, a few words."""
    text = text.strip()
    if not text or len(text) > MAX_ANSWER or "\n" in text or re.search(r"[.!?]\s+\S|[$]", text.strip("$")):
        return None
    if re.match(r"\(?[A-J][).]\s", text) and len(text) < 200:
        return text  # a choice, with what it says
    others = [w for w in _WORDS.findall(_NOT_WORDS.sub(" ", text)) if not _IN_FORMULAS.fullmatch(w)]
    if not others or (len(others) <= 4 and not re.search(r"[\d\\=^]|\w \*\*|\b(?:is|are|was)\b", text)):
        return text
    return text if _WITH_UNIT.fullmatch(text) and len(others) <= 3 else None


def fenced(answer: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of every closed code fence, in order, in linear time.

    A line of n backticks, three or more, opens a block, with or without the name of a language, and a line of n or more
    without one closes it; lines of fewer are text of the block. Where a second one with a name comes first, the block
    begins anew there: what was open was never closed. Lines lose the indent of the fence, as in an item of a list.
    """
    language, width, indent = "", 0, 0
    lines: list[str] = []
    for line in answer.split("\n"):
        mark = line.strip()
        n = len(mark) - len(mark.lstrip("`"))
        named = mark[n:].strip()
        if n >= max(3, width) and "`" not in named:
            if width and not named:
                yield language, "".join(lines)
                width = 0
            else:
                language, width, lines = named, n, []
                indent = len(line) - len(line.lstrip(" "))
        elif width:
            lines.append(line[min(indent, len(line) - len(line.lstrip(" "))) :] + "\n")
