"""Episodes that begin in the middle of a task: what one of them leaves is the task's, and hidden from all of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agents.base import History
from agents.chat import ChatAgent
from agents.stores.cases import Cases
from agents.stores.contrib.facts import Pattern
from agents.stores.contrib.graph import FACTS, Graph
from agents.stores.contrib.notes import Notes
from agents.stores.contrib.reflection import Reflection
from agents.stores.contrib.typed import Episodic, Procedural, Typed
from agents.stores.kind import RECALLED, StoreKind, as_whole_tasks, asks_policy
from agents.stores.remembering import Bound, Remembering
from agents.stores.store import Store
from rlhf.data import Action, Outcome, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.training.contrib.memory_store import StoreKeeper
from tests.agents.spoken import Says

KEY = Pattern(patterns=(r"(?P<subject>key) (?P<relation>in) the (?P<object>box)",))
KINDS: dict[str, Any] = {
    "cases": Cases(),
    "notes": Notes(),
    "typed": Typed(core=None, semantic=None, episodic=Episodic(), procedural=Procedural(), ask_policy=False),
    "reflection": Reflection(writer="rule", used="words"),
    "graph": Graph(extractor=KEY),
}
TASK = Task("w/1")
FACT = json.dumps({"new": [["key", "in", "box"]], "old": []})


def turns(n: int) -> tuple[Turn, ...]:
    return tuple(Turn(Action(f"go {i}", notes={FACTS: FACT}), "the key in the box") for i in range(n))


STARTS = [TASK.started_after(turns(1)), TASK.started_after(turns(2), mark="0a1b2c3d")]


def learn(kind: StoreKind, store: Store, task: Task) -> None:
    """What a step leaves that made one attempt at a task, which solved it."""
    agent = Remembering(inner=ChatAgent(system=""), store=kind)
    trajectory = Trajectory(task.id, 0, "find the key", turns(3), Outcome.SOLVED, n_given=len(task.prefix))
    group = ScoredGroup(task.id, (trajectory,), (Score({}, (0.0,) * 3, 0.0),))
    keeper: Any = StoreKeeper(agent, store, Bound(agent, store))
    if asks_policy(kind):  # which nobody answers here
        kind.learn(store, as_whole_tasks([group]), "train")
    else:
        asyncio.run(keeper.learn([group], None, ""))


def shown(kind: StoreKind, store: Store, task: Task) -> str:
    agent = Remembering(inner=ChatAgent(system=""), store=kind)
    history = History(task, "find the key", task.prefix)
    return asyncio.run(Bound(agent, store).act(history, Says("go"))).notes[RECALLED]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("of", [TASK, *STARTS])
def test_no_start_of_a_task_is_shown_what_another_start_of_it_left(store: Store, name: str, of: Task) -> None:
    kind = KINDS[name]
    learn(kind, store, of)
    assert {task for tasks in store.tasks().values() for task in tasks} == {"w/1"}
    assert shown(kind, store, Task("w/2"))
    assert [shown(kind, store, task) for task in (TASK, *STARTS)] == ["", "", ""]


@pytest.mark.parametrize("name", KINDS)
def test_a_task_of_many_starts_leaves_what_one_task_does(store: Store, name: str) -> None:
    kind = KINDS[name]
    learn(kind, store, TASK)
    n = store.n_entries()
    for mark in range(20):
        learn(kind, store, TASK.started_after(turns(1), mark=f"{mark:08x}"))
    assert store.n_entries() == n and len(store.kept("told")) < 20
