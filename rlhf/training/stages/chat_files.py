"""Chats in files: messages, ShareGPT's conversations, prompts with completions, and plain text, read strictly."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from environments.tasks.dataset_files import Row, read
from rlhf.data import Role
from rlhf.errors import EnvError, RecipeError, nearest
from rlhf.training.stages.chat_messages import ChatMessage, Line, json_of, keys_of, messages_of, role_of
from rlhf.training.stages.chat_settings import Chats

#: Columns that are taken where the recipe names none, the first that is there.
_MESSAGES = ("messages", "conversations", "conversation", "chat", "dialogue")
_PROMPTS = ("prompt", "instruction", "question", "problem", "query", "input")
_COMPLETIONS = ("completion", "response", "answer", "output", "solution")
_TEXTS = ("text",)
#: Cells of tables that hold nothing.
_EMPTY = ("", "null", "none", "nan")


@dataclass(frozen=True, slots=True)
class Chat:
    """Row of a chat file.

    Attributes:
        number: its line, or its number from 1 where a file has no lines.
        messages: the last of them the assistant's; empty where the row is plain text.
        tools: functions that may be called.
        text: of a row that is learnt as it is.
    """

    number: int
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str = ""

    @property
    def texts(self) -> Iterator[str]:
        """Everything in it: contents of messages, calls, and the plain text, empty where there are messages."""
        yield from (said.content for said in self.messages)
        yield from (call.text for said in self.messages for call in said.calls)
        yield self.text


def read_chats(settings: Chats, where: str) -> Iterator[Chat]:
    """Read the rows of a file, each as a chat; at least one.

    Args:
        settings: with a `path`.
        where: YAML path of the key `data`, for errors.

    Raises:
        RecipeError: the file, a column, or a row cannot be used; the row is named by its line.
    """
    assert settings.path is not None
    form: _Form | None = None
    try:
        for i, (number, row) in enumerate(read(settings.path, f"{where}.path")):
            if settings.max_rows is not None and i >= settings.max_rows:
                break
            form = form or _Form.of(settings, where, number, row)
            yield form.chat(number, row)
    except EnvError as error:
        found = error.got, error.expected, error.hint
        raise RecipeError(error.what, where=error.where, got=found[0], expected=found[1], hint=found[2]) from error
    if form is None:
        raise RecipeError("there are no rows in this file", where=f"{where}.path", got=str(settings.path))


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of the rows of a file, told by its first row.

    Attributes:
        settings: recipe keys.
        where: YAML path of the key `data`.
        first: line of the first row.
        columns: that every row has: of messages, of plain text, or of a prompt and its completion.
        kind: `messages`, `text` or `prompt and completion`.
        keys: of a message, its role and its text.
    """

    settings: Chats
    where: str
    first: int
    columns: tuple[str, ...]
    kind: str
    keys: tuple[str, str] | None = None

    @classmethod
    def of(cls, settings: Chats, where: str, number: int, row: Row) -> _Form:
        """Find the columns in the first row. Raises RecipeError where they are not there."""
        named = {name: getattr(settings, name) for name in ("messages", "prompt", "completion", "text")}
        for key, name in named.items():
            for column in _fields(name) if name and key == "prompt" else filter(None, [name]):
                if column not in row:
                    raise _absent(f"{where}.{key}, {settings.path}", column, row)
        found = None if any(named.values()) else _found(row)
        if named["messages"]:
            found = "messages", (str(named["messages"]),)
        elif named["text"]:
            found = "text", (str(named["text"]),)
        elif named["prompt"] or named["completion"]:
            prompt = named["prompt"] or _first_of(_PROMPTS, row)
            completion = named["completion"] or _first_of(_COMPLETIONS, row, but=prompt)
            found = ("prompt and completion", (prompt, completion)) if prompt and completion else None
        if found is None:
            raise RecipeError(
                "these columns do not form a chat",
                where=f"{where}, {settings.path}, line {number}",
                got=", ".join(map(str, row)),
                expected=f"messages ({', '.join(_MESSAGES)}), a prompt with a completion, or text",
                hint=_hint(row) or "name the columns: data: {path: ..., prompt: COLUMN, completion: COLUMN}",
            )
        form = cls(settings, where, number, found[1], found[0])
        keys = keys_of(form.listed(form.line(number), row)[0]) if found[0] == "messages" else None
        return cls(settings, where, number, found[1], found[0], keys)

    def chat(self, number: int, row: Row) -> Chat:
        """Read a row. Raises RecipeError, with its line, where it cannot be used."""
        line = self.line(number)
        self.check_form(line, row)
        if self.kind == "text":
            text = row[self.columns[0]]
            if not isinstance(text, str) or not text.strip():
                raise line.wrong("this row has no tokens to train on", repr(text)[:80], "a text")
            return Chat(number, (), text=text)
        if self.kind == "messages":
            said = [self.said(line, item) for item in self.listed(line, row)]
        else:
            said = [*self.prompt(line, row), *self.completion(line, row)]
        system = row.get("system")
        if isinstance(system, str) and system.strip() and said[0].role is not Role.SYSTEM:
            said.insert(0, ChatMessage(Role.SYSTEM, system))
        asked = next((i for i, one in enumerate(said) if one.role is not Role.ASSISTANT), len(said))
        said = [*(replace(one, is_learnt=False) for one in said[:asked]), *said[asked:]]  # what answers nothing
        if len(said) > asked and not any(one.is_learnt for one in said):
            got = ", ".join(str(one.role) for one in said)
            raise line.wrong("this row has no tokens to train on", got, "a message of the assistant")
        while said[-1].role is not Role.ASSISTANT:
            said.pop()  # what nobody answers
        if all(one.role is Role.ASSISTANT for one in said):
            raise line.wrong("this chat has no question", "only the assistant's words", "something before them")
        return Chat(number, tuple(said), self.tools(line, row))

    def line(self, number: int) -> Line:
        assert self.settings.path is not None
        return Line(self.where, self.settings.path, number)

    def check_form(self, line: Line, row: Row) -> None:
        needed = [c for name in self.columns for c in (_fields(name) if "{" in name else [name])]
        missing = [column for column in needed if row.get(column) is None]
        if not missing:
            return
        if other := None if any(column in row for column in needed) else _found(row):
            raise line.wrong(
                "this row has another form than the first one",
                f"{other[0]}: {', '.join(other[1])}",
                f"{self.kind} as in line {self.first}: {', '.join(needed)}",
                "keep rows of each form in a file of their own, with a stage for each",
            )
        hint = "" if missing[0] in row else nearest(missing[0], map(str, row))
        raise line.wrong("a row lacks a column", ", ".join(map(str, row))[:200], missing[0], hint)

    def listed(self, line: Line, row: Row) -> Sequence[Mapping[str, Any]]:
        """Messages of a row, which a table may hold as JSON."""
        return line.items(row[self.columns[0]], self.columns[0])

    def said(self, line: Line, item: Mapping[str, Any], *, is_prompt: bool = False) -> ChatMessage:
        """Read a message of the form that the first one had."""
        message = line.message(item, self.keys)
        if message.role is Role.ASSISTANT and not message.content.strip() and not message.calls:
            got = repr(item.get((keys_of(item) or ("",))[-1]))[:80]
            raise line.wrong("the assistant says nothing", got, "a text, or tool_calls")
        return replace(message, is_learnt=False) if is_prompt else message

    def prompt(self, line: Line, row: Row) -> list[ChatMessage]:
        name = self.columns[0]
        value = name.format_map({n: row[n] for n in _fields(name)}) if "{" in name else messages_of(row[name])
        if isinstance(value, str) and value.strip():
            more = row.get("input") if name == "instruction" else None  # Alpaca's
            text = f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
            return [ChatMessage(Role.USER, text)]
        return [self.said(line, item, is_prompt=True) for item in line.items(value, name)]

    def completion(self, line: Line, row: Row) -> list[ChatMessage]:
        name = self.columns[1]
        value = messages_of(row[name])
        if isinstance(row[name], str) and isinstance(value, list) and role_of(value[0]) is not Role.ASSISTANT:
            value = row[name]  # messages that the policy is to write
        if isinstance(value, list):
            return [self.said(line, item) for item in line.items(value, name)]
        if isinstance(value, Mapping):
            raise line.wrong(f"{name} is no text", repr(value)[:80], "a text, or messages with role and content")
        text = str(value)
        if not text.strip() or value != value:  # NaN is what tables have in a cell that is empty
            raise line.wrong("the assistant says nothing", repr(value)[:80], f"a text in {name}")
        return [ChatMessage(Role.ASSISTANT, text, is_learnt=True)]

    def tools(self, line: Line, row: Row) -> tuple[Mapping[str, Any], ...]:
        name = self.settings.tools
        name = "functions" if name == "tools" and row.get(name) is None else name  # OpenAI's older name
        value = row.get(name)
        if isinstance(value, str):
            decoded = json_of(value)
            value = decoded if decoded is not None or value.strip().lower() in _EMPTY else value
        if not value:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
            raise line.wrong("tools are no list", repr(value)[:80], "a list of functions, or that in JSON")
        return tuple(value)


def _found(row: Row) -> tuple[str, tuple[str, ...]] | None:
    """Kind and columns of a row of one of the usual forms."""
    if (messages := _first_of(_MESSAGES, row)) is not None:
        return "messages", (messages,)
    prompt = _first_of(_PROMPTS, row)
    completion = _first_of(_COMPLETIONS, row, but=prompt)
    if prompt and completion:
        return "prompt and completion", (prompt, completion)
    text = _first_of(_TEXTS, row)
    return None if text is None else ("text", (text,))


def _first_of(names: Sequence[str], row: Row, but: str | None = None) -> str | None:
    there = (name for name in names if name != but and row.get(name) is not None and row[name] == row[name])  # no NaN
    return next(there, None)


def _fields(template: str) -> list[str]:
    """Columns of a prompt: those in braces, or the one that it names."""
    if "{" not in template:
        return [template]
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def _hint(row: Row) -> str:
    if {"chosen", "rejected"} <= row.keys():
        return "these are pairs, which a preference or a reward_model stage objective: pairwise: {file: ...}"
    known = (*_MESSAGES, *_PROMPTS, *_COMPLETIONS, *_TEXTS)
    unknown = (name for name in map(str, row) if name not in known)
    return next((f"'{name}': {found}" for name in unknown if (found := nearest(name, known))), "")


def _absent(where: str, name: str, row: Row) -> RecipeError:
    columns = list(map(str, row))
    hint = nearest(name, columns) or "name a column of the file"
    return RecipeError("no such column", where=where, got=name, expected=", ".join(columns), hint=hint)
