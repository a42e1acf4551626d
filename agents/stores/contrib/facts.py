"""Facts of a text world as triplets: extraction by rules, and retrieval."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.stores.asking import short
from agents.stores.search import by_words
from rlhf.settings import STRICT

_GROUPS = ("subject", "relation", "object")
_MOST_CHARS = 60


@plain_dataclass(frozen=True, slots=True, order=True)
class Fact:
    """An edge of the graph: two things and what one is to the other, in lower case."""

    subject: str
    relation: str
    object: str

    @property
    def text(self) -> str:
        """The fact as it is shown and searched."""
        return f"{self.subject}, {self.relation}, {self.object}"

    @property
    def ends(self) -> tuple[str, str]:
        """The two vertices."""
        return (self.subject, self.object)


@runtime_checkable
class Extractor(Protocol):
    """Rules that read facts in an observation. A frozen dataclass: its fields are its recipe keys."""

    def __call__(self, observation: str) -> Sequence[Sequence[str]]:
        """Return (subject, relation, object) for each fact, in the order in which they are told."""

    def replaces(self, new: Sequence[str], old: Sequence[str]) -> bool:
        """True if `old` is out of date once `new` is known."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Pattern:
    """Facts that regular expressions find.

    A pattern names its groups `subject`, `relation` and `object`; letter case does not matter. Of the relations in
    `exclusive` a subject has one at a time: what is told last replaces the others.
    """

    patterns: tuple[str, ...] = Field(min_length=1)
    r"""Such as `(?P<subject>\w+) is (?P<relation>in|on) the (?P<object>\w+)`."""
    exclusive: tuple[str, ...] = ()
    """Relations that exclude each other, such as `in`, `on` and `held by`."""

    def __post_init__(self) -> None:
        """Refuse what is no pattern of a fact."""
        for i, pattern in enumerate(self.patterns):
            try:
                missing = [name for name in _GROUPS if name not in re.compile(pattern).groupindex]
            except re.error as error:
                raise ValueError(f"patterns[{i}] is no regular expression: {error}") from None
            if missing:
                raise ValueError(f"patterns[{i}] has no group {', '.join(missing)}, expected (?P<{missing[0]}>...)")

    def __call__(self, observation: str) -> Sequence[tuple[str, ...]]:
        """Every match of every pattern, by where it begins."""
        found = [match for pattern in self.patterns for match in re.finditer(pattern, observation, re.IGNORECASE)]
        found.sort(key=lambda match: match.start())
        return [tuple(match[name] or "" for name in _GROUPS) for match in found]

    def replaces(self, new: Sequence[str], old: Sequence[str]) -> bool:
        """True if both are single-valued facts of one subject."""
        if new[0] != old[0] or tuple(new) == tuple(old):
            return False
        single = {relation.lower() for relation in self.exclusive}
        return new[1] in single and old[1] in single


def fact(parts: object) -> Fact | None:
    """Fact of three texts; None unless there are three, non-empty and short. Commas go."""
    if not isinstance(parts, list | tuple) or len(parts) != len(_GROUPS):
        return None
    cleaned = [
        short(part.replace(",", " ") if isinstance(part, str) else "", _MOST_CHARS + 1).lower() for part in parts
    ]
    return Fact(*cleaned) if all(0 < len(part) <= _MOST_CHARS for part in cleaned) else None


def facts_of(given: Iterable[object]) -> list[Fact]:
    """The facts among what is given, as `fact` reads each, in order."""
    return [one for parts in given if (one := fact(parts)) is not None]


def around(facts: Sequence[Fact], query: str, *, k: int, depth: int, width: int) -> list[Fact]:
    """The `k` facts nearest to `query` in words (BM25), and what the graph has around them.

    From both ends of each fact that is found, up to `width` others with this end are taken, the newest first, and from
    their ends again, `depth` times in all. 0 takes none.

    Args:
        facts: oldest first.
        query: what is looked for.
        k: most facts that are found by words.
        depth: how often ends are gone out from.
        width: most facts that are taken at one end.
    """
    found = dict.fromkeys(facts[i] for i, _ in by_words(query, [f.text for f in facts], k))
    if not depth:
        return list(found)
    newest: dict[str, list[Fact]] = {}
    for one in reversed(facts):
        for end in dict.fromkeys(one.ends):
            newest.setdefault(end, []).append(one)
    seen: set[str] = set()
    at = list(dict.fromkeys(end for one in found for end in one.ends))
    for _ in range(depth):
        seen.update(at)
        further = [f for end in at for f in islice((f for f in newest[end] if f not in found), width)]
        found |= dict.fromkeys(further)
        at = list(dict.fromkeys(end for one in further for end in one.ends if end not in seen))
    return list(found)


def nearest_episodes(told: Mapping[int, Iterable[Fact]], found: Sequence[Fact], k: int) -> list[int]:
    """The `k` observations that told most of the facts that were found, best first.

    Of observation i, which told N facts, n of them among those found, the relevance is n / N · log N, so that one that
    says little does not come first for saying only that; of equal ones that with the greater n, then the later.
    """
    wanted = set(found)
    ranked = []
    for number, facts in told.items():
        all_of_it = set(facts)
        n, total = len(all_of_it & wanted), len(all_of_it)
        if n:
            ranked.append((n / total * math.log(total), n, number))
    return [number for _, _, number in sorted(ranked, reverse=True)[:k]]


def applied(facts: Iterable[Fact], new: Sequence[Fact], old: Iterable[Fact]) -> list[Fact]:
    """Facts, oldest first, after an observation added `new` and outdated `old`."""
    gone = {*old, *new}
    return [*(one for one in facts if one not in gone), *dict.fromkeys(new)]
