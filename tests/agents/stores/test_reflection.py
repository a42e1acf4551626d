"""Reflection: summaries that are written and merged, and a re-ranker that learns which of them are used."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.base import History
from agents.chat import ChatAgent
from agents.check import check_agent
from agents.stores import copies
from agents.stores.contrib.reflection import AMONG, CITED, UNKNOWN, Reflection, weights_of
from agents.stores.contrib.rerank import Weights, draw, gradient, scores, vector
from agents.stores.copies import content_hash
from agents.stores.entry import Origin
from agents.stores.faults import StoreLeak
from agents.stores.kind import ENTRIES, RECALLED, QueriesPolicy, ReadsCitations, StoreKind, asks_policy
from agents.stores.remembering import Remembering
from agents.stores.store import Store
from rlhf.data import Action, Outcome, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.errors import ContextFull
from tests.agents.spoken import Speaks


def log_prob(values: Sequence[float], order: Sequence[int], tau: float) -> float:
    """Log-prob of drawing `order`: Σ_j log softmax(s / τ)_j among what is left, in nats."""
    total, left = 0.0, list(range(len(values)))
    for chosen in order:
        parts = np.array([values[i] / tau for i in left])
        top = float(parts.max())
        total += values[chosen] / tau - top - float(np.log(np.exp(parts - top).sum()))
        left.remove(chosen)
    return total


def attempt(task: str, opening: str, action: str = "go", solved: bool = False, **notes: str) -> Trajectory:
    names = {"recalled": RECALLED, "entries": ENTRIES, "among": AMONG, "cited": CITED, "unknown": UNKNOWN}
    turn = Turn(Action(action, notes={names[name]: note for name, note in notes.items()}), "ok")
    return Trajectory(task, 0, opening, (turn,), Outcome.SOLVED if solved else Outcome.FAILED)


def group(*attempts: Trajectory) -> ScoredGroup:
    made = tuple(replace(t, attempt=i) for i, t in enumerate(attempts))
    return ScoredGroup(attempts[0].task_id, made, tuple(Score({}, (0.0,), 0.0) for _ in made))


def learn(kind: Reflection, store: Store, says: list[Any], *groups: ScoredGroup) -> tuple[dict[str, float], Speaks]:
    policy = Speaks(s if isinstance(s, str | Exception) else json.dumps(s) for s in says)
    with store.transaction():
        return dict(asyncio.run(kind.learn_asking(store, groups, "train", policy))), policy


def topics(store: Store, *texts: str) -> None:
    for i, text in enumerate(texts):
        topic, _, summary = text.partition(": ")
        store.add("topic", text, Origin(f"old{i}", "train"), {"topic": topic, "summary": summary})


# --- the re-ranker ---------------------------------------------------------------------------------------------------


def some(seed: int, dim: int = 4, n: int = 5) -> tuple[Weights, Any, Any]:
    rng = np.random.default_rng(seed)
    weights = Weights(rng.normal(0, 0.3, (dim, dim)), rng.normal(0, 0.3, (dim, dim)))
    return weights, rng.normal(0, 1, dim), rng.normal(0, 1, (n, dim))


def test_scores_by_hand() -> None:
    # q′ = (1, 0) + (0, 1) = (1, 1); m′ of (0, 1) is (0, 1) + (2, 0) = (2, 1), so s = 3; of (1, 0) it is (1, 0): s = 1.
    weights = Weights(np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 2.0], [0.0, 0.0]]))
    entries = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert scores(weights, np.array([1.0, 0.0]), entries).tolist() == [3.0, 1.0]
    assert scores(Weights.nothing(2), np.array([1.0, 0.0]), entries).tolist() == [0.0, 1.0]


def test_vectors_are_of_length_one_and_the_same_anywhere() -> None:
    assert np.linalg.norm(vector("the red key the door", 16)) == pytest.approx(1)
    assert vector("", 4).tolist() == [0, 0, 0, 0]
    assert vector("Red KEY", 64) @ vector("a red key", 64) == pytest.approx(2 / math.sqrt(6), abs=0.4)
    # crc32 of "key" is 0xce5d1e39: place 9 of 16; its highest bit is set, so the sign is +.
    assert np.flatnonzero(vector("key", 16)).tolist() == [9] and vector("key", 16)[9] == 1


def test_the_draw_is_the_one_that_its_log_prob_says() -> None:
    values, tau, n = [0.5, 0.1, -0.4], 0.7, 4000
    drawn = [tuple(draw(values, 2, tau, str(i))) for i in range(n)]
    orders = list(itertools.permutations(range(3), 2))
    odds = [math.exp(log_prob(values, order, tau)) for order in orders]
    assert sum(odds) == pytest.approx(1)
    assert [drawn.count(order) / n for order in orders] == pytest.approx(odds, abs=0.025)
    assert draw(values, 2, tau, "s") == draw(values, 2, tau, "s")
    assert draw([0.1, 0.9, 0.9], 2, 0.0, "") == [1, 2] and draw([], 2, 0.5, "") == []


@pytest.mark.parametrize("seed", range(3))
def test_the_estimate_of_one_draw_is_the_gradient_of_its_log_prob(seed: int) -> None:
    # With one reward of 1 at the last place and b = 0, every log p counts once: ∇ log P of the whole order.
    weights, query, entries = some(seed)
    order, tau = [3, 0, 4], 0.8
    found = gradient(weights, query, entries, order, [0.0, 0.0, 1.0], tau=tau, baseline=0.0)
    for name in ("query", "entry"):
        numeric = _numeric(weights, name, lambda w: log_prob(scores(w, query, entries).tolist(), order, tau))
        np.testing.assert_allclose(getattr(found, name), numeric, atol=1e-6)


@pytest.mark.parametrize("baseline", [0.0, 0.5])
def test_over_all_draws_the_estimate_is_the_gradient_of_the_expected_reward(baseline: float) -> None:
    weights, query, entries = some(7, n=4)
    tau, of_entry = 0.6, [1.0, -1.0, -1.0, 1.0]
    orders = list(itertools.permutations(range(4), 2))

    def expected(w: Weights) -> float:
        values = scores(w, query, entries).tolist()
        return sum(math.exp(log_prob(values, order, tau)) * sum(of_entry[i] for i in order) for order in orders)

    values = scores(weights, query, entries).tolist()
    for name in ("query", "entry"):
        mean = sum(
            math.exp(log_prob(values, order, tau))
            * getattr(
                gradient(weights, query, entries, order, [of_entry[i] for i in order], tau=tau, baseline=baseline), name
            )
            for order in orders
        )
        np.testing.assert_allclose(mean, _numeric(weights, name, expected), atol=1e-6)


def _numeric(weights: Weights, name: str, of: Any) -> Any:
    found = np.zeros_like(getattr(weights, name))
    for place in np.ndindex(found.shape):
        ends = []
        for sign in (1, -1):
            moved = getattr(weights, name).copy()
            moved[place] += sign * 1e-5
            other = {"query": weights.query, "entry": weights.entry, name: moved}
            ends.append(of(Weights(other["query"], other["entry"])))
        found[place] = (ends[0] - ends[1]) / 2e-5
    return found


# --- retrospective ---------------------------------------------------------------------------------------------------


def test_what_is_cited_comes_to_be_shown_and_the_weights_lie_in_the_store(store: Store, tmp_path: Path) -> None:
    topics(store, *(f"key {name}: it is {name}" for name in ("red", "blue", "green", "old", "new", "lost")))
    kind = Reflection(k=2, tau=0.2, lr=0.008)

    def shown(task: str) -> tuple[int, ...]:
        return kind.recollect(store, History(Task(task), "where is the key")).entries

    assert [shown(f"t{i}").count(5) for i in range(40)].count(1) < 25
    for step in range(60):
        found = kind.recollect(store, History(Task(f"s{step}"), "where is the key"))
        notes = {"recalled": "x", "entries": " ".join(map(str, found.entries)), "among": found.notes[AMONG]}
        cited = {"cited": "5"} if 5 in found.entries else {}
        done = attempt("told", "where is the key", **notes, **cited)
        says = [{"topics": []}] if step == 0 else []
        figures, _ = learn(kind, store, says, group(done))
        assert figures["store/n_used"] == (5 in found.entries) and figures["store/n_recalled"] == 2
    assert [shown(f"u{i}").count(5) for i in range(40)].count(1) >= 36

    saved = tmp_path / "checkpoint"
    saved.mkdir()
    copies.save(store, saved)
    before, weights = content_hash(store), weights_of(store, 32)
    learn(kind, store, [], group(attempt("told", "where is the key", **notes)))
    assert not np.array_equal(weights_of(store, 32).query, weights.query) and content_hash(store) != before
    copies.restore(saved, tmp_path / "again.sqlite")
    with Store(tmp_path / "again.sqlite") as again:
        assert content_hash(again) == before and np.array_equal(weights_of(again, 32).query, weights.query)


def test_the_draw_hangs_on_seed_task_and_what_was_learnt_and_on_nothing_else(store: Store) -> None:
    topics(store, *(f"key {i}: x" for i in range(9)))
    history = History(Task("t"), "the key")
    kind = Reflection(k=3, tau=1.0)
    first = kind.recollect(store, history)
    assert kind.recollect(store, history) == first and len(first.notes[AMONG].split()) == 9
    assert any(replace(kind, seed=i).recollect(store, history).entries != first.entries for i in range(1, 4))
    store.keep("updates", "1")
    assert any(kind.recollect(store, History(Task(t), "the key")).entries != first.entries for t in ("t", "u", "v"))
    with pytest.raises(ValueError, match="expected tau above 0, or lr: 0"):
        Reflection(tau=0)
    best = Reflection(tau=0, lr=0, k=2)
    assert best.recollect(store, history).entries == best.recollect(store, History(Task("x"), "the key")).entries


def test_citations_are_taken_from_the_reply_and_the_action_is_what_is_left(store: Store) -> None:
    topics(store, "key red: in the box", "key blue: on the table")
    agent = Remembering(inner=ChatAgent(system=""), store=Reflection(k=2, tau=0.0, lr=0.0))
    policy = Speaks(["take red [m2] key[m9]", "go [m1]", "[x] [m]"])
    turns: tuple[Turn, ...] = ()
    for _ in range(3):
        action = asyncio.run(agent.act_with(store, History(Task("t"), "the key", turns), policy))
        turns = (*turns, Turn(action, "ok"))
    prompt = policy.asked[0][1].splitlines()
    assert prompt[0] == "Summaries:" and prompt[1].startswith("[m1] key") and "[m1]" in prompt[3]
    assert [t.action.text for t in turns] == ["take red key", "go", "[x] [m]"]
    ids = turns[0].action.notes[ENTRIES].split()
    assert turns[0].action.notes[CITED] == ids[1] and turns[0].action.notes[UNKNOWN] == "m9"
    assert turns[1].action.notes == {CITED: ids[0]} and turns[2].action.notes == {}
    # The tokens stay as they were sampled.
    assert [t.generations[0] for t in turns] == [reply.generation for reply in policy.replies]
    done = Trajectory("t", 0, "the key", turns, Outcome.FAILED)
    scored = ScoredGroup("t", (done,), (Score({}, (0.0,) * 3, 0.0),))
    figures, _ = learn(Reflection(k=2, tau=0.1), store, [{"topics": []}], scored)
    assert figures["store/n_used"] == 2 and figures["store/used_share"] == 1.0
    assert figures["store/n_refused"] == 2  # no topics, and a citation of nothing


def test_words_of_an_action_that_nothing_else_had_said_count_as_use(store: Store) -> None:
    topics(store, "box: try xyzzy", "box: wait there", "box: nothing")
    kind = Reflection(used="words", k=3)
    found = kind.recollect(store, History(Task("t"), "a box"))
    assert found.text.splitlines()[1].startswith("- box") and len(found.text.splitlines()) == 4
    assert kind.parse_citations("go [m1]", (1,)) == ("go [m1]", {})
    notes = {"recalled": "x", "entries": "1 2 3", "among": "1 2 3"}
    figures, _ = learn(kind, store, [{"topics": []}], group(attempt("t", "a box there", "XYZZY there", **notes)))
    assert figures["store/n_used"] == 1 and figures["store/used_share"] == pytest.approx(1 / 3)


def test_what_has_gone_meanwhile_is_passed_over(store: Store) -> None:
    topics(store, "a key: x", "b key: y")
    notes = {"recalled": "x", "entries": "7 2", "among": "7 2 1", "cited": "7 2"}
    figures, _ = learn(Reflection(), store, [{"topics": []}], group(attempt("t", "key", **notes)))
    assert figures["store/n_used"] == 1 and figures["store/used_share"] == 1
    gone = {**notes, "entries": "7", "among": "7"}
    assert "store/used_share" not in learn(Reflection(), store, [], group(attempt("t", "key", **gone)))[0]


# --- prospective -----------------------------------------------------------------------------------------------------


def test_a_summary_becomes_an_entry_or_goes_into_a_known_one(store: Store) -> None:
    kind = Reflection(ask="?")
    first = {"topics": [{"topic": "Keys", "summary": "Red ones open doors."}]}
    figures, policy = learn(kind, store, [first], group(attempt("a", "find the key", solved=True)))
    assert policy.asked == [("memory", "find the key\n> go\nok\nSolved.\n?")] and figures["store/n_merged"] == 0
    merged = {"topics": [{"id": 1, "summary": "Red and blue ones do."}, {"topic": "Sea", "summary": "It is deep."}]}
    figures, policy = learn(kind, store, [merged], group(attempt("b", "another key, red", solved=False)))
    assert policy.asked[0][1].splitlines()[:2] == ["Known:", "1: Keys: Red ones open doors."]
    assert [e.text for e in store.entries()] == ["Keys: Red and blue ones do.", "Sea: It is deep."]
    assert figures["store/n_merged"] == 1 and figures["store/n_entries"] == 2 and figures["store/n_refused"] == 0
    assert store.tasks() == {1: {"a", "b"}, 2: {"b"}} and store.versions(1)[0] == "Keys: Red ones open doors."
    # No task is shown what it has a part in; another one is.
    for task, entries in (("a", ()), ("b", ()), ("c", (1,))):
        assert kind.recollect(store, History(Task(task), "blue keys")).entries == entries
    assert replace(kind, include_same_task=True).recollect(store, History(Task("a"), "blue keys")).entries == (1,)


def test_a_task_is_asked_about_when_it_is_new_and_when_it_is_first_solved(store: Store) -> None:
    kind, calls = Reflection(), []
    for solved in (False, False, True, True):
        _, policy = learn(kind, store, [{"topics": []}], group(attempt("a", "o", solved=solved)))
        calls.append(len(policy.asked))
    assert calls == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("said", "n"),
    [
        ("no JSON", 1),
        ("", 1),
        ("{}", 1),
        ('{"topics": 3}', 1),
        (ContextFull("no room"), 1),
        ('{"topics": [3, {"topic": "a"}, {"topic": "", "summary": "b"}]}', 3),
        ('{"topics": [{"id": 9, "topic": "a", "summary": "b"}, {"id": "1", "topic": "a", "summary": "b"}]}', 2),
        ('{"topics": [{"id": true, "topic": "a", "summary": "b"}]}', 1),
        ('{"topics": [{"topic": "\\ud800", "summary": "b"}]}', 1),
        ("[" * 9000 + "{", 1),
    ],
)
def test_what_is_no_summary_changes_nothing_and_is_counted(store: Store, said: Any, n: int) -> None:
    topics(store, "key: x")
    before = [e.text for e in store.entries()]
    figures, _ = learn(Reflection(), store, [said], group(attempt("a", "the key")))
    assert figures["store/n_refused"] == n and [e.text for e in store.entries()] == before


def test_bounds_hold_however_much_is_said(store: Store) -> None:
    kind = Reflection(max_chars=20, max_new=2, max_topics=3)
    for i in range(4):
        many = {"topics": [{"topic": f"{i} {j} " + "t" * 99, "summary": "s" * 99} for j in range(9)]}
        learn(kind, store, [many], group(attempt(f"t{i}", "o")))
    assert len(store.entries()) == 3 and all(len(e.text) <= 10 + 2 + 20 for e in store.entries())


def test_a_rule_writes_what_was_done_and_merges_by_words_in_common(store: Store) -> None:
    kind = Reflection(writer="rule", max_chars=60)
    assert not asks_policy(kind) and asks_policy(Reflection())

    def step(*done: Trajectory) -> dict[str, float]:
        with store.transaction():
            return dict(kind.learn(store, [group(one) for one in done], "train"))

    step(attempt("a", "find the red key", "north", solved=True), attempt("b", "sail the sea", "sail"))
    figures = step(attempt("c", "find the red door", "south"))
    assert figures["store/n_merged"] == 1 and figures["store/n_entries"] == 2
    assert store.get(1).text == "find the red key: Solved by: north Not solved by: south"
    assert store.tasks()[1] == {"a", "c"}
    step(attempt("d", "find the red key", "w " * 50, solved=True))
    assert len(store.get(1).fields["summary"]) <= 60 and store.get(1).text.endswith("w w")


def test_nothing_of_a_task_that_judges_gets_in_by_a_merge(store: Store, tmp_path: Path) -> None:
    topics(store, "key: x")
    merge = {"topics": [{"id": 1, "summary": "secret"}]}
    with pytest.raises(StoreLeak):
        learn(Reflection(), store, [merge], group(attempt("judge", "the key")))
    assert "secret" not in store.get(1).text
    learn(Reflection(), store, [merge], group(attempt("b", "the key")))
    with pytest.raises(StoreLeak, match="such as b"):
        Store(store.path, judged=frozenset({"b"}))


def test_it_is_a_kind_that_asks_and_hears_and_an_agent() -> None:
    kind: Any = Reflection()
    assert isinstance(kind, QueriesPolicy) and isinstance(kind, ReadsCitations) and isinstance(kind, StoreKind)
    assert check_agent(Remembering(inner=ChatAgent(system=""), store=kind)).ok


def test_most_is_not_needed(store: Store) -> None:
    empty: Sequence[ScoredGroup] = ()
    assert learn(Reflection(neighbours=0), store, [], *empty)[0]["store/n_entries"] == 0
    assert Reflection().recollect(store, History(Task("a"), "o")).text == ""
    _, policy = learn(Reflection(neighbours=0, ask="?"), store, [{}], group(attempt("a", "o")))
    assert policy.asked[0][1].startswith("o\n> go")
