"""Messages in rows of files, in the forms of OpenAI and of ShareGPT, read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.tool_calls import ToolCall
from rlhf.data import Role
from rlhf.errors import RecipeError, nearest

#: Names of roles in data, and ours; `function_call` is the assistant's.
_ROLES = {
    "system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "human": Role.USER,
    "assistant": Role.ASSISTANT, "gpt": Role.ASSISTANT, "bot": Role.ASSISTANT, "model": Role.ASSISTANT,
    "function_call": Role.ASSISTANT, "tool": Role.TOOL, "ipython": Role.TOOL, "function": Role.TOOL,
    "observation": Role.TOOL, "function_response": Role.TOOL,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """Message of a chat.

    Attributes:
        role: who speaks.
        content: the text, thoughts in `<think>` included.
        calls: of tools, by the assistant.
        is_learnt: whether its tokens are imitated, as those of the assistant are.
    """

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    is_learnt: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """Row of a file, read with errors that name it.

    Attributes:
        where: YAML path of the key that names the file.
        path: of the file.
        number: its line, or its number from 1 where a file has no lines.
    """

    where: str
    path: Path
    number: int

    def items(self, value: Any, column: str) -> Sequence[Mapping[str, Any]]:
        """Messages of a cell, unread."""
        value = messages_of(value)
        if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
            expected = "a list of messages: [{role: user, content: ...}, ...]"
            is_python = isinstance(value, str) and value.lstrip().startswith("[{'")
            hint = "this is a list as Python prints it: write the column with json.dumps" if is_python else ""
            raise self.wrong(f"{column} is no chat", repr(value)[:80], expected, hint)
        return value

    def message(self, item: Mapping[str, Any], form: tuple[str, str] | None = None) -> ChatMessage:
        """Read a message; `form` is that of the first one, its names of role and text."""
        keys = keys_of(item)
        if keys is None or (form is not None and keys != form):
            expected = " and ".join(form or ("role", "content"))
            what = "a message is of another form than the first one" if keys else "a message cannot be read"
            raise self.wrong(what, ", ".join(map(str, item)) or "nothing", expected)
        name, content = str(item[keys[0]]), item.get(keys[1])
        role = _ROLES.get(name.lower())
        if role is None:
            expected = ", ".join(_ROLES)
            raise self.wrong("nobody has this role", name, expected, nearest(name, _ROLES))
        text = self.content(content)
        older = item.get("function_call")
        older = json_of(older) if isinstance(older, str) else older
        older = older if isinstance(older, Mapping) and older.get("name") else None  # others are placeholders
        calls = self.calls(item.get("tool_calls") or older)
        if name.lower() == "function_call":
            calls, text = self.calls(json_of(text) or text), ""
        thought = item.get("reasoning_content")
        if role is Role.ASSISTANT and isinstance(thought, str) and thought.strip():
            text = f"<think>\n{thought.strip()}\n</think>\n\n{text}"
        is_learnt = role is Role.ASSISTANT and item.get("weight", 1) != 0
        return ChatMessage(role, text, calls if role is Role.ASSISTANT else (), is_learnt)

    def content(self, value: Any) -> str:
        """Text of a message: as it is, or in parts."""
        if value is None or isinstance(value, str):
            return value or ""
        parts = value if isinstance(value, list) else [value]
        if all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
            return "".join(p["text"] for p in parts)
        raise self.wrong("the content of a message is no text", repr(value)[:80], "text alone")

    def calls(self, value: Any) -> tuple[ToolCall, ...]:
        """Calls of tools: OpenAI's, with arguments as an object or as JSON, or name and arguments alone."""
        found, as_json = [], isinstance(value, str)
        value = (json_of(value) or value) if isinstance(value, str) else value
        for one in (value if isinstance(value, list) else [value]) if value else ():
            inner = one.get("function", one) if isinstance(one, Mapping) else {}
            arguments = inner.get("arguments", inner.get("parameters"))
            is_json = as_json or isinstance(arguments, str)  # a table's null stands for a key that the row has not
            arguments = json_of(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
            if not isinstance(inner.get("name"), str) or not isinstance(arguments, dict):
                expected = "{function: {name: ..., arguments: {...}}}"
                raise self.wrong("a call of a tool cannot be read", repr(one)[:80], expected)
            found.append(ToolCall(inner["name"], {k: v for k, v in arguments.items() if is_json or v is not None}))
        return tuple(found)

    def wrong(self, what: str, got: str, expected: str, hint: str = "") -> RecipeError:
        """Error of this row."""
        where = f"{self.where}, {self.path}, line {self.number}"
        return RecipeError(what, where=where, got=got, expected=expected, hint=hint or "correct or remove the row")


def keys_of(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """Names under which a message has its role and its text."""
    return next((keys for keys in (("role", "content"), ("from", "value")) if keys[0] in item), None)


def messages_of(value: Any) -> Any:
    """Messages of a cell: a list, JSON of one, or one message alone; other values unchanged."""
    found = json_of(value) if isinstance(value, str) and value.lstrip().startswith(("[", "{")) else value
    found = [found] if isinstance(found, Mapping) else found
    return found if isinstance(found, list) and found and all(role_of(one) is not None for one in found) else value


def role_of(item: Any) -> Role | None:
    """Role of a message; None if it is not one."""
    keys = keys_of(item) if isinstance(item, Mapping) else None
    if keys is None or not (keys[1] in item or item.get("tool_calls") or item.get("function_call")):
        return None
    return _ROLES.get(str(item[keys[0]]).lower())


def json_of(text: Any) -> Any:
    """Value of a JSON text; None where it is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
