"""A reward and all that it asks, each with its place in the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any


def with_parts(path: str, reward: Any) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of a reward, which stands at `path`, and of everything that its keys hold."""
    yield path, reward
    for name, held in vars(reward).items() if is_dataclass(reward) else ():
        named: Any = [("", held)]
        if isinstance(held, Mapping):
            named = [(f".{key}", inner) for key, inner in held.items()]
        elif isinstance(held, tuple):
            named = [(f"[{i}]", inner) for i, inner in enumerate(held)]
        for under, inner in named:
            if is_dataclass(inner) and not isinstance(inner, type):
                yield from with_parts(f"{path}.{name}{under}", inner)
