"""Plain values: is this YAML value of that type, and what is wrong if it is not."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlhf.errors import RecipeError, nearest
from rlhf.recipe.describe import expected, given
from rlhf.recipe.keys import without_none

ARBITRARY = ConfigDict(arbitrary_types_allowed=True)
CHANGE = "change the value, or remove the key for its default"


def join(path: str, key: str) -> str:
    """Return the YAML path of `key` inside `path`."""
    return f"{path}.{key}" if path else key


def convert_data(annotation: Any, value: Any, path: str) -> Any:
    """Return `value` as `annotation` wants it, or raise RecipeError at the element that is wrong."""
    # JSON in strict mode is the right strictness for YAML: lists may become tuples and text may become paths and
    # enumerations, but text never becomes a number, nor a number a truth value.
    if annotation is Any:
        return value
    try:
        text = json.dumps(value)
    except TypeError as error:
        raise wrong("wrong type", annotation, value, path) from error
    try:
        return TypeAdapter(annotation, config=ARBITRARY).validate_json(text, strict=True)
    except ValidationError as error:
        raise _of_type(error, annotation, value, path) from error


def validated(annotation: Any, made: Any, path: str) -> Any:
    """Check what an annotation asks of objects that are already built, such as how many there are."""
    try:
        return TypeAdapter(annotation, config=ARBITRARY).validate_python(made)
    except ValidationError as error:
        raise _of_type(error, annotation, made, path) from error


def _of_type(error: ValidationError, annotation: Any, value: Any, path: str) -> RecipeError:
    """Say what the type of one value refused, at the element that is wrong."""
    first = error.errors(include_url=False)[0]
    ranged = first["type"].startswith(("greater", "less", "too_", "multiple")) or first["type"] == "literal_error"
    for part in first["loc"]:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            annotation, value, path = _element(annotation, part), value[part], f"{path}[{part}]"
        elif isinstance(value, Mapping) and part in value:
            annotation, value, path = _element(annotation, -1), value[part], join(path, str(part))
    if first["type"] == "finite_number":
        return wrong("this number is not finite", annotation, value, path)
    return wrong("value out of range" if ranged else "wrong type", annotation, value, path)


def wrong(what: str, annotation: Any, value: Any, path: str) -> RecipeError:
    """Return the error for a value that is not of its type."""
    close = nearest(value, _choices(annotation)) if isinstance(value, str) else ""
    return RecipeError(what, where=path, got=given(value), expected=expected(annotation), hint=close or CHANGE)


def _element(annotation: Any, index: int) -> Any:
    """Return the type of one entry of a list, or with -1 of a mapping."""
    args = typing.get_args(without_none(annotation))
    if not args:
        return Any
    return args[index] if index < len(args) and args[index] is not ... else args[0]


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(a) for a in typing.get_args(annotation)]
    return [choice for a in typing.get_args(annotation) for choice in _choices(a)]
