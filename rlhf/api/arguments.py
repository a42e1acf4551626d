"""Types of arguments that are no keys of a recipe: each check returns the value, or raises RecipeError."""

from __future__ import annotations

import json
import math
import numbers
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import RecipeError
from rlhf.recipe.describe import given

_SURROGATES = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")


def folder(value: Any, call: str, name: str, example: str) -> Path | None:
    """Path that was given as text or as a path; None stays None."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise _refused(value, call, name, "a folder, as text or as a path", repr(example))
    return Path(os.path.expanduser(value))


def text(value: Any, call: str, name: str, example: str) -> str:
    """Name that was given as text or as a path."""
    if not isinstance(value, str | os.PathLike):
        raise _refused(value, call, name, "text", repr(example))
    return str(value)


def names(value: Any, call: str, name: str, example: str) -> tuple[str, ...]:
    """Names given as one text or as a list of texts."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) and one for one in listed):
        raise _refused(value, call, name, "a name, or a list of names", repr(example))
    return tuple(listed)


def count(value: Any, call: str, name: str) -> int | None:
    """Whole number of at least 1, also one of numpy; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise _refused(value, call, name, "a whole number, at least 1", "1")
    return int(value)


def price(value: Any, call: str, name: str) -> float | None:
    """Number of at least 0; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
        raise _refused(value, call, name, "a number, at least 0", "0.5")
    return float(value)


def flag(value: Any, call: str, name: str) -> bool:
    """True or False: any other value would count as one of them unnoticed."""
    if not isinstance(value, bool):
        raise _refused(value, call, name, "True or False", "False")
    return value


def _refused(value: Any, call: str, name: str, expected: str, example: str) -> RecipeError:
    return RecipeError(
        "wrong value",
        where=f"{call}({name}=...)",
        got=given(value),
        expected=expected,
        hint=f"write {name}={example}, or leave it out for its default",
    )


def yaml_line(value: Any) -> str:
    """A plain value in one line of YAML: JSON, but for numbers that are not finite and characters of two surrogates."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{yaml_line(key)}: {yaml_line(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_line, value)) + "]"
    return _SURROGATES.sub(_one_escape, json.dumps(value))


def _one_escape(pair: re.Match[str]) -> str:
    return f"\\U{ord(json.loads(chr(34) + pair[0] + chr(34))):08x}"
