"""Functions of a file of one's own as tools: their docstrings and type hints say what a call looks like.

    def price(name: str) -> int:
        "What a thing costs, by its name."
        return PRICES[name]

A docstring may go on with a list of the arguments in the form of Google (`Args:`), NumPy (`Parameters`, underlined) or
Sphinx (`:param name: text`). The functions run in the process of the run, with arguments that a model chose.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError, validate_call
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from rewards.answers.calls import ANSWERS, tool_call
from rlhf.errors import EnvError, boundary, nearest

#: Longest result that an agent reads, in characters.
_MOST_SHOWN = 2_000
#: Sections of a docstring that end its summary.
_SECTION = re.compile(
    r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$|^\s*:\w+", re.MULTILINE
)
#: Head of a section in NumPy's form.
_UNDERLINED = re.compile(r"^(\w[\w ]*)\n-{3,}[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(?::param\s+(?:[\w\[\], |.]+\s+)?)?(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """Function that an agent may call.

    Attributes:
        definition: its JSON schema, as agents and chat templates take it.
        function: checks arguments by their type hints, and is called with them; plain or async.
    """

    definition: Mapping[str, Any]
    function: Callable[..., Any]


def task_info(tools: Mapping[str, Tool]) -> dict[str, Any]:
    """Entries of `Task.info` that tell an agent of the tools, and that a reply without a call is the answer."""
    return {"tools": [tool.definition for tool in tools.values()], "plain_answer": True}


def call_in(action: str, tools: Mapping[str, Tool]) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the call of one of the tools that an action is; None for any other action."""
    call = tool_call(action) if tools else None
    return call if call is not None and call[0] in tools else None


async def result_of(tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """Result of a tool call as the agent reads it, and False if its arguments do not fit; never raises.

    An error of the tool itself is a result: the call was understood, and an agent is not to blame for a server that
    does not answer.
    """
    try:
        result = tool.function(**arguments)
        result = await result if inspect.isawaitable(result) else result
    except ValidationError as error:
        if error.title != tool.function.__qualname__:  # of data within the tool
            return _cut(f"Error: {_said(error)}"), True
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
        return _cut(f"Error: {'; '.join(wrong)}"), False
    except (Exception, SystemExit) as error:  # a tool of a command line ends itself, not the attempt
        return _cut(f"Error: {_said(error)}"), True
    try:
        return _cut(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)), True
    except Exception as error:  # also of a __str__ of its own
        return _cut(f"Error: the result cannot be shown: {_said(error)}"), True


def _plain(value: object) -> Any:
    """Dataclasses, models, dates and the like as JSON has them; a text of anything else."""
    return to_jsonable_python(value, fallback=str, bytes_mode="base64")


def _said(error: BaseException) -> str:
    with suppress(Exception):  # its __str__ may be the tool's own
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def _cut(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def load_tools(path: Path) -> Mapping[str, Tool]:
    """The public functions of a file, by their names; the file is loaded once in a process, and again when it changes.

    Raises:
        EnvError: there is no such file, it raises, it has no function, or one that does not say what it is.
    """
    if path.suffix != ".py" or not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = nearest(path.name, beside) or "give its path, from here or beside the recipe"
        raise EnvError("no Python file", where="environment.tools", got=str(path), expected="FILE.py", hint=hint)
    return _loaded(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _loaded(path: Path, changed: int) -> Mapping[str, Tool]:
    name = f"own_tools_{hashlib.sha256(str(path).encode()).hexdigest()[:10]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where type hints look for their names
    with boundary(EnvError, f"environment.tools, {path}", "fix the file: it raises when it is imported"):
        try:
            spec.loader.exec_module(module)
        except SystemExit as error:
            raise RuntimeError(f"SystemExit: {error}") from error
    held = vars(module)
    listed = held.get("__all__") or [key for key in held if not key.startswith("_")]
    functions = {key: held[key] for key in listed if inspect.isfunction(held.get(key))}
    own = {key: function for key, function in functions.items() if function.__module__ == name or "__all__" in held}
    if not own:
        raise EnvError(
            "this file has no tools",
            where=f"environment.tools, {path}",
            got=", ".join(key for key in held if not key.startswith("_"))[:200] or "nothing",
            expected="functions whose names begin with a letter",
            hint="write `def name(argument: str) -> str:` with a docstring",
        )
    return {key: _tool(key, function, path) for key, function in own.items()}


def _tool(name: str, function: Callable[..., Any], path: Path) -> Tool:
    where = f"{path}:{function.__code__.co_firstlineno}, {name}"
    told, *underlined = _UNDERLINED.split(inspect.cleandoc(function.__doc__ or ""))
    summary = " ".join(_SECTION.split(told, maxsplit=1)[0].split())
    if not summary:
        raise _unclear("a tool without a docstring", where, name, "a sentence that says what it does")
    if name.lower() in ANSWERS:
        raise _unclear("a tool with the name of an answer", where, name, f"another name than {', '.join(ANSWERS)}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise _unclear("a tool that is a generator", where, f"{name} with yield", "a function that returns its result")
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise _unclear("a tool is called with named arguments", where, str(parameter), "each of them by its name")
        if parameter.annotation is parameter.empty:
            raise _unclear("an argument without a type hint", where, key, f"for instance {key}: str")
    hinted: Any = function
    try:
        get_type_hints(function)
        schema = _inlined(TypeAdapter(hinted).json_schema(schema_generator=_Untitled))
        checked = validate_call(function)
    except (PydanticUserError, NameError, TypeError, ValueError) as error:
        raise _unclear("a type hint that has no form in JSON", where, str(error)[:200], "plain types") from error
    described = _arguments_in(told) | _underlined_arguments(dict(zip(underlined[::2], underlined[1::2], strict=True)))
    for key, field in schema["properties"].items():
        field.update({"description": described[key]} if key in described else {})
    return Tool({"type": "function", "function": {"name": name, "description": summary, "parameters": schema}}, checked)


def _arguments_in(told: str) -> dict[str, str]:
    """Descriptions of arguments in a docstring, below `Args:` or after `:param name:`, joined over lines."""
    found: dict[str, str] = {}
    inside, indent, last = False, 0, ""
    for line in told.splitlines():
        depth = len(line) - len(line.lstrip())
        is_param = line.lstrip().startswith(":param")
        if section := _SECTION.match(line):
            inside, indent, last = is_param or section[1] in ("Args", "Arguments", "Parameters"), 0, ""
            if not is_param:
                continue
        indent = indent or depth
        if inside and (depth <= indent or is_param) and (one := _ARGUMENT.match(line)):
            last = one[1]
            found[last] = one[2].strip()
        elif inside and last and line.strip():
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def _underlined_arguments(sections: Mapping[str, str]) -> dict[str, str]:
    """Descriptions of arguments in the sections of a docstring in NumPy's form, by the heads of these."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in "\n".join(sections.get(head, "") for head in ("Parameters", "Other Parameters")).splitlines():
        if line and not line[0].isspace():
            names = [name.strip() for name in line.partition(":")[0].split(",")]
        elif line:
            found |= {name: f"{found.get(name, '')} {line.strip()}".strip() for name in names}
    return found


class _Untitled(GenerateJsonSchema):
    """Schemas without titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with each type where it is used, as chat templates show it; as it was where a type holds itself."""
    types = schema.get("$defs", {})

    def within(node: Any, around: tuple[str, ...] = ()) -> Any:
        if isinstance(node, list):
            return [within(one, around) for one in node]
        if not isinstance(node, dict):
            return node
        name = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if name in types and name not in around:
            used = {key: value for key, value in types[name].items() if key != "title"}
            return within(used | {key: value for key, value in node.items() if key != "$ref"}, (*around, name))
        return {key: within(value, around) for key, value in node.items()}

    whole: dict[str, Any] = within({key: value for key, value in schema.items() if key != "$defs"})
    return schema if "#/$defs/" in json.dumps(whole, default=str) else whole


def _unclear(what: str, where: str, got: str, expected: str) -> EnvError:
    hint = "say it in the file, or begin the name of a function that is no tool with an underscore"
    return EnvError(what, where=where, got=got, expected=expected, hint=hint)
