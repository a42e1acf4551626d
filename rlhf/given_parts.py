"""Live Python objects given as parts of a run, named by kinds `python:NAME`.

A recipe that is written down holds these names. They mean something only while a program gives the objects again: what
is defined in a script or a notebook cannot be imported by another program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rlhf.errors import RecipeError

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
            "this part was passed by a Python program, and cannot be imported",
            where=where,
            got=kind,
            expected="a program that passes it again",
            hint=_renamed(name, parts)
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


def _renamed(name: str, parts: Mapping[str, Any]) -> str:
    """Hint for a part that a program gives under another name; empty where it gives none of the section."""
    section, _, own = name.partition(".")
    others = [part.partition(".")[2] for part in parts if part.startswith(f"{section}.")]
    if not own or not others:
        return ""
    return f"this run knows it as {own}, and you gave {', '.join(others)}: write {section}={{'{own}': {others[0]}}}"


def _argument(name: str) -> str:
    section, _, rest = name.partition(".")
    return f"rewards={{'{rest}': ...}}" if section == "rewards" else f"{section}=..."


def note(text: str) -> str:
    """Recipe text headed by a list of the parts that a program has to supply again."""
    if not (arguments := _arguments(text)):
        return text
    return f"# Has parts of a Python program: goes on with rlhf.train(resume=THIS_FOLDER{arguments})\n{text}"


def how_to_resume(folder: Path, *, in_python: bool = False) -> str:
    """Command that resumes the run in a folder, or the call where a program has to supply parts of it again."""
    try:
        arguments = _arguments((folder / "recipe.yaml").read_text("utf-8"))
    except OSError:
        arguments = ""
    in_python = in_python or bool(arguments)
    return f"rlhf.train(resume={str(folder)!r}{arguments})" if in_python else f"rlhf train --resume {folder}"


def _arguments(text: str) -> str:
    names = dict.fromkeys(kind.removeprefix(PREFIX) for kind in re.findall(rf"(?<![\w.]){PREFIX}[\w.-]+", text))
    rewards = ", ".join(f"'{name.removeprefix('rewards.')}': ..." for name in names if name.startswith("rewards."))
    others = [_argument(name) for name in names if not name.startswith("rewards.")]
    return "".join(f", {one}" for one in ([f"rewards={{{rewards}}}"] if rewards else []) + others)
