"""A reward and all that it asks, each with its place in the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rewards.base import Capabilities
from rewards.combinators.of_part import OfPart
from rewards.verified import Verified, is_verifier
from rlhf.data import Task


def with_parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield YAML path and settings of a reward at `path`, and of everything nested in its keys.

    Args:
        path: of `value`; "" where its own keys are the first of their paths.
        value: a reward, or a mapping or list of rewards, which is walked and not given itself. So are numbers and texts
            not. A verifier stands where the reward does that asks it.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from with_parts(_key(path, name), inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from with_parts(f"{path}[{i}]", inner)
    elif not isinstance(value, type) and (is_dataclass(value) or callable(value)):
        yield path, value
        if isinstance(value, Verified):
            yield from with_parts(path, value.verifier)
        elif is_dataclass(value):
            for field in fields(value):
                yield from with_parts(_key(path, field.name), getattr(value, field.name))


def compared_in(path: str, reward: Any, task: Task | None) -> Iterator[str]:
    """Yield the path of each verifier in `reward`, and of each reward that needs the reference too.

    Args:
        path: of `reward`.
        reward: it says so by `needs_reference = True`; `False` speaks for all that its keys hold too.
        task: what is attempted: what is asked of other tasks only is left out. None for any task.
    """
    hidden: list[str] = []
    for place, part in with_parts(path, reward):
        if any(place.startswith(outer) for outer in hidden):
            continue
        needs = Capabilities(part).needs_reference
        if needs is False or (isinstance(part, OfPart) and task is not None and not part.asks(task)):
            hidden.append(f"{place}.")
        elif needs or (not isinstance(part, Verified) and is_verifier(part)):
            yield place


def _key(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
