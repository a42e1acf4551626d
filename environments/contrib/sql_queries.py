"""Cost limits of an SQL query, estimated from its words.

SQLite counts the steps in which it runs a query, and neither the work to compile it nor what a function does with a
long text.
"""

from __future__ import annotations

import re
from itertools import pairwise

from environments.core.normalise import words

#: Cost of a query from which on it is refused; one without named queries costs 1.
MOST = 1_000

#: Words before a bracket with which a query stays quick: functions of short values, and words of the language.
_QUICK = frozenset(
    words(
        "abs avg coalesce count iif ifnull length lower max min nullif round substr sum total upper "
        "all and as between by case distinct else except exists from group having in intersect join limit not on or "
        "order over partition select then union using values when where"
    )
)
_SLOW = frozenset({"glob", "like", "match", "regexp", "with"})
_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)|\w+|\S""", re.DOTALL)


def tokens(query: str) -> list[str]:
    """Lower-case tokens, names unquoted, strings as SQLite may read them: as names."""
    found = (token.lower() for token in _TOKEN.findall(query))
    return [
        token[1:-1] if token[0] in "'\"`[" and len(token) > 1 else token
        for token in found
        if not token.startswith(("--", "/*"))
    ]


def is_quick(query: str) -> bool:
    """True if a query's SQLite steps, whose number is bounded, are short ones.

    Those with patterns, other functions or named queries may not be.
    """
    found = tokens(query)
    called = {word for word, after in pairwise(found) if after == "(" and word[-1:].isalnum()}
    return called <= _QUICK and _SLOW.isdisjoint(found)


def cost(query: str) -> int:
    """Number of queries that SQLite runs, with named ones (WITH) expanded at each use.

    Rather more than fewer: where a name is given counts too, and so does a column of that name. Ten that each name the
    one before twice are more than a thousand. A name within itself, of a recursive query, counts once.

    Nothing of SQLite's own bounds this: eighteen that double take 2.6 s and 500 MB to compile, in which it calls an
    authorizer 40 times and a progress handler never (SQLite 3.40).
    """
    if "with" not in query.lower():
        return 1
    found, costs = tokens(query), dict[str, int]()
    for name, first, last in sorted(_named(found), key=lambda one: one[2]):
        own = 1 + sum(costs.get(word, 0) for word in found[first:last] if word != name)
        costs[name] = max(own, costs.get(name, 0))
        if own > MOST:
            return own
    return 1 + sum(costs.get(word, 0) for word in found)


def _named(found: list[str]) -> list[tuple[str, int, int]]:
    """Name, and first and last token, of each query that is named: `name (columns) AS MATERIALIZED (...)`."""
    ends = _ends(found)
    begins = {end: first for first, end in ends.items()}
    named = []
    for i, word in enumerate(found):
        first = i + 1
        while word == "as" and first < len(found) and found[first] in ("not", "materialized"):
            first += 1
        if word != "as" or i == 0 or first not in ends:
            continue
        at = begins.get(i - 1, i) - 1 if found[i - 1] == ")" else i - 1
        named.append((found[max(at, 0)], first, ends[first]))
    return named


def _ends(found: list[str]) -> dict[int, int]:
    """Closing place of each bracket; the end for an unclosed one."""
    ends, opened = {}, list[int]()
    for i, word in enumerate(found):
        if word == "(":
            opened.append(i)
        elif word == ")" and opened:
            ends[opened.pop()] = i
    return ends | dict.fromkeys(opened, len(found))
