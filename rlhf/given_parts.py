"""Live Python objects given as parts of a run, named by kinds `python:NAME`.

A recipe that is written down holds these names. They mean something only while a program gives the objects again: what
is defined in a script or a notebook cannot be imported by another program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rlhf.errors import RecipeError, nearest

PREFIX = "python:"
_PARTS: ContextVar[Mapping[str, Any] | None] = ContextVar("given_parts", default=None)


@contextmanager
def given(parts: Mapping[str, Any]) -> Iterator[None]:
    """Context in which `python:NAME` names `parts[NAME]`, also in threads that inherit it."""
    token = _PARTS.set(dict(parts))
    try:
        yield
    finally:
        _PARTS.reset(token)


def find(kind: str, where: str) -> Any:
    """Return the object that `kind` names. Raises RecipeError where this program has not given it."""
    parts, name = _PARTS.get() or {}, kind.removeprefix(PREFIX)
    if name not in parts:
        raise RecipeError(
            "this part was given by a Python program, and cannot be imported",
            where=where,
            got=kind,
            expected="a program that gives it again",
            hint=nearest(name, parts)
            or f"from Python: rlhf.train(resume=RUN, {_argument(name)}), or rlhf.evaluate(RUN, {_argument(name)})",
        )
    return parts[name]


def name_of(part: object) -> str | None:
    """Return the name under which `part`, or its class, was given; None where neither was."""
    parts = _PARTS.get() or {}
    return next((name for name, one in parts.items() if one is part or one is type(part)), None)


def is_given(part: object) -> bool:
    """True if this very object was given, so that no keys describe it."""
    return any(one is part for one in (_PARTS.get() or {}).values())


def _argument(name: str) -> str:
    section, _, rest = name.partition(".")
    return f"rewards={{'{rest}': ...}}" if section == "rewards" else f"{section}=..."


def note(text: str) -> str:
    """Recipe text headed by a list of the parts that a program has to supply again."""
    kinds = dict.fromkeys(re.findall(rf"(?<![\w.]){PREFIX}[\w.-]+", text))
    if not kinds:
        return text
    arguments = ", ".join(_argument(kind.removeprefix(PREFIX)) for kind in kinds)
    return f"# Has parts of a Python program: goes on with rlhf.train(resume=THIS_FOLDER, {arguments})\n{text}"
