"""Digests of the Python that a recipe names: rewards, environments, agents, tools and programs of the user's own."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf import given_parts
from rlhf.build.resume import recorded
from rlhf.digests import mark_of
from rlhf.errors import RlhfError
from rlhf.recipe import Recipe
from rlhf.recipe.model import values_of


def code_digests(values: Mapping[str, Any]) -> dict[str, str]:
    """Return file name and SHA-256 of the Python behind each key of a recipe or suite that names some.

    A file or a module is taken whole, without what it imports; of a part that a program has given, its own source.

    Args:
        values: the recipe or suite, as plain values.
    """
    return {key: digest for key, value in _texts(values) if (digest := _digest(value, key))}


def caution_changed_code(folder: Path, recipe: Recipe, say: Callable[[str], None]) -> None:
    """Print a caution for each part whose code is not the one that the run in `folder` began with."""
    for name in changed_code(recorded(folder, "code"), code_digests(values_of(recipe))):
        say(
            f"caution: {name} has changed since the run began: steps before and after this resume are not "
            f"comparable; put the file back, or start a new run, to compare them"
        )


def changed_code(record: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """File and key of each digest that `record` has otherwise: `judge.py (rewards.right.kind)`."""
    return [f"{text.partition(' sha256:')[0]} ({key})" for key, text in now.items() if record.get(key, text) != text]


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each string of plain values with its dotted key."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _texts(one, f"{path}.{index}")


def _digest(value: str, key: str) -> str:
    """Name and digest of the code that a value names; empty where it names none that can be read."""
    source, _, name = value.rpartition(":")
    with suppress(OSError, TypeError, ValueError, ImportError, RlhfError):  # no source: a notebook, or compiled code
        if value.startswith(given_parts.PREFIX):
            part = given_parts.find(value, key)
            text = inspect.getsource(part if inspect.isroutine(part) or inspect.isclass(part) else type(part))
            return f"{value.removeprefix(given_parts.PREFIX)} sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        path = Path(source if source.endswith(".py") else value)
        if path.suffix != ".py" and name.isidentifier() and key.rpartition(".")[2] == "kind":
            found = importlib.util.find_spec(source)
            path = Path(found.origin or "") if found else path
        if path.suffix == ".py" and path.is_file():
            return f"{path.name} sha256:{mark_of(path).sha256[:16]}"
    return ""
