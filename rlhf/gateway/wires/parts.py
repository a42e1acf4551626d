"""Helpers shared by the wires: parsing of texts, tool calls and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agents.tool_calls import ToolCall
from rlhf.gateway.request import Refusal


def wrong(where: str, got: object, expected: str, do: str = "fix the request") -> Refusal:
    """The refusal of a field that cannot be read."""
    return Refusal(400, f"{where} cannot be read. Got: {str(got)[:200]}. Expected: {expected}. Do: {do}.")


def text_in(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Text of a message: a text, a list of parts that are texts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "a text, or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise wrong(where, f"a part of type {kind!r}", f"parts of type {', '.join(kinds)}", "send text alone")
    return "\n".join(part["text"] for part in content)


def arguments_in(value: Any, where: str) -> dict[str, Any]:
    """Arguments of a call: JSON in a text, or an object."""
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise wrong(where, value, "a JSON object, or one in a text")
    return found


def call_in(name: Any, arguments: Any, where: str) -> ToolCall:
    """A call that the history holds."""
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.name", name, "the name of a tool")
    return ToolCall(name, arguments_in(arguments, f"{where}.arguments"))


def tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as OpenAI's chat wire defines it, which is what chat templates know."""
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.name", name, "the name of a function")
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def listed(body: Mapping[str, Any], name: str, *, needed: bool = False) -> list[Any]:
    """A list of objects in the body; empty where it is left out."""
    found = body.get(name)
    if found is None and not needed:
        return []
    if not isinstance(found, list) or (needed and not found) or not all(isinstance(one, dict) for one in found):
        raise wrong(name, found, "a list of objects" + " with at least one" * needed)
    return found


def whole(body: Mapping[str, Any], *names: str, least: int = 1) -> int | None:
    """The first of some whole numbers that is given, at least `least`."""
    for name in names:
        if (value := body.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise wrong(name, value, f"a whole number, at least {least}")
            return value
    return None


def given(body: Mapping[str, Any], harmless: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Parameters of sampling that are not at the value, or one of the values, at which they change nothing."""
    found = {name: body[name] for name in harmless if body.get(name) is not None}
    return {name: value for name, value in found.items() if value not in harmless[name]}


def event(data: Mapping[str, Any], name: str = "") -> str:
    """One event of a stream."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def pieces(text: str, n: int = 24) -> list[str]:
    """A text in pieces of some characters, as a stream sends it."""
    return [text[i : i + n] for i in range(0, len(text), n)]
