"""Notes: written by the policy, linked and changed by what it says, and nothing lost where it says nothing of use."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from agents.base import History
from agents.stores.contrib.notes import Notes
from agents.stores.entry import Link
from agents.stores.kind import QueriesPolicy, Recollection, StoreKind
from agents.stores.store import Store
from rlhf.data import Action, Outcome, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.errors import ContextFull, EngineError
from tests.agents.spoken import Speaks


def says(*texts: Any) -> Speaks:
    """A policy that says these in order, as JSON where they are no text; an error among them is raised."""
    return Speaks(t if isinstance(t, str | Exception) else json.dumps(t) for t in texts)


def group(task: str, opening: str, *attempts: tuple[str, bool]) -> ScoredGroup:
    made = tuple(
        Trajectory(
            task, i, opening, (Turn(Action(action), "ok"),), Outcome.SOLVED if solved else Outcome.FAILED
        )
        for i, (action, solved) in enumerate(attempts)
    )  # fmt: skip
    return ScoredGroup(task, made, tuple(Score({}, (0.0,), 0.0) for _ in made))


def learn(store: Store, policy: Speaks, *groups: ScoredGroup, **keys: Any) -> dict[str, float]:
    with store.transaction():
        return dict(asyncio.run(Notes(**keys).learn_asking(store, groups, "train", policy)))


KEY = {"content": "The red key opens the door", "context": "houses", "keywords": ["key"], "tags": ["door"]}
DOOR = {"content": "Doors are north", "context": "doors", "keywords": ["door"], "tags": []}


def test_the_second_note_is_linked_to_the_first_and_changes_it(store: Store) -> None:
    # The paper's course: the first note meets nobody and has no links; the second one asks for a link and a change.
    first = says(KEY)
    assert learn(store, first, group("a", "find the key", ("look", True)))["store/n_linked"] == 0
    assert store.links() == [] and len(first.asked) == 1
    assert first.asked[0] == ("memory", "find the key\n> look\nok\nSolved.\n\n" + Notes().ask)
    policy = says(DOOR, {"links": [1], "updates": [{"id": 1, "context": "red houses", "tags": ["north"]}]})
    figures = learn(store, policy, group("b", "find the door", ("north", False)))
    assert figures == {"store/n_entries": 2, "store/n_refused": 0, "store/n_evolved": 1, "store/n_linked": 1}
    assert store.links() == [Link(2, 1)]
    assert policy.asked[1][1].splitlines()[:2] == [
        "New: Doors are north doors [door]",
        "1: The red key opens the door houses [key, door]",
    ]
    changed = store.get(1)
    assert changed.text == "The red key opens the door red houses [key, north]" and changed.version == 2
    assert changed.fields["content"] == KEY["content"], "what a note says stays; what it stands in changes"
    assert store.versions(1)[0] == "The red key opens the door houses [key, door]"


def test_a_note_is_changed_once_by_a_reply(store: Store) -> None:
    learn(store, says(KEY), group("a", "find the key", ("look", True)))
    updates = [{"id": 1}, {"id": 1, "context": "red houses"}, {"id": 1, "tags": ["north"]}]
    figures = learn(store, says(DOOR, {"updates": updates}), group("b", "find the door", ("north", False)))
    assert figures["store/n_evolved"] == figures["store/n_refused"] == 1
    assert store.get(1).text == "The red key opens the door red houses [key, door]" and store.get(1).version == 2


def test_what_a_note_was_told_of_a_task_is_not_shown_to_that_task(store: Store) -> None:
    learn(store, says(KEY), group("b", "find the key", ("look", True)))
    change = {"updates": [{"id": 1, "context": "the door code is 1234"}]}
    learn(store, says(DOOR, change), group("a", "find the door", ("1234", True)))
    learn(store, says({"content": "door after door"}, {"links": [1]}), group("c", "find the door", ("x", False)))
    assert store.tasks() == {1: {"a", "b"}, 2: {"a"}, 3: {"c"}}
    shown = {task: Notes(k=1).recollect(store, History(Task(task), "the door code")) for task in "abd"}
    assert "1234" in shown["d"].text and 1 not in shown["b"].entries
    assert shown["a"].entries == (3,), "found further down, and no way over a link"


@pytest.mark.parametrize("said", ["no JSON", '{"content": ', "[1, 2]", '{"content": ""}', '{"content": 3}', "", "{}"])
def test_a_note_that_is_none_leaves_a_plain_one(store: Store, said: str) -> None:
    figures = learn(store, says(said), group("a", "find the key", ("look", False)))
    assert figures["store/n_refused"] == 1 and figures["store/n_entries"] == 1
    assert store.get(1).text == "find the key Not solved by: look"


def test_a_question_that_is_too_long_leaves_a_plain_note(store: Store) -> None:
    policy = says(ContextFull("no room"), KEY, ContextFull("no room"))
    figures = learn(store, policy, group("a", "the key", ("x", True)), group("b", "the key", ("y", True)))
    assert store.get(1).text == "the key Solved by: x"
    assert figures["store/n_refused"] == 2 and figures["store/n_entries"] == 2


@pytest.mark.parametrize(
    "said",
    [
        {"links": [7, True, "1", [1]]},
        {"updates": [{"id": 7, "context": "x"}, {"id": [1]}, "x", {"context": "x"}]},
        {"links": {"1": 1}, "updates": 3},
        {"updates": [{"id": 1}, {"id": 1, "context": 5, "tags": "x"}]},
    ],
)
def test_ids_that_are_not_there_and_odd_values_change_nothing(store: Store, said: Any) -> None:
    learn(store, says(KEY), group("a", "find the key", ("look", True)))
    before = store.get(1)
    figures = learn(store, says(DOOR, said), group("b", "find the door", ("north", True)))
    assert store.get(1) == before and store.links() == []
    assert figures["store/n_refused"] == (4 if "7" in json.dumps(said) else 0) and figures["store/n_evolved"] == 0


def test_where_the_engine_fails_nothing_of_the_step_is_stored(store: Store) -> None:
    with pytest.raises(EngineError):
        learn(store, says(KEY, EngineError("gone")), group("a", "o", ("x", True)), group("b", "o", ("y", True)))
    assert store.entries() == []


def test_a_task_leaves_one_note_and_another_only_when_it_is_first_solved(store: Store) -> None:
    learn(store, says(KEY), group("a", "o", ("x", False)))
    quiet = says()
    learn(store, quiet, group("a", "o", ("y", False)))
    assert quiet.asked == [] and store.get(1).version == 1
    learn(store, says(DOOR), group("a", "o", ("y", False), ("z", True)))
    assert store.get(1).fields["content"] == DOOR["content"] and store.get(1).fields["solved"]
    learn(store, quiet, group("a", "o", ("y", True)))
    assert quiet.asked == [] and len(store.entries()) == 1


def test_an_opening_is_shown_the_nearest_notes_and_those_linked_to_them(store: Store) -> None:
    for name, content in (("a", "red key"), ("b", "blue sea"), ("c", "green hill"), ("d", "red hat")):
        learn(store, says({"content": content}, {}), group(name, content, ("x", True)))
    with store.transaction():
        store.link(2, 1)
    notes = Notes(k=2)
    assert notes.recollect(store, History(Task("z"), "red thing")).entries == (1, 4, 2)
    assert notes.recollect(store, History(Task("a"), "red thing")).entries == (4,), "not its own, and no way to it"
    assert notes.recollect(store, History(Task("z"), "red key")).text.splitlines()[:2] == ["Notes:", "- red key"]
    assert notes.recollect(store, History(Task("z"), "nothing known")) == Recollection()
    assert Notes(k=1).recollect(store, History(Task("z"), "hill")).entries == (3,)


def test_bounds_hold_however_much_is_said(store: Store) -> None:
    long = {"content": "a " * 5000, "context": "b " * 5000, "keywords": ["c" * 500] * 50, "tags": [1, " ", "d"]}
    for i in range(4):
        reply = {**long, "content": f"{i} {long['content']}"}
        learn(store, says(reply, {}), group(f"t{i}", "o " * 5000, ("x", True)), max_notes=2, max_chars=20)
    assert [e.origin.task for e in store.entries()] == ["t2", "t3"]
    assert all(len(e.text) < 20 + 20 + 50 for e in store.entries())


def test_it_is_a_kind_that_asks_and_can_do_without(store: Store) -> None:
    assert isinstance(Notes(), QueriesPolicy) and isinstance(Notes(), StoreKind)
    with store.transaction():
        figures = Notes().learn(store, [group("a", "o", ("x", True)), replace(group("b", "o", ("x", True)))], "train")
    assert figures["store/n_entries"] == 2 and store.get(1).text == "o Solved by: x"
