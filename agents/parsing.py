"""Parser of replies: an action, or a sentence on what was wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_THINK, _THINK_END = "<think>", "</think>"
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_OPEN_TAG = re.compile(r"<action>", re.IGNORECASE)
_ANY_TAG = re.compile(r"</?action>", re.IGNORECASE)
#: The line of a code fence; not one that holds the whole of it, as "```go north```".
_FENCE = re.compile(r"^\s*(?:~~~|```(?!\s*+[^`\s][^`]*+```\s*$))")
_PREFIX = re.compile(
    r"^(?:[-*>]\s+)?(?:(?:\*\*)?(?:next |final )?(?:action|command|answer)(?:\*\*)?\s*:\s*(?:\*\*)?)?", re.IGNORECASE
)
_QUOTES = {"```": "```", '"': '"', "'": "'", "`": "`", "“": "”", "‘": "’", "«": "»", "**": "**"}


@dataclass(frozen=True, slots=True)
class Parsed:
    """Result of reading a reply.

    Attributes:
        text: the action; empty where there is an error.
        error: what was wrong, as a sentence for the policy; None where nothing was.
        parts: see `Action.parts`.
    """

    text: str
    error: str | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Thoughts:
    """A reply, split at its reasoning.

    Attributes:
        thought: text inside `<think>`; None where there is no such tag.
        answer: everything after it.
        is_finished: False where `<think>` was never closed.
    """

    thought: str | None
    answer: str
    is_finished: bool = True


def split_thoughts(text: str) -> Thoughts:
    """Split at the last `</think>`; a lone closing tag counts, for templates that open the block."""
    before, closed, after = text.rpartition(_THINK_END)
    opened = _THINK in (after if closed else text)
    if opened:
        return Thoughts((after if closed else text).partition(_THINK)[2].strip(), "", is_finished=False)
    if not closed:
        return Thoughts(None, text)
    return Thoughts(before.replace(_THINK, "").replace(_THINK_END, "").strip(), after)


def parse_action(
    text: str,
    admissible: Sequence[str] = (),
    *,
    is_tagged: bool = False,
    is_strict: bool = False,
    was_cut: bool = False,
    max_chars: int = 200,
) -> Parsed:
    """Read the action in `text`, which holds no reasoning any more. Never raises.

    Tolerant: what is inside the last `<action>` tag, or else the last line with anything on it, without code fences,
    quotes and an `Action:` in front, with white space collapsed. Where the possible actions are known, case does not
    matter and their own spelling is returned; what is none of them is left to the environment to judge.

    Strict: the text without surrounding white space, on one line, and exactly one tag if tagged.

    Args:
        text: what the policy said.
        admissible: possible actions, where they are known.
        is_tagged: whether `<action>...</action>` was asked for.
        is_strict: whether the text must be in the format to the letter.
        was_cut: whether the reply ended at its token limit.
        max_chars: longest action.
    """
    found = _strict(text, is_tagged) if is_strict else _tolerant(text, admissible, is_tagged, was_cut)
    if found is None:
        cut = "was cut off before its end and " if was_cut else ""
        what = "contains no <action>...</action>" if is_tagged else "is not one line of text"
        return Parsed("", _sentence(f"your reply {cut}{what}", is_tagged))
    if not found:
        return Parsed("", _sentence("your action is empty", is_tagged))
    if len(found) > max_chars:
        problem = f"your action has {len(found)} characters, at most {max_chars} are allowed"
        return Parsed("", _sentence(problem, is_tagged))
    return Parsed(found)


def how_to_answer(is_tagged: bool) -> str:
    """Instruction on the format of an action."""
    return "Write the action as <action>...</action>." if is_tagged else "Write the action alone, on one line."


def _sentence(problem: str, is_tagged: bool) -> str:
    return f"No action was taken: {problem}. {how_to_answer(is_tagged)}"


def _strict(text: str, is_tagged: bool) -> str | None:
    text = text.strip()
    if is_tagged:
        match = _TAGGED.fullmatch(text)
        if match is None or _ANY_TAG.search(match[1]):
            return None
        text = match[1].strip()
    return None if "\n" in text or "\r" in text else text


def _tolerant(text: str, admissible: Sequence[str], is_tagged: bool, was_cut: bool) -> str | None:
    tags = _TAGGED.findall(text)
    opened = _OPEN_TAG.split(text)
    if tags:
        return _last_line(_OPEN_TAG.split(tags[-1])[-1], admissible)
    if len(opened) > 1:  # the closing tag is missing: forgotten, or cut off with the end of the action
        return None if was_cut else _last_line(opened[-1], admissible)
    line = _last_line(text, admissible)
    if is_tagged and line and line not in admissible:
        return None
    return line


def _last_line(text: str, admissible: Sequence[str]) -> str:
    for line in reversed(text.splitlines()):
        bare = " ".join(_ANY_TAG.sub(" ", line).split())
        if bare and not _FENCE.match(line):
            known = _spelling(bare, admissible)
            behind = _PREFIX.sub("", bare, count=1).strip()
            is_verb = behind != bare and _begins_with_a_verb(bare, admissible)
            cleaned = _unquoted(bare if is_verb and not _begins_with_a_verb(behind, admissible) else behind)
            if known or cleaned:
                return known or _spelling(cleaned, admissible) or cleaned
    return ""


def _begins_with_a_verb(text: str, admissible: Sequence[str]) -> bool:
    """True if the first word is that of an action: `answer: Vinland` is meant as one where `answer[Bob]` is one."""
    verb = re.match(r"\w+", text)
    return verb is not None and any(re.match(rf"{verb[0]}\b", action, re.IGNORECASE) for action in admissible)


def _unquoted(text: str) -> str:
    for left, right in _QUOTES.items():
        inside = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and inside.strip() and left not in inside:
            return inside.strip()
    return text


def _spelling(text: str, admissible: Sequence[str]) -> str | None:
    """Return the possible action that `text` means, in its own spelling."""
    if text in admissible:
        return text
    meant = (text.casefold(), text.rstrip(".!").casefold())
    return next((a for a in admissible if " ".join(a.split()).casefold() in meant), None)
