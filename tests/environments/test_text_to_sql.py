"""Text to SQL: what is drawn, what a query may do and take, how rows are compared, promises and the oracle."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.base import StepResult
from environments.check import check_environment
from environments.contrib.sql_queries import cost, is_quick
from environments.contrib.text_to_sql import Problem, TextToSql, TextToSqlEpisode, draw
from environments.core.procedural import draw_for
from rewards.contrib.sql import SqlResult
from tests.environments.worlds import is_shown, oracle_figures, page, play, transcript

SETUP = "CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (3, 'y');"
BAG = Problem("Which a have the b y?", "t(a, b)", SETUP, "SELECT a FROM t WHERE b = 'y'")
ORDERED = Problem("All a from most to least?", "t(a, b)", SETUP, "SELECT a FROM t ORDER BY a DESC")


def ask(*actions: str, problem: Problem = BAG, **keys: object) -> tuple[TextToSqlEpisode, list[StepResult]]:
    episode = TextToSqlEpisode(problem, TextToSql(**keys))  # type: ignore[arg-type]
    results = [episode.act(action) for action in actions]
    episode.database.close()
    return episode, results


def test_a_query_is_tried_and_another_submitted() -> None:
    episode, results = ask("SELECT * FROM t", "SELECT a FROM t WHERE b = 'z'", "submit SELECT a FROM t WHERE a > 1;")
    assert episode.opening.reply == "Which a have the b y?\nt(a, b)"
    assert [r.reply for r in results] == ["a | b\n1 | x\n2 | y\n3 | y", "No rows.", "Right."]
    assert [r.reward for r in results] == [0, 0, 1] and results[-1].success
    assert len({r.state_key for r in results} | {episode.opening.state_key}) == 4


@pytest.mark.parametrize(
    ("actions", "right"),
    [
        (["SELECT a FROM t WHERE b = 'y'", "submit"], True),
        (["```sql\nSELECT 1\n```", "Submit:"], False),
        (["submit ```sql\nSELECT a FROM t WHERE b = 'y' ORDER BY a DESC\n```"], True),
        (["submit SELECT 3 UNION ALL SELECT 2"], True),
        (["answer: SELECT a FROM t"], False),
        (["submit SELECT a, b FROM t WHERE b = 'y'"], False),
        (["submit SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 3"], False),
        (["submit SELECT 2.0 UNION ALL SELECT 3"], True),
        (["submit SELECT nothing FROM t"], False),
    ],
)
def test_rows_are_compared_in_any_order_and_as_often_as_they_come(actions: list[str], right: bool) -> None:
    episode, results = ask(*actions)
    assert (episode.solved, results[-1].reply) == (right, "Right." if right else "Wrong.")


def test_an_order_that_is_asked_for_counts() -> None:
    assert ask("submit SELECT a FROM t ORDER BY -a", problem=ORDERED)[0].solved
    assert not ask("submit SELECT a FROM t ORDER BY a", problem=ORDERED)[0].solved


@pytest.mark.parametrize(
    "query", ["SELECT 3 UNION ALL SELECT 2", "SELECT a FROM t", "SELECT b FROM", "VALUES (2), (3)"]
)
@pytest.mark.parametrize("problem", [BAG, ORDERED])
def test_the_reward_of_the_same_name_judges_alike(query: str, problem: Problem) -> None:
    assert SqlResult()(query, problem.reference).value == ask(f"submit {query}", problem=problem)[0].score


@pytest.mark.parametrize("text", ["", "hello", "submit", "DROP TABLE t", "submit DELETE FROM t", "'; DROP TABLE --"])
def test_what_is_no_query_is_not_understood(text: str) -> None:
    episode, [result] = ask(text)
    assert not result.valid and not episode.done and result.reply.startswith("Unknown action.")


FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT"


@pytest.mark.parametrize(
    ("query", "reply"),
    [
        ("SELECT c FROM t", "Error: no such column: c"),
        (f"{FOREVER} COUNT(*) FROM c", "Error: the query takes too long."),
        (f"{FOREVER} x FROM c", "Error: more than 1000 rows."),
        ("SELECT random()", "Error: not authorized"),
        ("SELECT printf('%.*c', 1000000000, 'x')", "Error: not authorized"),
        ("SELECT date('now')", "Error: not authorized"),
        ("SELECT zeroblob(1000000000)", "Error: string or blob too big"),
        ("SELECT load_extension('x')", "Error: not auth"),
        ("SELECT 1; DELETE FROM t", "Error: You can only execute one statement"),
        ("SELECT '" + "a" * 1500 + "'", "Error: "),
        ("WITH x AS (SELECT 1) DELETE FROM t", "Error: not authorized"),
        ("SELECT * FROM pragma_table_info('t')", "Error: "),
        ("SELECT NULL, 1.5, 2.0", "NULL | 1.5 | 2"),
    ],
)
def test_a_query_can_only_read_and_only_so_much(query: str, reply: str) -> None:
    _, results = ask(query, "SELECT COUNT(*) AS n FROM t")
    shown = results[0].reply.rpartition("\n")[2]
    assert shown.startswith(reply) and results[0].valid
    assert results[1].reply == "n\n3"  # the database is as it was


def test_of_many_rows_a_few_are_shown() -> None:
    assert ask("SELECT a FROM t", n_shown=2)[1][0].reply == "a\n1\n2\n... and 1 more"


def test_steps_run_out_and_the_database_is_closed() -> None:
    world = TextToSql(max_steps=2)
    task = world.tasks("test")[0]
    last = play(world, task, ["SELECT 1", "SELECT 1"])[-1]
    assert (last.truncated, last.success) == (True, False)
    assert world.plan(task, ["SELECT 1", "SELECT 1"]) is None and world.plan(task, ["submit SELECT 0"]) is None
    episode, _ = ask("SELECT 1")
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        episode.act("SELECT 1")


@given(
    seed=st.integers(0, 29_999_999),
    kind=st.sampled_from(["filter", "aggregate", "join", "group"]),
    n=st.integers(4, 40),
)
@settings(max_examples=60, deadline=None)
def test_every_query_finds_something(seed: int, kind: Any, n: int) -> None:
    problem = draw_for("text_to_sql", seed, lambda rng: draw(rng, kind, n))
    database = sqlite3.connect(":memory:")
    database.executescript(problem.setup)
    rows = database.execute(problem.query).fetchall()
    database.close()
    assert rows and None not in rows[0]
    assert TextToSqlEpisode(problem, TextToSql()).act(f"submit {problem.query}").success


@pytest.mark.parametrize("kind", ["filter", "aggregate", "join", "group"])
def test_what_the_page_says_of_the_oracle(kind: Any) -> None:
    assert oracle_figures(TextToSql(questions=(kind,)), f"`questions: [{kind}]`") in page()


def test_the_transcript_of_the_page() -> None:
    world = TextToSql()
    task = world.tasks("test")[1]
    actions = ["SELECT * FROM dogs", *(world.plan(task, ()) or ())]
    assert is_shown(transcript(play(world, task, actions), actions))


def test_queries_that_may_take_long_run_in_threads() -> None:
    assert TextToSql().properties.inline and not TextToSql(max_work=500_001).properties.inline


def doubling(n: int) -> str:
    """Named queries of which each is twice the one before."""
    names = [f"q{i}" for i in range(n)]
    named = [f"{b} AS (SELECT x FROM {a} UNION ALL SELECT x FROM {a})" for a, b in pairwise(names)]
    return f"WITH q0 AS (SELECT 1 AS x), {', '.join(named)} SELECT COUNT(*) FROM {names[-1]}"


def test_named_queries_that_multiply_are_refused_before_they_are_compiled() -> None:
    _, results = ask(doubling(5), doubling(20))
    assert [result.reply for result in results] == ["COUNT(*)\n16", "Error: the named queries multiply."]


@pytest.mark.parametrize(
    ("query", "n"),
    [
        ("SELECT a FROM t", 1),
        ("WITH q AS (SELECT 1 UNION SELECT 2) SELECT * FROM q", 3),
        ("WITH q (x) AS NOT MATERIALIZED (SELECT 1), \"R S\" AS (SELECT * FROM 'q', [q]) SELECT * FROM `r s`, Q", 11),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c", 4),
        ("WITH q AS (WITH p AS (SELECT 1) SELECT * FROM p, p) SELECT * FROM q /* q q q */ -- q", 12),
        ("WITH q AS (SELECT 1", 2),
    ],
)
def test_what_queries_that_name_queries_cost(query: str, n: int) -> None:
    assert cost(query) == n


@pytest.mark.parametrize(
    ("query", "quick"),
    [
        ("SELECT name, SUM(points) AS n FROM t JOIN u ON (u.id = t.id) GROUP BY t.id ORDER BY n DESC, name", True),
        ("SELECT COUNT(*) FROM t WHERE id IN (SELECT id FROM u) AND name = 'like (with'", True),
        ("SELECT a FROM t WHERE a LIKE '%x'", False),
        ("SELECT instr(hex(a), 'b') FROM t", False),
        ("WITH q AS (SELECT 1) SELECT * FROM q", False),
    ],
)
def test_which_queries_are_quick(query: str, quick: bool) -> None:
    assert is_quick(query) is quick


#: Patterns over long texts, over all rows that the limits allow: seconds.
LONG = f"{FOREVER} COUNT(*) FROM c WHERE " + " OR ".join(
    ["x || replace(hex(zeroblob(480)), '0', 'a') GLOB '*[!-~][!-~][!-~][!-~]b'"] * 8
)


def test_a_query_that_takes_long_holds_up_nobody_and_ends_with_its_episode() -> None:
    async def main() -> tuple[int, float]:
        episode = TextToSqlEpisode(TextToSql()._problem(0), TextToSql())
        asked, n = asyncio.ensure_future(episode.step(LONG)), 0
        while not asked.done() and n < 20:
            await asyncio.sleep(0.005)
            n += 1
        begun = time.monotonic()
        asked.cancel()
        await episode.close()
        await episode.close()
        return n, time.monotonic() - begun

    n, closed_s = asyncio.run(main())
    assert n == 20 and closed_s < 5.0


def test_all_promises_are_kept() -> None:
    report = check_environment(TextToSql())
    assert report.ok, str(report)
