"""Functions or a class of one's own as tools: docstrings and type hints say what a call looks like.

    def price(name: str) -> int:
        "What a thing costs, by its name."
        return PRICES[name]

A docstring may go on with a list of the arguments in the form of Google (`Args:`), NumPy (`Parameters`, underlined) or
Sphinx (`:param name: text`). The functions run in the process of the run, with arguments that a model chose. Of a
class each attempt has an object of its own, whose methods are its tools.
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
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MethodType
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError, validate_call
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from rewards.answers.calls import ANSWERS, tool_call
from rlhf.data import Task
from rlhf.errors import EnvError, boundary, nearest

#: Longest result that an agent reads, in characters.
_MOST_SHOWN = 2_000
#: Methods of a class that are no tools, and how many arguments they are given, itself among them.
_HOOKS = (("reset", 2), ("reward", 2), ("close", 1))
_FORM = "Class(), and where there are such methods reset(self, task), reward(self, answer), close(self)"
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


@dataclass(frozen=True)
class Toolbox:
    """Tools of a file, shared by all attempts.

    Attributes:
        tools: functions, or the methods of `cls`, by their names.
        cls: class of which each attempt has an object of its own; None where the tools are functions.
    """

    tools: Mapping[str, Tool]
    cls: type | None = None

    def begun(self, task: Task) -> AttemptTools:
        """Make the tools of one attempt; a class is instantiated for it, and its `reset` given the task."""
        if self.cls is None:
            return AttemptTools(self.tools)
        held = self.cls()
        try:
            said = held.reset(task) if hasattr(held, "reset") else None
        except BaseException:
            if hasattr(held, "close") and not inspect.iscoroutinefunction(held.close):  # there is no episode to do it
                with suppress(Exception):
                    held.close()
            raise
        tools = {k: replace(tool, function=tool.function.__get__(held, self.cls)) for k, tool in self.tools.items()}
        return AttemptTools(tools, held, "" if said is None else str(said))


@dataclass(frozen=True)
class AttemptTools:
    """Tools of one attempt.

    Attributes:
        tools: by their names.
        held: object whose methods they are; None where they are functions.
        said: what its `reset` returned, for the agent to read; empty for nothing.
    """

    tools: Mapping[str, Tool]
    held: Any = None
    said: str = ""

    @property
    def is_judge(self) -> bool:
        """True if the object has a method `reward`, which judges the answer."""
        return hasattr(self.held, "reward")

    async def call(self, hook: str, *args: Any) -> Any:
        """Call an optional method of the object, plain or async; None where there is none."""
        found = getattr(self.held, hook, None)
        result = None if found is None else found(*args)
        return await result if inspect.isawaitable(result) else result


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
    """JSON form of a dataclass, pydantic model, date or the like; `str` of anything else."""
    return to_jsonable_python(value, fallback=str, bytes_mode="base64")


def _said(error: BaseException) -> str:
    with suppress(Exception):  # its __str__ may be the tool's own
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def _cut(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def file_of(tools: Path) -> tuple[Path, str]:
    """File, and name of the class in `FILE.py:Class`; the name is empty for the functions of a file."""
    file, colon, name = tools.name.partition(".py:")
    return (tools.with_name(f"{file}.py"), name) if colon else (tools, "")


def load_tools(tools: Path) -> Toolbox:
    """The public functions of `FILE.py`, or the methods of the class that `FILE.py:Class` names.

    The file is loaded once in a process, and again when it changes.

    Raises:
        EnvError: there is no such file, it raises, it has no such class, no tool, or one that does not say what it is.
    """
    path, name = file_of(tools)
    if path.suffix != ".py" or not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = nearest(path.name, beside) or "give its path, from here or beside the recipe"
        raise EnvError(
            "no Python file", where="environment.tools", got=str(path), expected="FILE.py or FILE.py:Class", hint=hint
        )
    return _loaded(path.resolve(), name, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _loaded(path: Path, cls: str, changed: int) -> Toolbox:
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
    if cls:
        return _of_class(cls, held, path)
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
    return Toolbox({key: _tool(key, function, path) for key, function in own.items()})


def _of_class(name: str, module: Mapping[str, Any], path: Path) -> Toolbox:
    where, cls = f"environment.tools, {path}", module.get(name)
    if not inspect.isclass(cls):
        classes = [key for key, one in module.items() if inspect.isclass(one) and not key.startswith("_")]
        hint = nearest(name, classes) or "name a class of the file, or the file alone for its functions"
        raise EnvError(f"no class is called '{name}'", where=where, got=name, expected=", ".join(classes), hint=hint)
    for what, function, n_given in (("", cls, 0), *((f".{hook}", getattr(cls, hook, None), n) for hook, n in _HOOKS)):
        if function is not None and not _takes(function, n_given):
            got = f"{name}{what}{inspect.signature(function)}"
            raise EnvError("this cannot be called as it is", where=where, got=got, expected=_FORM, hint="write it so")
    if inspect.iscoroutinefunction(getattr(cls, "reset", None)):
        raise EnvError(
            "reset cannot be async", where=where, got=f"async def reset of {name}", expected="def reset(self, task)"
        )
    public = [key for base in reversed(cls.__mro__[:-1]) for key in vars(base) if not key.startswith("_")]
    found = {key: inspect.getattr_static(cls, key) for key in public if key not in dict(_HOOKS)}
    methods = {key: held for key, held in found.items() if inspect.isfunction(getattr(held, "__func__", held))}
    tools = {key: _method(key, held, cls, path) for key, held in methods.items()}
    if not tools:
        got = ", ".join(found) or "nothing public"
        raise EnvError(f"the class {name} has no tools", where=where, got=got, expected="methods with a docstring")
    return Toolbox(tools, cls)


def _takes(function: Callable[..., Any], n: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * n)
    except TypeError:
        return False
    return True


def _method(name: str, held: Any, cls: type, path: Path) -> Tool:
    """Tool of a method as a class holds it, also of a static or class method, to be bound to an object."""
    if inspect.isfunction(held):
        return _tool(name, held, path, MethodType(held, cls))
    tool = _tool(name, held.__func__, path, held.__get__(None, cls))
    return replace(tool, function=type(held)(tool.function))


def _tool(name: str, function: Callable[..., Any], path: Path, bound: Any = None) -> Tool:
    """Tool of a function; `bound` is the method, whose first argument is not the agent's."""
    hinted: Any = bound or function
    where = f"{path}:{function.__code__.co_firstlineno}, {name}"
    told, *underlined = _UNDERLINED.split(inspect.cleandoc(function.__doc__ or ""))
    summary = " ".join(_SECTION.split(told, maxsplit=1)[0].split())
    if not summary:
        raise _unclear("a tool without a docstring", where, name, "a sentence that says what it does")
    if name.lower() in ANSWERS:
        raise _unclear("a tool with the name of an answer", where, name, f"another name than {', '.join(ANSWERS)}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise _unclear("a tool that is a generator", where, f"{name} with yield", "a function that returns its result")
    for key, parameter in inspect.signature(hinted).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise _unclear("a tool is called with named arguments", where, str(parameter), "each of them by its name")
        if parameter.annotation is parameter.empty:
            raise _unclear("an argument without a type hint", where, key, f"for instance {key}: str")
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
    """Schema without the titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema with `$ref` resolved in place, as chat templates show it; unchanged where a type contains itself."""
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
