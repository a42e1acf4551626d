"""Questions to a database, answered by a query that may be tried out before.

    How many of the pupils have the town Oslo?
    pupils(id, name, town, age); marks(id, pupil_id, subject, points)
    > SELECT * FROM pupils WHERE town = 'Oslo'
    id | name | town | age
    3 | Mia | Oslo | 12
    7 | Ben | Oslo | 15
    > submit SELECT COUNT(*) FROM pupils WHERE town = 'Oslo'
    Right.

Each task draws a database of two tables, a question, and the query that answers it; no question is in two splits,
whatever the rows. Queries run in SQLite, in memory, and can only read; what they may take is counted in steps of its
machine, which are the same on every machine, so that a limit never turns one transcript into another.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Properties, StepResult
from environments.contrib.sql_queries import MOST, cost, is_quick
from environments.core.normalise import NAMES, PLACES, words
from environments.core.procedural import Attempt, digest, draw_for
from environments.core.seed_splits import Seeded
from rewards.contrib.sql import allow_reads, is_ordered, query_of
from rlhf.data import Task
from rlhf.settings import STRICT

Kind = Literal["filter", "aggregate", "join", "group"]

#: Functions that reach outside, that give something else each time, or that take long within one step of the machine.
_FORBIDDEN = frozenset(
    words(
        "load_extension readfile writefile edit random randomblob date time datetime julianday unixepoch strftime "
        "timediff current_date current_time current_timestamp printf format"
    )
)
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 2_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1_500,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
_COUNTED = 1_000
#: Work of a quick query that nobody needs a thread for: some milliseconds.
_AT_ONCE = 500_000
_QUERY = re.compile(r"^(select|with|values)\b", re.IGNORECASE)
_SUBMIT = re.compile(r"^\W*(?:submit|answer)\b[\s:]*", re.IGNORECASE)
_UNKNOWN = "Unknown action. Write a query to try it, or submit and a query."


@plain_dataclass(frozen=True, slots=True)
class Domain:
    """Subject of a database: objects with a text and a number, and their events with another of both."""

    things: str
    thing: str
    names: tuple[str, ...]
    text: str
    texts: tuple[str, ...]
    number: str
    numbers: tuple[int, int]
    events: str
    event_text: str
    event_texts: tuple[str, ...]
    event_number: str
    event_numbers: tuple[int, int]

    @property
    def joined(self) -> str:
        """The objects with their events, as SQL."""
        return f"{self.things} JOIN {self.events} ON {self.events}.{self.thing}_id = {self.things}.id"


DOMAINS = (
    Domain(
        "pupils", "pupil", NAMES, "town", PLACES[:6], "age", (10, 18), "marks", "subject",
        words("art biology history maths music sport"), "points", (1, 20),
    ),
    Domain(
        "goods", "good", words("bag ball book bowl coat cup desk fan hat jar key lamp map pen ring shoe toy vase"),
        "colour", words("black blue green red white yellow"), "price", (2, 60), "sales", "city", PLACES[6:12], "pieces",
        (1, 9),
    ),
    Domain(
        "films", "film", words("Amber Breeze Comet Dusk Ember Flood Grove Harbour Island Jungle Knight Lantern Mirror"),
        "genre", words("comedy crime drama horror romance western"), "length", (70, 180), "shows", "hall",
        words("east north south west"), "seats", (10, 90),
    ),
    Domain(
        "books", "book", words("Arrow Beacon Castle Delta Echo Falcon Garden Harvest Ivory Jade Key Letters Meadow"),
        "language", words("danish english french german latin spanish"), "pages", (80, 400), "loans", "branch",
        words("bridge castle market station"), "days", (1, 30),
    ),
    Domain(
        "dogs", "dog", words("Ace Bella Coco Duke Flash Ginger Hugo Jet Lucky Milo Nala Oscar Pepper Rex Sandy Toby"),
        "breed", words("beagle collie husky poodle spaniel terrier"), "weight", (3, 60), "walks", "park",
        words("hill lake river woods"), "minutes", (5, 90),
    ),
    Domain(
        "plants", "plant", words("aloe basil clover daisy fern ivy lily mint moss orchid palm rose sage thyme tulip"),
        "pot", words("clay glass iron plastic stone wood"), "height", (5, 90), "waterings", "day",
        words("friday monday saturday sunday thursday tuesday wednesday"), "litres", (1, 9),
    ),
    Domain(
        "players", "player", NAMES, "team", words("bears eagles foxes lions sharks wolves"), "number", (1, 40), "games",
        "month", words("april august july june march may"), "goals", (1, 6),
    ),
    Domain(
        "ships", "ship", words("Atlas Borea Cygnus Dorado Electra Fortuna Gemini Helios Juno Kraken Luna Nereid Orion"),
        "flag", words("dutch greek maltese norse polish turkish"), "length", (20, 300), "trips", "port", PLACES[:6],
        "tons", (10, 400),
    ),
)  # fmt: skip


@plain_dataclass(frozen=True, slots=True)
class Problem:
    """Random draw of one task.

    Attributes:
        question: what is asked.
        tables: their columns, as the agent reads them.
        setup: statements that make the database.
        query: one that answers the question.
    """

    question: str
    tables: str
    setup: str
    query: str

    @property
    def reference(self) -> str:
        """Reference of the reward `sql`."""
        return json.dumps({"setup": self.setup, "query": self.query})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextToSql(Seeded):
    """Text-to-SQL questions on a two-table SQLite database; queries may be tried out first."""

    questions: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("filter", "aggregate", "join", "group")
    """Kinds of questions, in turn: rows of one table, a number of them, rows by what another table says of them, and a
    number for each, in an order."""
    n_rows: Annotated[int, Field(ge=4, le=500)] = 12
    """Rows of the table of events; the other has half as many, at most as many as there are names."""
    n_shown: Annotated[int, Field(ge=1, le=100)] = 5
    """Rows of a result that are shown."""
    max_steps: Annotated[int, Field(ge=1)] = 6
    """The episode is cut after so many steps; what was not submitted by then counts for nothing."""
    max_work: Annotated[int, Field(ge=1_000, le=100_000_000)] = 500_000
    """A query is stopped after so many steps of SQLite's machine, some milliseconds."""
    max_rows: Annotated[int, Field(ge=10, le=100_000)] = 1_000
    """Rows of a result that are read."""

    @property
    def properties(self) -> Properties:
        """Properties of the environment; slow calls run in threads."""
        package = f"sqlite {sqlite3.sqlite_version}"
        return replace(super().properties, inline=self.max_work <= _AT_ONCE, package=package)

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of a split; the reference is that of the reward `sql`. Raises EnvError for another split."""
        prefix = f"text_to_sql-2/{'+'.join(self.questions)}-{self.n_rows}/{split}"
        return [
            Task(id=f"{prefix}/{seed}", seed=seed, reference=self._problem(seed).reference)
            for seed in self.seeds(split)
        ]

    def start(self, task: Task) -> TextToSqlEpisode:
        """Begin one attempt."""
        return TextToSqlEpisode(self._problem(task.seed), self)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Submit the right query; None where another was submitted, or no step is left."""
        episode = self.start(task)
        episode.after(taken)
        episode.database.close()
        if episode.over:
            return () if episode.solved else None
        return (f"submit {self._problem(task.seed).query}",)

    def _problem(self, seed: int) -> Problem:
        return _drawn(seed, self.questions[seed % len(self.questions)], self.n_rows)


@lru_cache(maxsize=8192)
def _drawn(seed: int, kind: Kind, n_rows: int) -> Problem:
    return draw_for("text_to_sql", seed, lambda rng: draw(rng, kind, n_rows), told=lambda problem: problem.question)


def draw(rng: random.Random, kind: Kind, n_rows: int) -> Problem:
    """Draw a database, a question about it, and its query, which always finds something."""
    domain = rng.choice(DOMAINS)
    names = rng.sample(domain.names, min(len(domain.names), max(3, n_rows // 2)))
    things = [(i, name, rng.choice(domain.texts), rng.randint(*domain.numbers)) for i, name in enumerate(names, 1)]
    events = [
        (i, rng.randint(1, len(things)), rng.choice(domain.event_texts), rng.randint(*domain.event_numbers))
        for i in range(1, n_rows + 1)
    ]
    tables = (
        f"{domain.things}(id, name, {domain.text}, {domain.number}); "
        f"{domain.events}(id, {domain.thing}_id, {domain.event_text}, {domain.event_number})"
    )
    setup = (
        f"CREATE TABLE {domain.things} (id INTEGER, name TEXT, {domain.text} TEXT, {domain.number} INTEGER); "
        f"CREATE TABLE {domain.events} (id INTEGER, {domain.thing}_id INTEGER, {domain.event_text} TEXT, "
        f"{domain.event_number} INTEGER); INSERT INTO {domain.things} VALUES {', '.join(map(str, things))}; "
        f"INSERT INTO {domain.events} VALUES {', '.join(map(str, events))};"
    )
    ask = {"filter": _filter, "aggregate": _aggregate, "join": _join, "group": _group}[kind]
    question, query = ask(rng, domain, rng.choice(things), rng.choice(events))
    return Problem(question, tables, setup, query)


def _filter(rng: random.Random, d: Domain, thing: Any, _: Any) -> tuple[str, str]:
    if rng.random() < 0.5:
        return (
            f"List the names of the {d.things} that have the {d.text} {thing[2]}.",
            f"SELECT name FROM {d.things} WHERE {d.text} = '{thing[2]}'",
        )
    return (
        f"List name and {d.text} of the {d.things} whose {d.number} is at least {thing[3]}.",
        f"SELECT name, {d.text} FROM {d.things} WHERE {d.number} >= {thing[3]}",
    )


def _aggregate(rng: random.Random, d: Domain, thing: Any, event: Any) -> tuple[str, str]:
    if rng.random() < 0.5:
        return (
            f"How many of the {d.things} have the {d.text} {thing[2]}?",
            f"SELECT COUNT(*) FROM {d.things} WHERE {d.text} = '{thing[2]}'",
        )
    word, function = rng.choice([("highest", "MAX"), ("lowest", "MIN"), ("average", "AVG"), ("total", "SUM")])
    return (
        f"What is the {word} number of {d.event_number} in {d.events} with the {d.event_text} {event[2]}?",
        f"SELECT {function}({d.event_number}) FROM {d.events} WHERE {d.event_text} = '{event[2]}'",
    )


def _join(rng: random.Random, d: Domain, _: Any, event: Any) -> tuple[str, str]:
    if rng.random() < 0.5:
        return (
            f"List the names of the {d.things} with {d.events} that have the {d.event_text} {event[2]}, each once.",
            f"SELECT DISTINCT name FROM {d.joined} WHERE {d.event_text} = '{event[2]}'",
        )
    return (
        f"List name and {d.event_text} for each of the {d.events} with at least {event[3]} {d.event_number}.",
        f"SELECT name, {d.event_text} FROM {d.joined} WHERE {d.event_number} >= {event[3]}",
    )


def _group(rng: random.Random, d: Domain, _: Any, __: Any) -> tuple[str, str]:
    each, name, source = rng.choice(
        [
            (f"of the {d.things} with {d.events}", "name", f"{d.joined} GROUP BY {d.things}.id"),
            (f"{d.event_text} of the {d.events}", d.event_text, f"{d.events} GROUP BY {d.event_text}"),
        ]
    )
    what, function = rng.choice(
        [
            (f"total number of {d.event_number}", f"SUM({d.event_number})"),
            (f"highest number of {d.event_number}", f"MAX({d.event_number})"),
            (f"lowest number of {d.event_number}", f"MIN({d.event_number})"),
            (f"number of {d.events}", "COUNT(*)"),
        ]
    )
    return (
        f"For each {each}, give the {name} and the {what}, from most to least, and by {name} where that is equal.",
        f"SELECT {name}, {function} AS n FROM {source} ORDER BY n DESC, {name}",
    )


class TextToSqlEpisode(Attempt):
    """Attempt at a question, which a submitted query ends.

    `submit` alone submits the last query that was tried. Rows are compared as the reward `sql` does: as they are where
    the right query's outermost SELECT has an ORDER BY, else in any order. The key of a state tells the problem and the
    queries tried since it began.
    """

    def __init__(self, problem: Problem, settings: TextToSql) -> None:
        super().__init__(settings.max_steps)
        self._problem, self._settings, self._name = problem, settings, digest(repr(problem))
        self._tried: list[str] = []
        self._late: asyncio.Future[StepResult] | None = None
        self.database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self.database.executescript(problem.setup)
        self._wanted = self.database.execute(problem.query).fetchall()
        for limit, value in _LIMITS.items():
            self.database.setlimit(limit, value)
        allow_reads(self.database, _FORBIDDEN)
        self.opening = self.opened(f"{problem.question}\n{problem.tables}")

    async def step(self, action: str) -> StepResult:
        """Do one action, in a thread where that may take long."""
        if self._settings.max_work > _AT_ONCE or is_quick(action):
            return self.act(action)
        self._late = asyncio.ensure_future(asyncio.to_thread(self.act, action))
        return await asyncio.shield(self._late)

    async def close(self) -> None:
        """Close the database once nothing runs on it; may be done twice."""
        if self._late is not None and not self._late.done():
            self.database.interrupt()
            await asyncio.wait([self._late])
        self.database.close()

    def do(self, action: str) -> tuple[str, bool]:
        """Try a query, or submit one."""
        begins = _SUBMIT.match(action)
        query = query_of(action[begins.end() :] if begins else action)
        if begins and not query and self._tried:
            query = self._tried[-1]
        if not _QUERY.match(query):
            return _UNKNOWN, False
        rows, said = self._run(query)
        if not begins:
            self._tried.append(query)
            return said, True
        same = rows == self._wanted if is_ordered(self._problem.query) else _bag(rows) == _bag(self._wanted)
        self.done, self.solved, self.score = True, same, float(same)
        return "Right." if same else "Wrong.", True

    def _run(self, query: str) -> tuple[list[tuple[Any, ...]] | None, str]:
        """Return rows, None where it failed, and what to show."""
        if len(query) <= _LIMITS[sqlite3.SQLITE_LIMIT_SQL_LENGTH] and cost(query) > MOST:
            return None, "Error: the named queries multiply."
        left = self._settings.max_work // _COUNTED

        def counted() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        self.database.set_progress_handler(counted, _COUNTED)
        try:
            cursor = self.database.execute(query)
            rows = cursor.fetchmany(self._settings.max_rows + 1)
        except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError, MemoryError) as error:
            return None, "Error: the query takes too long." if left < 0 else f"Error: {str(error)[:120]}"
        header = " | ".join(column[0] for column in cursor.description or ())
        cursor.close()
        if len(rows) > self._settings.max_rows:
            return None, f"Error: more than {self._settings.max_rows} rows."
        lines = [header, *(" | ".join(map(_written, row)) for row in rows[: self._settings.n_shown])]
        more = len(rows) - self._settings.n_shown
        return rows, "\n".join([*lines, *([f"... and {more} more"] if more > 0 else [])]) if rows else "No rows."

    def state(self) -> str:
        """Return the problem, the queries tried, and whether one is submitted."""
        return f"{self._name}/{digest(repr(self._tried))}{'/submitted' if self.done else ''}"

    def possible(self) -> tuple[str, ...]:
        """Nothing can be listed."""
        return ()


def _bag(rows: list[tuple[Any, ...]] | None) -> Counter[tuple[Any, ...]] | None:
    return None if rows is None else Counter(rows)


def _written(value: object) -> str:
    return "NULL" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)[:80]
