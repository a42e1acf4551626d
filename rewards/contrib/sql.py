"""Verifier of SQL queries: their result equals that of the right query, on a database in memory."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Collection
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.answers import extract
from rewards.worker_pool import Pool, RaisedError, TooSlow
from rlhf.data import Verdict
from rlhf.settings import STRICT

_FENCE = re.compile(r"```(?:sql\w*)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_MAX_ROWS = 100_000
_MAX_QUERY = 20_000
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_FORBIDDEN = {"load_extension", "writefile", "readfile", "edit", "randomblob", "zeroblob"}
_ORDER = re.compile(r"\border\s+by\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SqlResult:
    """1 if a query gives the rows that the reference's query gives, else 0; SQLite.

    The reference is JSON: `{"setup": "CREATE TABLE ...; INSERT ...", "query": "SELECT ..."}`, and optionally `ordered`,
    whether the question asks for an order; without it, rows have an order where the outermost query has an ORDER BY,
    and none otherwise. Names of columns do not matter, their order does; 1 is 1.0.

    The answer is the last fenced block, tags, or the whole text: one SELECT (or WITH, or VALUES). It runs in a process
    of its own, on a fresh database in memory that it can only read, and is wrong if it takes more than `limit_s`.
    """

    examples: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "SELECT a FROM t WHERE a > 1",
            json.dumps(
                {"setup": "CREATE TABLE t (a INT); INSERT INTO t VALUES (1), (2), (3);", "query": "VALUES (3), (2)"}
            ),
        ),
    )

    limit_s: Annotated[float, Field(gt=0, le=60)] = 3.0
    """Processor seconds for building the database and both queries."""
    order: Literal["as_reference", "never"] = "as_reference"
    """`never` compares rows as a bag, whatever the reference says."""

    def __call__(self, answer: str, reference: str) -> Verdict:
        """Judge a text. Raises RewardError where no worker process starts."""
        query = query_of(answer)
        if not query or len(query) > _MAX_QUERY:
            return Verdict(0.0, why="no query" if not query else "the query is too long")
        try:
            wanted = json.loads(reference)
            given = [query, str(wanted["setup"]), str(wanted["query"])]
            said = wanted.get("ordered")  # null, where a table of objects fills in what a row leaves out
            ordered = (is_ordered(given[2]) if said is None else said) and self.order != "never"
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            equal = query.strip() == reference.strip()  # of nothing but a query, there is only its text to compare
            return Verdict(float(equal), why="the reference is no JSON with setup and query; texts compared")
        try:
            value, why = _pool().call(*given, bool(ordered), limit_s=self.limit_s)
        except (TooSlow, RaisedError) as error:
            return Verdict(0.0, why=str(error)[:200])
        return Verdict(value, why=why)


def query_of(answer: str) -> str:
    """Return the query in a text."""
    text = extract.after_thinking(answer)
    blocks = _FENCE.findall(text)
    found = blocks[-1] if blocks else extract.tagged(text) or extract.tagged(text, "sql") or text
    return str(found).strip().rstrip(";").strip()


def is_ordered(query: str) -> bool:
    """True if the outermost query has an ORDER BY, outside of brackets, strings and comments."""
    plain = re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/", " ", query, flags=re.DOTALL)
    outer, depth = [], 0
    for char in plain:
        depth += (char == "(") - (char == ")")
        outer.append(char if depth == 0 else " ")
    return _ORDER.search("".join(outer)) is not None


def judge(query: str, setup: str, reference: str, ordered: bool) -> list[Any]:
    """Return value and reason; for a process of its own."""
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(setup)
        wanted = database.execute(reference).fetchmany(_MAX_ROWS)
    except sqlite3.Error as error:
        return [0.0, f"the reference does not run: {error}"]
    allow_reads(database, _FORBIDDEN)
    try:
        cursor = database.execute(query)
        rows = cursor.fetchmany(_MAX_ROWS)
    except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
        return [0.0, f"the query does not run: {error}"]
    if cursor.description is None:
        return [0.0, "the query asks for nothing"]
    same = rows == wanted if ordered else Counter(rows) == Counter(wanted)
    return [float(same), f"{len(rows)} rows, {'equal' if same else f'not the {len(wanted)} of the reference'}"]


def allow_reads(database: sqlite3.Connection, forbidden: Collection[str]) -> None:
    """Refuse everything but reads on a connection, and functions of these names, in lower case."""

    def allowed(action: int, first: str | None, second: str | None, *_: Any) -> int:
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in forbidden:
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY

    database.set_authorizer(allowed)


@cache
def _pool() -> Pool:
    return Pool("rewards.contrib.sql:judge")
