"""Detection of denied choices: `The answer is not B`, `B is wrong`, `anything but B`, `neither A nor B`.

A denied letter is taken out of the text, so that whatever looks for an answer afterwards cannot find it. Every pattern
is bounded; what is denied in a way that none of them knows stays.
"""

from __future__ import annotations

import re

#: Stands where a denied letter stood; no pattern takes it for a letter.
GONE = "□"
#: More of a text than its end is not read.
_TAIL = 20_000

_LETTER = r"(?<![\w'])(?:[A-Z]|[a-z](?=\)))(?![\w'])"
_OPEN = r"(?:[(\[{*\"'`$]|\\boxed\{|\\text\w{0,2}\{|\\mathbf\{|\\\()"
_CLOSE = r"[)\]}*\"'`$]{0,6}"
#: What affirms although it has a word of denial in it.
_AFFIRMS = re.compile(
    r"\b(?:none|nothing|no(?: other)?(?: \w+)?|(?:not|cannot|can't|couldn't|won't)(?: \w+)? anything)"
    r"\s+(?:other than|but|except(?: for)?)\b"
    r"|\b(?:no|without(?: a| any)?|not|don't|never)\s+doubt\w*|\bnot only\b",
    re.IGNORECASE,
)
_NOT_WRONG = re.compile(r"(?:\bnot|n't)\s+(?:wrong|incorrect|false|mistaken)\b", re.IGNORECASE)
#: Words of denial that stand before what they deny.
_BEFORE = (
    r"(?:\bnot|n't|\bcannot|\bnever|\bneither|\bnor|\bhardly|\bunlikely|\bimpossible|\bdoubt\w*|\bdisagree|\bdeny|\bdenied"
    r"|\banything but|\ball but|\beverything but|\bany\w* (?:\w+ )?but|\bexcept(?: for)?|\bexcluding|\bbesides"
    r"|\bapart from|\bother than|\brather than|\binstead of|\bfar from|\bno way|\bno longer"
    r"|\bwrong|\bincorrect|\bfalse|\binvalid"
    r"|\b(?:rul\w+|cross\w*|strik\w+|throw\w*|threw) out|\beliminat\w+|\bexclud\w+|\breject\w*|\bdiscard\w*"
    r"|\bdismiss\w*|\bavoid\w*)"
)
#: Words that may stand between a word of denial and the letter: none denies B in `the one that is not red is B`.
_FILL = (
    rf"(?:\s++|{_OPEN}|[:,}}]|\b(?:(?:the|that|this|it|its|answer|choice|option|letter|one)\s+(?:is|was|be|would be|"
    r"could be|should be|must be|will be|can be)|it's|that's|the|an?|that|for|to|be|been|being|option|choice|answer|"
    r"letter|correct|right|best|final|true|case|think|believe|say|claim|agree|choose|chosen|pick|picked|select|selected|go|going|with|"
    r"either|necessarily|definitely|really|actually|certainly|possibly|likely|simply|exactly|quite|at all|my|our)\b)"
)
_VERB = (
    r"(?:is|was|are|were|'s|'re|being|seems?|looks?|appears?|sounds?|can|could|will|would|should|must|may|might|has|have|"
    r"had|do|does|did|to|be|been|as|which|that|clearly|certainly|definitely|obviously|simply|just|also|therefore|"
    r"actually|really|surely|probably|most|likely|both|all|thus|the|an?)"
)
#: Words of denial that stand behind.
_BEHIND = (
    r"(?:(?:is|was|are|were|does|do|did|can|could|will|would|should|must|may|might|has|have)(?:\s+(?:\w+ly|surely))?"
    r"(?:\s+not|n't)\b|cannot|can't|won't|is never|is no\b|fails?\b|failed\b"
    rf"|(?:{_VERB}\s++){{0,5}}(?:wrong|incorrect|false|invalid|impossible|mistaken|untrue|inaccurate|unlikely|"
    r"implausible|ruled out|eliminated|excluded|rejected|discarded|dismissed|crossed out|"
    r"out of the question|out\s*[.!]))"
)
_DENIED_BEFORE = re.compile(rf"({_BEFORE}(?:{_FILL}){{1,24}})({_LETTER})", re.IGNORECASE)
_DENIED_BEHIND = re.compile(
    rf"({_LETTER})(?={_CLOSE}(?i:(?:[\s:,—–-]|\(){{1,6}}{_BEHIND}|\s*+\?\s*+(?:no|nope|not|never)\b))"
)
_DENIED_AT_END = re.compile(rf"(?:{_BEFORE}|\bneither (?:is|are))(?:{_FILL}|\bequals?\b){{1,24}}\Z", re.IGNORECASE)
_DENIED_AT_BEGIN = re.compile(rf"{_CLOSE}[\s:,—–(-]{{1,6}}{_BEHIND}", re.IGNORECASE)
#: More of a text before or behind a claim is not read; what ends a clause ends it too.
_NEAR = 200
_OR = rf"{_CLOSE}\s*+,?\s*+(?:or|nor)\s+(?:{_FILL}){{0,3}}"
_ALSO_BEHIND = re.compile(rf"({GONE}(?:{_CLOSE}\s*+,\s*+(?:{_FILL}){{0,3}}{_LETTER}){{0,12}}{_OR})({_LETTER})")
_LISTED = re.compile(rf"{_LETTER}")
#: Letters of a list that are looked at from its end: no question has more choices.
_LETTERS = 26
_ALSO_BEFORE = re.compile(rf"({_LETTER})(?={_CLOSE}(?:\s*+,\s*+|\s*+,?\s*+(?:and|or|nor)\s+){_OPEN}?{GONE})")


def without_denied(text: str) -> str:
    """Return the end of `text` with every denied letter replaced by `GONE`; raises nothing."""
    text = text[-_TAIL:].replace("’", "'")
    text = _NOT_WRONG.sub(" right ", _AFFIRMS.sub(" ", text))
    text = _DENIED_BEFORE.sub(lambda m: m[0] if _is_word(m[2], m[1]) else m[1] + GONE, text)
    text = _ALSO_BEHIND.sub(lambda m: _LISTED.sub(GONE, m[1]) + GONE, text)
    behind = _DENIED_BEHIND.sub(GONE, text)
    for _ in range(_LETTERS):  # each pass reaches one letter further back in a list
        if behind == text:
            break
        text, behind = behind, _ALSO_BEFORE.sub(GONE, behind)
    return behind


def is_denied(before: str, behind: str = "") -> bool:
    """True if a claim is denied by the text before or behind it, in its clause; raises nothing.

    >>> is_denied("it cannot be "), is_denied("it is not odd, it is "), is_denied("", " is wrong")
    (True, False, True)
    """
    clause = re.split(r"[.,:;!?\n]", before[-_NEAR:].replace("’", "'"))[-1]
    clause = _NOT_WRONG.sub(" right ", _AFFIRMS.sub(" ", clause))
    return bool(_DENIED_AT_END.search(clause) or _DENIED_AT_BEGIN.match(behind[:_NEAR].replace("’", "'")))


def _is_word(letter: str, before: str) -> bool:
    """True if `I` or `a` is a word here; case is ignored for the words of denial alone."""
    return letter.islower() and not before.endswith("(")
