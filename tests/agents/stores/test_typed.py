"""Typed memory: each kind is written, bounded and read by its own rules, and may be left out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agents.base import History
from agents.chat import ChatAgent
from agents.check import check_agent
from agents.stores.asking import best_attempts, news
from agents.stores.contrib.facts import Pattern
from agents.stores.contrib.typed import Core, Episodic, Procedural, Semantic, Typed, recent_and_like
from agents.stores.entry import Entry, Origin
from agents.stores.faults import StoreLeak
from agents.stores.kind import QueriesPolicy, StoreKind, asks_policy
from agents.stores.remembering import Remembering
from agents.stores.store import Store
from rlhf.data import Action, Outcome, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.errors import ContextFull, EngineError
from tests.agents.spoken import Speaks

ALL: dict[str, Any] = {"core": None, "episodic": None, "semantic": None, "procedural": None}


def group(task: str, opening: str, *attempts: tuple[str, bool]) -> ScoredGroup:
    made = tuple(
        Trajectory(
            task, i, opening, tuple(Turn(Action(a), "ok") for a in actions.split()),
            Outcome.SOLVED if solved else Outcome.FAILED,
        )
        for i, (actions, solved) in enumerate(attempts)
    )  # fmt: skip
    return ScoredGroup(task, made, tuple(Score({}, (0.0,) * len(t.turns), 0.0) for t in made))


def learn(kind: Typed, store: Store, says: list[Any], *groups: ScoredGroup) -> tuple[dict[str, float], Speaks]:
    policy = Speaks(s if isinstance(s, str | Exception) else json.dumps(s) for s in says)
    with store.transaction():
        return dict(asyncio.run(kind.learn_asking(store, groups, "train", policy))), policy


def shown(kind: Typed, store: Store, opening: str, task: str = "z") -> list[str]:
    return kind.recollect(store, History(Task(task), opening)).text.splitlines()


def texts(store: Store, kind: str) -> list[str]:
    return [entry.text for entry in store.entries(kind)]


@pytest.mark.parametrize("most", [20, 21, 25, 26, 60])
@pytest.mark.parametrize("solved", [False, True])
def test_the_text_of_an_episode_is_never_longer_than_it_may_be(store: Store, most: int, solved: bool) -> None:
    kind = Typed(**ALL | {"episodic": Episodic(max_chars=most)}, ask_policy=False)
    long = group("a", "find the red key of the old door in the hall", ("north north north", solved))
    kind.learn(store, [long], "train")
    [text] = texts(store, "episodic")
    assert len(text) <= most and "> " in text and text.endswith("(solved)" if solved else "(not solved)")
    assert text == text.strip()


def test_rules_leave_no_more_facts_of_an_attempt_than_are_new_at_once(store: Store) -> None:
    rules = Pattern(patterns=(r"(?P<subject>\w+) is (?P<relation>on) the (?P<object>\w+)",))
    kind = Typed(**ALL | {"semantic": Semantic(extractor=rules, max_new=2)}, ask_policy=False)
    opening = "Key is on the box. Key is on the box. Lamp is on the table. Cat is on the mat."
    kind.learn(store, [group("a", opening, ("n", True))], "train")
    assert texts(store, "semantic") == ["key, on, box", "lamp, on, table"]


def test_of_two_groups_of_one_task_the_best_attempt_of_both_is_told(store: Store) -> None:
    kind = Typed(**ALL | {"procedural": Procedural()}, ask_policy=False)
    groups = [
        group("a", "o", ("n n n", True)),
        group("b", "p", ("s", True)),
        group("a", "o", ("w w", True), ("w", False)),
    ]
    kind.learn(store, groups, "train")
    assert texts(store, "procedural") == ["o > w, w", "p > s"]
    assert [t.attempt for t in best_attempts([groups[2], groups[0]])] == [0]
    assert [len(t.turns) for t in best_attempts([groups[2], groups[0]])] == [2]
    assert [t.task_id for t in news(groups, {"a": True})] == ["b"]
    unsolved = [group("a", "o", ("n", False)), group("a", "o", ("e e", True))]
    assert [t.solved for t in news(unsolved, {"a": False})] == [True]


def test_one_question_writes_core_facts_and_how_to_and_a_rule_the_episode(store: Store) -> None:
    kind = Typed(core=Core(begin=("Be brief.",)))
    said = {"core": [{"op": "ADD", "text": "Look first."}], "facts": ["The key is red."], "how_to": "Go north twice."}
    figures, policy = learn(kind, store, [said], group("a", "find the key", ("n n", True)))
    assert policy.asked[0][0] == "memory"
    assert policy.asked[0][1].splitlines()[:2] == ["Always:", "1: Be brief."]
    assert '"how_to"' in policy.asked[0][1] and policy.asked[0][1].count("Solved.") == 1
    assert shown(kind, store, "find the key of the door") == [
        "Always:", "Be brief.", "Look first.", "How to:", "- Go north twice.", "Known:", "- The key is red.",
        "Before:", "- find the key > n, n (solved)",
    ]  # fmt: skip
    assert figures == {
        "store/n_entries": 5, "store/n_recalled": 0, "store/n_refused": 0,
        "store/n_core": 2, "store/n_episodic": 1, "store/n_semantic": 1, "store/n_procedural": 1,
    }  # fmt: skip
    found = kind.recollect(store, History(Task("z"), "find the key"))
    assert sorted(found.entries) == [1, 2, 3, 4, 5]
    # A task is not shown what it left itself, but for the core.
    assert shown(kind, store, "find the key", "a") == ["Always:", "Be brief.", "Look first."]


@pytest.mark.parametrize("left", sorted(ALL))
def test_each_kind_stands_alone(store: Store, left: str) -> None:
    makes = {"core": Core, "episodic": Episodic, "semantic": Semantic, "procedural": Procedural}
    kind = Typed(**{**ALL, left: makes[left]()})
    said = {"core": [{"op": "ADD", "text": "x key"}], "facts": ["y key"], "how_to": "z key"}
    says = [said] if asks_policy(kind) else []
    with store.transaction():
        policy = Speaks(map(json.dumps, says))
        groups = [group("a", "the key", ("n", True))]
        asyncio.run(kind.learn_asking(store, groups, "train", policy)) if says else kind.learn(store, groups, "train")
    assert {e.kind for e in store.entries()} == {left}
    assert len(shown(kind, store, "the key")) == 2
    keys = {"core": "core", "semantic": "facts", "procedural": "how_to"}
    if says:
        assert [key for key in keys.values() if f'"{key}"' in policy.asked[0][1]] == [keys[left]]


# --- the core --------------------------------------------------------------------------------------------------------


def test_the_core_begins_every_opening_before_anything_was_learnt(store: Store) -> None:
    kind = Typed(**{**ALL, "core": Core(begin=("Be brief.", "Look."))})
    assert shown(kind, store, "anything") == ["Always:", "Be brief.", "Look."]
    assert shown(Typed(), store, "anything") == []
    # A line that was deleted does not come back.
    learn(kind, store, [{"core": [{"op": "DELETE", "id": 1}]}, {}], group("a", "o", ("n", False)))
    assert shown(kind, store, "anything") == ["Always:", "Look."]
    learn(kind, store, [{"core": {"op": "UPDATE", "id": 2, "text": "Look up."}}], group("b", "o", ("n", False)))
    assert shown(kind, store, "anything") == ["Always:", "Look up."] and store.versions(2) == ["Look.", "Look up."]
    assert store.tasks()[2] == {"", "b"}


@pytest.mark.parametrize(
    "operations",
    [
        [{"op": "ADD", "text": f"line {i}"} for i in range(3)],
        [{"op": "ADD", "text": "a" * 21}],
        [{"op": "DELETE", "id": 9}],
        [{"op": "DELETE", "id": 1}, {"op": "UPDATE", "id": 1, "text": "x"}],
        [{"op": "ADD", "text": "fine"}, {"op": "ADD"}],
        [{"op": "ADD", "text": ""}],
        "ADD this",
        None,
        3,
    ],
)
def test_operations_that_break_a_bound_or_name_no_line_change_nothing(store: Store, operations: Any) -> None:
    kind = Typed(**{**ALL, "core": Core(begin=("One.",), max_lines=3, max_chars=20)})
    figures, _ = learn(kind, store, [{"core": operations}], group("a", "o", ("n", False)))
    assert texts(store, "core") == ["One."] and figures["store/n_refused"] == 1


def test_a_line_may_take_the_place_of_one_that_goes(store: Store) -> None:
    kind = Typed(**{**ALL, "core": Core(begin=("One.",), max_lines=1)})
    learn(kind, store, [{"core": [{"op": "DELETE", "id": 1}]}], group("a", "o", ("n", False)))
    learn(kind, store, [{"core": [{"op": "ADD", "text": "Two."}]}], group("b", "o", ("n", False)))
    assert texts(store, "core") == ["Two."]


# --- the others ------------------------------------------------------------------------------------------------------


def test_likeness_and_recency_by_worked_numbers() -> None:
    known = [
        Entry(i, "episodic", "", {"opening": text}) for i, text in enumerate(["red key", "red door", "blue sea"], 1)
    ]

    def order(**keys: Any) -> list[int]:
        return [entry.id for entry in recent_and_like(known, "red key", Episodic(k=3, half_life=1, **keys))]

    # Words in common: 1, 1/3, 0. Recency: 1/4, 1/2, 1.
    assert order(recency=0) == [1, 2, 3]
    assert order(recency=1) == [3, 2, 1]
    # 0.4: .6 + .1 = .7, .2 + .2 = .4, .4: of equal ones the newer.
    assert order(recency=0.4) == [1, 3, 2]
    assert order(recency=0.6) == [3, 1, 2]  # .55, .433, .6


def test_an_episode_is_the_newest_attempt_of_its_task(store: Store) -> None:
    kind = Typed(**{**ALL, "episodic": Episodic(max_entries=2, max_chars=40)})
    assert not asks_policy(kind)
    for task, actions, solved in (("a", "n", True), ("b", "s", False), ("a", "w w", False), ("c", "x " * 90, True)):
        with store.transaction():
            kind.learn(store, [group(task, f"find {task} " + "long " * 20, (actions, solved))], "train")
    assert [e.origin.task for e in store.entries()] == ["a", "c"]
    assert all(len(text) <= 40 for text in texts(store, "episodic"))
    assert texts(store, "episodic")[0].endswith("> w, w (not solved)")


def test_a_fact_is_kept_once_and_remembers_who_told_it(store: Store) -> None:
    kind = Typed(**{**ALL, "semantic": Semantic(max_new=2, max_entries=3)})
    learn(kind, store, [{"facts": ["The key is red.", "A", "not this one"]}], group("a", "o", ("n", False)))
    figures, _ = learn(kind, store, [{"facts": ["the KEY is  red.", 3, ""]}], group("b", "o", ("n", False)))
    assert texts(store, "semantic") == ["The key is red.", "A"] and figures["store/n_refused"] == 2
    assert store.tasks()[1] == {"a", "b"}
    assert shown(kind, store, "the key", "a") == ["Known:", "- The key is red."], "another task told it too"
    learn(kind, store, [{"facts": ["B", "C"]}], group("c", "o", ("n", False)))
    assert texts(store, "semantic") == ["A", "B", "C"]


def test_rules_may_read_the_facts(store: Store) -> None:
    rules = Pattern(patterns=(r"(?P<subject>\w+) (?P<relation>is) (?P<object>\w+)",))
    kind = Typed(**{**ALL, "semantic": Semantic(extractor=rules)}, ask_policy=False)
    with store.transaction():
        kind.learn(store, [group("a", "The key is red. The key is red.", ("n", False))], "train")
    assert texts(store, "semantic") == ["key, is, red"]


def test_how_tos_are_of_solved_tasks_alone_and_the_shortest_stays(store: Store) -> None:
    kind = Typed(**{**ALL, "procedural": Procedural(k=1)})
    for says, attempts in (
        ({"how_to": "no"}, [("n n n", False)]),
        ({"how_to": "long way"}, [("n n n", True), ("n", False)]),
        ({"how_to": "longer"}, [("n n n n", True)]),
        ({"how_to": "short way"}, [("n n", True)]),
    ):
        learn(kind, store, [says], group("a", "red key", *attempts))
    assert texts(store, "procedural") == ["short way"] and store.versions(1) == ["long way", "short way"]
    learn(kind, store, [{"how_to": "sail"}], group("b", "blue sea", ("x", True)))
    assert shown(kind, store, "a red door") == ["How to:", "- short way"]
    assert shown(kind, store, "sail the sea") == ["How to:", "- sail"] and shown(kind, store, "green") == []


@pytest.mark.parametrize(
    "said", ["no JSON", "", "[]", '{"how_to": 3, "facts": "x"}', ContextFull("no room"), "[" * 9000]
)
def test_what_cannot_be_read_is_counted_and_the_rules_write_what_they_can(store: Store, said: Any) -> None:
    figures, _ = learn(Typed(), store, [said], group("a", "find the key", ("n n", True)))
    assert figures["store/n_refused"] >= 1
    assert texts(store, "procedural") == ["find the key > n, n"] and len(texts(store, "episodic")) == 1
    assert texts(store, "semantic") == texts(store, "core") == []


def test_half_a_character_is_no_reason_to_fail(store: Store) -> None:
    said = '{"facts": ["\\ud800 fact"], "how_to": "go \\udfff", "core": [{"op": "ADD", "text": "\\ud800x"}]}'
    learn(Typed(), store, [said], group("a", "o", ("n", True)))
    assert [texts(store, kind) for kind in ("semantic", "procedural", "core")] == [["fact"], ["go"], ["x"]]


def test_an_engine_that_fails_leaves_nothing_and_a_task_that_judges_neither(store: Store) -> None:
    with pytest.raises(EngineError):
        learn(Typed(), store, [{}, EngineError("gone")], group("a", "o", ("n", True)), group("b", "o", ("n", True)))
    with pytest.raises(StoreLeak):
        learn(Typed(), store, [{}], group("judge", "o", ("n", True)))
    kind = Typed(**{**ALL, "core": Core(begin=("One.",))})
    learn(kind, store, [{}], group("a", "o", ("n", True)))
    with pytest.raises(StoreLeak):
        learn(kind, store, [{"core": [{"op": "UPDATE", "id": 1, "text": "x"}]}], group("judge", "o", ("n", True)))
    assert texts(store, "core") == ["One."]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (ALL, "at least one"),
        ({"ask_policy": False}, "semantic has no extractor"),
        ({"ask_policy": False, "semantic": None}, "core.begin is empty"),
    ],
)
def test_a_memory_that_nobody_writes_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Typed(**keys)


@pytest.mark.parametrize("begin", [("",), ("a" * 101,), ("a",) * 9])
def test_a_core_begins_within_its_bounds(begin: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="begin is not 8 lines"):
        Core(begin=begin)


def test_it_is_a_kind_that_asks_and_an_agent(store: Store) -> None:
    assert isinstance(Typed(), QueriesPolicy) and isinstance(Typed(), StoreKind) and asks_policy(Typed())
    assert not asks_policy(Typed(ask_policy=False, core=None, semantic=None))
    assert check_agent(Remembering(inner=ChatAgent(system=""), store=Typed())).ok
    store.add("case", "of another kind", Origin("a", "train"))
    assert shown(Typed(), store, "of another kind") == []


def test_what_is_written_anew_at_every_step_does_not_pile_up(store: Store) -> None:
    kind = Typed(core=None, semantic=None, ask_policy=False)
    for _ in range(20):
        kind.learn(store, [group("a", "find the key", ("go", True))], "train")
    tables = [table for table, _ in store.rows_of_all()]
    assert tables.count("entry") == 2 and tables.count("earlier") == 0
