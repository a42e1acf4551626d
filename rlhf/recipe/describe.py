"""Words for types and values, so that a message about a recipe needs no knowledge of Python."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo

from rlhf.catalog import CATALOG
from rlhf.registry import section_of_type

_PLAIN: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    None: "null",
    type(None): "null",
    Any: "any value",
}

_BOUNDS: tuple[tuple[Any, str, str], ...] = (
    (annotated_types.Ge, "ge", "at least {}"),
    (annotated_types.Gt, "gt", "more than {}"),
    (annotated_types.Le, "le", "at most {}"),
    (annotated_types.Lt, "lt", "less than {}"),
    (annotated_types.MinLen, "min_length", "with at least {} entries"),
    (annotated_types.MaxLen, "max_length", "with at most {} entries"),
    (annotated_types.MultipleOf, "multiple_of", "a multiple of {}"),
)

_SEQUENCES = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping)


def expected(annotation: Any) -> str:
    """Say what a value of type `annotation` looks like in YAML: `a whole number, at least 1`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return ", ".join([expected(args[0]), *_bounds(args[1:])])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(expected(a) for a in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(_literal(a) for a in args) if len(args) > 1 else _literal(args[0])
    if (origin or annotation) in _SEQUENCES:
        return _expected_list(args)
    if (origin or annotation) in _MAPPINGS:
        return f"a mapping of names to {expected(args[1])}" if len(args) == 2 else "a mapping"
    return _expected_class(annotation)


def given(value: Any) -> str:
    """Description of a given value, with its type where that is not plain to see."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{_short(value)}' (text)"
    if isinstance(value, float) and value.is_integer():
        return f"{value!r} (no whole number: write {value:.0f})"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'no keys'}"
    if isinstance(value, list | tuple):
        return f"a list, {_short(repr(list(value)))}"
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _expected_list(args: tuple[Any, ...]) -> str:
    if not args:
        return "a list"
    if len(args) == 2 and args[1] is not Ellipsis:
        return f"a list of two: {expected(args[0])}, {expected(args[1])}"
    if len(args) > 2:
        return f"a list of {len(args)}: " + ", ".join(map(expected, args))
    return f"a list, each {expected(args[0])}"


def _expected_class(annotation: Any) -> str:
    section = section_of_type(annotation)
    if section:
        return f"a mapping with kind: {', '.join(CATALOG[section])}"
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return "one of " + ", ".join(_literal(member.value) for member in annotation)
    return f"the settings of {getattr(annotation, '__name__', annotation)}"


def _literal(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _bounds(metadata: Iterable[Any]) -> list[str]:
    texts: list[str] = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            texts += _bounds(item.metadata)
            continue
        texts += [text.format(getattr(item, name)) for kind, name, text in _BOUNDS if isinstance(item, kind)]
    return texts
