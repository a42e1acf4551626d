"""Parser of tool calls and final answers in an action: JSON, tags, brackets, or a verb."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.data import Action

#: Names of calls that give an answer.
ANSWERS = ("answer", "submit")
#: A longer action is no call: nobody asked for one, and reading it costs time.
_MAX_CHARS = 100_000
_BRACKETS = re.compile(r"([A-Za-z_][\w-]{0,60})[ \t]*(?:\[(.*)\]|\((.*)\))\.?", re.DOTALL)
_TAGS = re.compile(r"<([A-Za-z_][\w-]{0,60})>(.*)</\1>", re.DOTALL)
_VERB = re.compile(r"([A-Za-z_][\w-]{0,60})(?:[ \t]+(?:is|for))?(?:[ \t]*[:=]|\s)\s*(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """Tool call.

    Attributes:
        name: of the tool.
        argument: its only argument as text; several as a JSON object.
    """

    name: str
    argument: str


def calls_in(action: Action, verbs: Collection[str] = ANSWERS) -> list[AnswerCall]:
    """Return the calls of an action that could be read, in order; none where it calls nothing. Never raises.

    A call is `{"name": "f", "arguments": {"x": 1}}` (as the agent `tools` records it, or with `tool` and `parameters`),
    `f[x]` or `f(x)`, and, of the names in `verbs`, also `<f>x</f>`, `f: x` and `f x`.
    """
    if action.error is not None:
        return []
    return [call for step in action.steps if (call := _call(step, verbs)) is not None]


def answer_in(action: Action) -> str:
    """Answer of an action: the argument of a call of `answer` or `submit`, else its text."""
    answers = [call.argument for call in calls_in(action) if call.name.lower() in ANSWERS]
    return answers[-1] if answers else action.text


def tool_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a call as the agent `tools` gives it: JSON of these two alone; None for any other text."""
    if not text.startswith("{") or len(text) > _MAX_CHARS:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_call = set(found) == {"name", "arguments"} and isinstance(found["arguments"], dict)
    return (found["name"], found["arguments"]) if is_call and isinstance(found["name"], str) else None


def _call(text: str, verbs: Collection[str]) -> AnswerCall | None:
    text = text.strip()
    if not text or len(text) > _MAX_CHARS:
        return None
    if text.startswith("{"):
        return _of_json(text)
    if (found := _BRACKETS.fullmatch(text)) is not None:
        return AnswerCall(found[1], (found[2] if found[2] is not None else found[3]).strip())
    known = {verb.lower(): verb for verb in verbs}
    if (found := _TAGS.fullmatch(text)) is not None and found[1].lower() in known:
        return AnswerCall(known[found[1].lower()], found[2].strip())
    if (found := _VERB.fullmatch(text)) is not None and found[1].lower() in known:
        return AnswerCall(known[found[1].lower()], found[2].strip())
    return _of_json(text[text.find("{") :]) if "{" in text else None


def _of_json(text: str) -> AnswerCall | None:
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
        name = found.pop("name", None) or found.pop("tool", None)
        given = found.get("arguments", found.get("parameters", found))
        text = _as_text(json.loads(given) if isinstance(given, str) else given)
    except (ValueError, RecursionError, AttributeError):
        return None
    return AnswerCall(name, text) if isinstance(name, str) and name else None


def _as_text(arguments: Any) -> str:
    value = next(iter(arguments.values())) if isinstance(arguments, Mapping) and len(arguments) == 1 else arguments
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
