"""Questions about tables that are shown whole: look up, count, compare across two tables, and tell true from false.

    films(id, name, genre, length):
    1,Comet,drama,102
    ...
    How many of the films have the genre drama?

Tables and questions are those that `text_to_sql` draws; what is right is what SQLite returns. Fact verification makes a
statement of a question and its answer, or another one. After Reasoning-Table, arXiv 2506.01710, which trains on sets
that are downloaded; tables of one's own are columns of a `dataset`.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections import Counter
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.contrib.text_to_sql import Problem, draw
from environments.core.procedural import Attempts, DrawnQuestions, Judged, digest
from rlhf.settings import STRICT

Kind = Literal["filter", "aggregate", "join", "verify"]
_LONGEST, _MOST_ANSWERS = 400, 6


@plain_dataclass(frozen=True)
class TableQuestion:
    """Tables as text, a question about them, and the items of its answer, in any order."""

    tables: str
    question: str
    answer: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TableQuestions(DrawnQuestions):
    """Answer questions about two tables that are shown, and tell true statements from false ones; SQLite."""

    questions: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("filter", "aggregate", "join", "verify")
    """Kinds of questions: rows of a table, a number of them, rows by the other table, and true or false."""
    n_rows: Annotated[int, Field(ge=4, le=100)] = 8
    """Rows of the larger table."""
    max_steps: Annotated[int, Field(ge=1)] = 1
    """Attempts at one question."""

    name: ClassVar[str] = "table_questions"
    edition: ClassVar[str] = "-2"

    @property
    def level(self) -> str:
        """Level: the kinds of questions, and the number of rows."""
        return f"{'+'.join(self.questions)}-{self.n_rows}"

    def draw(self, rng: random.Random) -> TableQuestion:
        """Draw tables and a question whose answer is a few values of one column."""
        kind = rng.choice(self.questions)
        while True:
            problem = draw(rng, "aggregate" if kind == "verify" else kind, self.n_rows)
            tables, answer = looked_up(problem)
            if not answer or len(answer) > _MOST_ANSWERS:
                continue
            if kind != "verify":
                return TableQuestion(tables, problem.question, answer)
            truth = rng.random() < 0.5
            claimed = answer[0] if truth else written(float(answer[0]) + rng.choice((-2, -1, 1, 2)))
            said = f"To the question '{problem.question}' somebody says {claimed}. Is that true or false?"
            return TableQuestion(tables, said, (str(truth).lower(),))

    def ask(self, instance: TableQuestion) -> Attempts:
        """Show the tables, and ask the question."""
        return Attempts(
            f"{instance.tables}\n{instance.question} Answer with the values alone, with commas between them.",
            lambda text: judge(instance, text),
            name=f"{self.name}/{digest(repr(instance))}",
            max_steps=self.max_steps,
        )

    def answer(self, instance: TableQuestion) -> str:
        """Items of the answer, with commas between them."""
        return ", ".join(instance.answer)


def looked_up(problem: Problem) -> tuple[str, tuple[str, ...]]:
    """Return the tables of a problem as text, and what its query finds; nothing where that is more than a column."""
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(problem.setup)
        names = [row[0] for row in database.execute("SELECT name FROM sqlite_master ORDER BY rowid")]
        parts = []
        for name in names:
            found = database.execute(f"SELECT * FROM {name}")
            columns = ", ".join(column[0] for column in found.description)
            parts += [f"{name}({columns}):", *(",".join(map(str, row)) for row in found)]
        rows = database.execute(problem.query).fetchall()
    finally:
        database.close()
    answer = tuple(written(row[0]) for row in rows) if all(len(row) == 1 for row in rows) else ()
    return "\n".join(parts), () if "" in answer else answer


def written(value: object) -> str:
    """A value as it is compared: numbers to two places, without zeros that mean nothing."""
    return "" if value is None else f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def judge(asked: TableQuestion, text: str) -> Judged:
    """Compare the items of an answer, in any order, with the right ones."""
    if not text.strip() or len(text) > _LONGEST:
        return Judged("That is no answer.", None)
    said = [_normal(item) for item in re.split(r"[,;\n]|\band\b", text.strip().rstrip(".")) if item.strip()]
    right = Counter(said) == Counter(map(_normal, asked.answer))
    return Judged("Right." if right else "Wrong.", ", ".join(said), solved=right)


def _normal(item: str) -> str:
    plain = item.strip(" \t'\"`[]()").casefold()
    return written(round(float(plain), 2)) if re.fullmatch(r"-?\d+(?:\.\d+)?", plain) else plain
