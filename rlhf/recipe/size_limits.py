"""Bounds on YAML expansion: nested aliases and nested references."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.errors import RecipeError

#: Values that a file may hold with every alias and reference written out; so many characters count as one more.
MOST_VALUES, PER_VALUE = 10_000, 400
#: Levels of nesting.
MOST_LEVELS = 64

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def refuse_many_nodes(root: Any, where: str) -> None:
    """Raise RecipeError where a YAML document, with aliases expanded, has too many or too deep nodes.

    Args:
        root: PyYAML's node of the document, aliases as the same node again; None for an empty one.
        where: for the message.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: Any, level: int) -> int:
        if id(node) in open_nodes:
            raise refused(where, "an alias that contains itself")
        if level > MOST_LEVELS:
            raise refused(where, f"more than {MOST_LEVELS} levels")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            written = len(node.value) // PER_VALUE if isinstance(node.value, str) else 0
            sizes[id(node)] = 1 + written + sum(size(inner, level + 1) for inner in _inside(node))
            open_nodes.remove(id(node))
        return sizes[id(node)]

    if root is not None and (n := size(root, 0)) > MOST_VALUES:
        raise refused(where, f"{n:,} values with its aliases written out")


def refuse_long_references(values: Mapping[str, Any], where: str) -> None:
    """Raise RecipeError where values or their texts become too much with every `${key}` filled in."""
    sizes: dict[str, int] = {}
    open_paths: set[str] = set()

    def size(path: str, value: Any) -> int:
        if path in open_paths:
            return 0  # a circle, which is refused where references are filled in
        if path not in sizes:
            open_paths.add(path)
            if isinstance(value, Mapping):
                found = sum(size(_below(path, key), inner) for key, inner in value.items())
            elif isinstance(value, list):
                found = sum(size(_below(path, i), inner) for i, inner in enumerate(value))
            else:
                found = sum(size(*named) for named in _named(values, path, value)) if isinstance(value, str) else 0
                found += len(value) // PER_VALUE if isinstance(value, str) else 0
            sizes[path] = 1 + found
            open_paths.remove(path)
        return sizes[path]

    if (n := size("", values)) > MOST_VALUES:
        raise refused(where, f"{n:,} values and references to them, written out")


def _inside(node: Any) -> Iterator[Any]:
    for inner in node.value if isinstance(node.value, list) else ():
        yield from inner if isinstance(inner, tuple) else (inner,)


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _named(values: Mapping[str, Any], path: str, text: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each reference; `.key` is a sibling, each further dot one level up."""
    for reference in _REFERENCE.findall(text):
        name = reference.strip().replace("[", ".").replace("]", "")
        key = name.lstrip(".")
        above = path.split(".")[: -(len(name) - len(key))] if name != key else []
        parts = [*above, *key.split(".")]
        value: Any = values
        for part in parts:
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping) and part in value:
                value = value[part]
            else:
                break  # there is no such key, which is told where references are filled in
        else:
            yield ".".join(parts), value


def refused(where: str, got: str) -> RecipeError:
    """The error for a text that is too much."""
    return RecipeError(
        "the recipe is too large",
        where=where,
        got=got,
        expected=f"at most {MOST_VALUES:,} values, {MOST_VALUES * PER_VALUE:,} characters and {MOST_LEVELS} levels",
        hint="write the values out, without nested aliases",
    )
