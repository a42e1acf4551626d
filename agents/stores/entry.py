"""An entry of a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """Provenance of an entry.

    Attributes:
        task: id of the task whose episode left it.
        split: that this task was drawn from.
    """

    task: str
    split: str


@dataclass(frozen=True, slots=True)
class Entry:
    """Memory entry.

    Attributes:
        id: a number that is never given again, also after the entry is gone.
        kind: what sort of memory it is: a note, a case, a fact.
        text: what it says.
        fields: whatever else belongs to it; plain JSON values.
        origin: the training episode that left it.
        version: 1 when it is new, one more with every change.
    """

    id: int
    kind: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    origin: Origin = Origin("", "")
    version: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """An entry that a search found, and how well it fits: BM25 by words, cosine by vectors."""

    entry: Entry
    score: float


@dataclass(frozen=True, slots=True)
class Link:
    """Link from an entry to another."""

    source: int
    target: int
    relation: str = ""
