"""Recipe keys of a class, and the types that make objects of their own."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from rlhf.errors import RecipeError
from rlhf.registry import section_of_type


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a class: its type, and the factory of its default (None if required)."""

    name: str
    annotation: Any
    make_default: Callable[[], Any] | None


def keys_of(cls: Any, where: str = "") -> dict[str, Key]:
    """Return the keys of `cls` in the order of its declaration. Raises RecipeError where its types cannot be read."""
    try:
        if hasattr(cls, "__pydantic_fields__"):
            return {name: _key_of_pydantic(name, info) for name, info in cls.__pydantic_fields__.items()}
        if dataclasses.is_dataclass(cls):
            hints = typing.get_type_hints(cls, include_extras=True)
            return {f.name: _key_of_dataclass(f, hints[f.name]) for f in dataclasses.fields(cls) if f.init}
        return _keys_of_signature(cls)
    except NameError as error:
        raise unreadable_types(cls, where, error) from error


def unreadable_types(cls: Any, where: str, error: Exception) -> RecipeError:
    """Return the error for a class whose annotations name something that is not there when it runs."""
    return RecipeError(
        f"the types of {cls.__name__} cannot be read",
        where=where,
        got=str(error).splitlines()[0],
        expected="types that are imported where the class is defined",
        hint="import them outside `if TYPE_CHECKING:`",
    )


def is_settings(annotation: Any) -> bool:
    """True if `annotation` is a class whose fields are keys."""
    return inspect.isclass(annotation) and (
        dataclasses.is_dataclass(annotation) or hasattr(annotation, "__pydantic_fields__")
    )


def holds_objects(annotation: Any) -> bool:
    """True if a value of this type is, or holds, an object that the builder makes."""
    if section_of_type(annotation) or is_settings(annotation):
        return True
    return typing.get_origin(annotation) is not typing.Literal and any(
        holds_objects(a) for a in typing.get_args(annotation)
    )


def section_in(annotation: Any) -> str | None:
    """Return the first section that `annotation` mentions, or None."""
    found = (section_of_type(annotation), *(section_in(a) for a in typing.get_args(annotation)))
    return next((section for section in found if section), None)


def without_none(annotation: Any) -> Any:
    """Return what is left of `annotation` without bounds and without null."""
    if typing.get_origin(annotation) is typing.Annotated:
        return without_none(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


def _key_of_pydantic(name: str, info: FieldInfo) -> Key:
    # Bounds may stand in the annotation or in Field(...); pydantic has collected both as metadata.
    annotation = typing.Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    required = info.is_required()
    return Key(name, annotation, None if required else lambda: info.get_default(call_default_factory=True))


def _key_of_dataclass(field: dataclasses.Field[Any], annotation: Any) -> Key:
    if field.default_factory is not dataclasses.MISSING:
        return Key(field.name, annotation, field.default_factory)
    return Key(field.name, annotation, None if field.default is dataclasses.MISSING else lambda: field.default)


def _keys_of_signature(cls: Any) -> dict[str, Key]:
    if cls.__init__ is object.__init__:
        return {}
    hints = typing.get_type_hints(cls.__init__, include_extras=True)
    keys = {}
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        given_default = None if parameter.default is parameter.empty else (lambda p=parameter: p.default)
        keys[name] = Key(name, hints.get(name, Any), given_default)
    return keys
