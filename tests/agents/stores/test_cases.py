"""Cases: which are kept, which are shown, and that the retriever learns which of them help."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.base import History
from agents.chat import ChatAgent
from agents.check import ScriptedPolicy, check_agent
from agents.contrib.rafa import IMAGINE, PROPOSE, VALUE, ReasonForFuture
from agents.memory.base import DemonstrationInputs
from agents.memory.window import Window
from agents.stores.cases import Cases, chances, choose, cross_entropy, features, learnt, value_of, weights_of
from agents.stores.copies import content_hash
from agents.stores.entry import Entry, Origin
from agents.stores.kind import ENTRIES, RECALLED, Recollection, recalled
from agents.stores.remembering import Bound, Remembering
from agents.stores.store import Store
from rlhf.data import Action, Message, Outcome, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.rollout.runner import RolloutBatch
from tests.agents.spoken import Says


def attempt(task: str, opening: str, actions: str, solved: bool, shown: str = "") -> Trajectory:
    notes = {RECALLED: "text", ENTRIES: shown} if shown else {}
    turns = [Turn(Action(action, notes=notes if not i else {}), "ok") for i, action in enumerate(actions.split())]
    return Trajectory(task, 0, opening, tuple(turns), Outcome.SOLVED if solved else Outcome.FAILED)


def group(*attempts: Trajectory) -> ScoredGroup:
    numbered = tuple(replace(t, attempt=i) for i, t in enumerate(attempts))
    return ScoredGroup(attempts[0].task_id, numbered, tuple(Score({}, (0.0,) * len(t.turns), 0.0) for t in numbered))


def begin(task: str, opening: str) -> History:
    return History(Task(task), opening)


def test_of_each_task_the_shortest_solution_and_the_newest_failure_are_kept(store: Store) -> None:
    first = group(
        attempt("a", "find the key", "n n e", True),
        attempt("a", "find the key", "n e", True),
        attempt("a", "find the key", "s", False),
        attempt("a", "find the key", "w", False),
    )
    assert Cases().learn(store, [first], "train") == {"store/n_entries": 2.0, "store/n_recalled": 0.0}
    second = group(attempt("a", "find the key", "n n e", True), attempt("a", "find the key", "e e", False))
    Cases().learn(store, [second], "train")
    cases = [(c.fields["solved"], c.fields["actions"], c.version, c.origin) for c in store.entries("case")]
    assert cases == [(True, ["n", "e"], 1, Origin("a", "train")), (False, ["e", "e"], 2, Origin("a", "train"))]


def test_an_action_that_nobody_could_read_is_no_part_of_a_case(store: Store) -> None:
    made = attempt("a", "o", "n x e", True)
    turns = (made.turns[0], replace(made.turns[1], action=Action("x", error="what?")), made.turns[2])
    Cases().learn(store, [group(replace(made, turns=turns)), group(replace(made, task_id="b", turns=()))], "train")
    assert [c.fields["actions"] for c in store.entries()] == [["n", "e"]]


def test_of_too_many_the_oldest_go(store: Store) -> None:
    for name in "abcd":
        Cases(max_cases=2).learn(store, [group(attempt(name, f"task {name}", "x", True))], "train")
    assert [c.origin.task for c in store.entries()] == ["c", "d"]


def test_what_is_shown_tells_solved_ones_from_the_others_and_leaves_the_task_itself_out(store: Store) -> None:
    told = [("a", "red key", "n e", True), ("b", "red door", "s", False), ("c", "blue sea", "w", True)]
    Cases().learn(store, [group(attempt(*one)) for one in told], "train")
    found = Cases(k=2).recollect(store, begin("d", "the red key"))
    assert found == Recollection("Solved before:\nred key\n> n, e\nNot solved before:\nred door\n> s", (1, 2))
    assert Cases(k=3).recollect(store, begin("a", "red key")).entries == (2, 3)
    assert 1 in Cases(k=3, include_same_task=True).recollect(store, begin("a", "red key")).entries
    assert Cases(k=1, max_chars=3).recollect(store, begin("d", "red key")).text == "Solved before:\nred\n> n, "
    empty = Store(store.path.with_name("empty"), split="train")
    assert Cases().recollect(empty, begin("d", "x")) == Recollection()
    empty.close()


def test_a_task_is_shown_other_cases_in_another_step_also_where_no_case_is_new(store: Store) -> None:
    cases, told = Cases(k=1, alpha=1.0, lr=0.0), [group(attempt(name, "red key", "n", True)) for name in "abcdef"]
    shown = []
    for _ in range(20):
        cases.learn(store, told, "train")
        both = [cases.recollect(store, begin("d", "red key")).entries for _ in range(2)]
        assert both[0] == both[1]
        shown.append(both[0])
    assert store.n_entries() == 6 and len(set(shown)) > 2


def test_the_choice_by_worked_numbers() -> None:
    # exp(-.4 / .1) = .018316 and exp(-.8 / .1) = .000335 of the best one's 1; over their sum 1.018651.
    assert chances((0.9, 0.5, 0.1), 0.1) == pytest.approx([0.981690, 0.017980, 0.000329], abs=1e-6)
    assert choose((0.1, 0.9, 0.5, 0.9), 3, 0.0, "") == [3, 1, 2]
    assert choose((0.1, 0.9), 5, 0.0, "") == [1, 0] and choose((), 2, 0.5, "s") == []
    drawn = [choose((0.9, 0.5, 0.1), 1, 0.4, str(i))[0] for i in range(2000)]
    expected = chances((0.9, 0.5, 0.1), 0.4)
    assert [drawn.count(i) / 2000 for i in range(3)] == pytest.approx(expected, abs=0.04)
    assert choose((0.9, 0.5, 0.1), 2, 0.4, "s") == choose((0.9, 0.5, 0.1), 2, 0.4, "s")


def test_features_and_one_step_by_hand() -> None:
    case = Entry(1, "case", "Find the red key", {"solved": True, "actions": []})
    # {find, the, blue, key} and {find, the, red, key} share 3 of 5 words.
    assert features("find the blue key", case) == (1.0, 0.6, 1.0, 0.6)
    assert features("find the blue key", replace(case, fields={"solved": False})) == (1.0, 0.6, 0.0, 0.0)
    assert features("", replace(case, text="")) == (1.0, 0.0, 1.0, 0.0)
    x, w = (1.0, 0.5), (0.0, 2.0)
    # w x = 1, Q = .731059: a success moves w by .1 (1 - .731059) x = (.026894, .013447); its loss is -ln Q = .313262.
    assert value_of(w, x) == pytest.approx(0.731059, abs=1e-6)
    assert learnt(w, x, True, 0.1) == pytest.approx((0.026894, 2.013447), abs=1e-6)
    assert cross_entropy(w, x, True) == pytest.approx(0.313262, abs=1e-6)
    assert cross_entropy(w, x, False) == pytest.approx(1.313262, abs=1e-6)
    assert value_of((800.0,), (1.0,)) == 1.0 and value_of((-800.0,), (1.0,)) == 0.0
    assert cross_entropy((-800.0,), (1.0,), True) == 800.0


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=2), st.lists(st.floats(-3, 3), min_size=2, max_size=2))
def test_a_step_goes_down_the_gradient(w: list[float], x: list[float]) -> None:
    for solved in (True, False):
        numeric = []
        for i in range(2):
            moved = [list(w), list(w)]
            moved[0][i] += 1e-5
            moved[1][i] -= 1e-5
            numeric.append((cross_entropy(moved[0], x, solved) - cross_entropy(moved[1], x, solved)) / 2e-5)
        assert [a - b for a, b in zip(learnt(w, x, solved, 1.0), w, strict=True)] == pytest.approx(
            [-g for g in numeric], abs=1e-4
        )


def test_the_retriever_learns_that_failures_help_and_prefers_them(store: Store) -> None:
    # At first a solved case comes before one that failed. Where failures turn out to help, the order turns around.
    told = [group(attempt("a", "red key", "n", True)), group(attempt("b", "red key", "s", False))]
    cases = Cases(k=1, lr=0.5)
    cases.learn(store, told, "train")
    assert cases.recollect(store, begin("z", "red key")).entries == (1,)
    losses = []
    for i in range(20):
        helped = attempt(f"t{i}", "red key", "x", True, shown="2")
        not_helped = attempt(f"u{i}", "red key", "x", False, shown="1")
        losses.append(cases.learn(store, [group(helped), group(not_helped)], "train")["store/retriever_loss"])
        for case in store.entries()[2:]:
            store.delete(case.id)
    assert losses[-1] < losses[0] / 2
    assert cases.recollect(store, begin("z", "red key")).entries == (2,)
    assert weights_of(store)[2] < 0
    with Store(store.path) as read:
        assert weights_of(read) == weights_of(store), "what is learnt lies in the store"


def test_the_opening_begins_with_what_is_recalled_and_a_replay_is_shown_the_same(store: Store) -> None:
    Cases().learn(store, [group(attempt("a", "red key", "n e", True))], "train")
    agent = Remembering(inner=ChatAgent(system="", memory=Window(turns=1)), store=Cases(k=1))
    before = content_hash(store)
    with Store(store.path) as read:
        bound, turns, policy = Bound(agent, read), (), ScriptedPolicy(["look", "go north"])
        for _ in range(3):
            action = asyncio.run(bound.act(History(Task("d"), "red door", turns), policy))
            turns = (*turns, Turn(action, "ok"))
        first = "Solved before:\nred key\n> n, e\nred door"
        assert [prompt[0].content for prompt in policy.prompts] == [first, first, f"{first}\n...\nok"]
        assert dict(turns[0].action.notes) == {RECALLED: first.removesuffix("\nred door"), ENTRIES: "1"}
        assert all(not turn.action.notes for turn in turns[1:])
        assert recalled(Trajectory("d", 0, "red door", turns, Outcome.FAILED)).entries == (1,)
        assert content_hash(store) == before, "an episode only reads"
        # The store moves on; the episode that began before does not.
        Cases().learn(store, [group(attempt("b", "red door", "s", True))], "train")
        again = ScriptedPolicy(["look"])
        asyncio.run(bound.act(History(Task("d"), "red door", turns[:1]), again))
        assert again.prompts[0] == policy.prompts[1]
        asyncio.run(bound.act(History(Task("d"), "red door"), again))
        assert "> s" in again.prompts[1][0].content
    assert recalled(Trajectory("d", 0, "o", (), Outcome.FAILED)) == Recollection()


def test_futures_are_imagined_from_what_earlier_episodes_came_to(store: Store) -> None:
    # In-context policy iteration: what was lived stands before each proposal, imagined step and value.
    agent = Remembering(inner=ReasonForFuture(depth=1, executor=ChatAgent(system="")), store=Cases(k=1))
    told = "Solved before:\nred key\n> n\nred door"

    def believe(role: str, messages: tuple[Message, ...]) -> str:
        said = messages[-1].content
        lived, imagined = told in said, said.partition("red door")[2]
        return {PROPOSE: "s\nn", IMAGINE: "a door", VALUE: "9" if lived and "> n" in imagined else "5"}[role]

    def first() -> tuple[str, Says]:
        policy = Says(believe)
        return asyncio.run(Bound(agent, store).act(History(Task("d"), "red door"), policy)).text, policy

    assert first()[0] == "s", "all are as good, and it was named first"
    Cases().learn(store, [group(attempt("a", "red key", "n", True))], "train")
    action, policy = first()
    assert action == "n"
    assert [role for role, _ in policy.asked] == [PROPOSE, IMAGINE, IMAGINE, VALUE, VALUE]
    assert all(said.startswith(told) for _, said in policy.asked)


def test_a_recall_that_found_nothing_is_not_counted(store: Store) -> None:
    def played() -> Trajectory:
        history, turns = begin("a", "red door"), ()
        for _ in range(2):
            action = asyncio.run(Bound(agent, store).act(replace(history, turns=turns), ScriptedPolicy(["look"])))
            turns = (*turns, Turn(action, "ok"))
        return Trajectory("a", 0, "red door", turns, Outcome.SOLVED)

    agent = Remembering(inner=ChatAgent(system=""), store=Cases(k=1))
    before = played()
    assert dict(before.turns[0].action.notes) == {RECALLED: "", ENTRIES: ""}, "the store was asked"
    figures = RolloutBatch((group(before),), 1.0).metrics()
    assert figures["agent/n_recalled"] == figures["agent/n_recalled_entries"] == 0
    assert "agent/chars_recalled" not in figures
    Cases().learn(store, [group(attempt("b", "red key", "n", True))], "train")
    after = played()
    figures = RolloutBatch((group(before, after, after),), 1.0).metrics()
    assert figures["agent/n_recalled"] == figures["agent/n_recalled_entries"] == 2 / 3
    assert figures["agent/chars_recalled"] == len(after.turns[0].action.notes[RECALLED]) > 0


def test_without_a_store_it_is_the_inner_agent() -> None:
    agent = Remembering(inner=ChatAgent(system=""))
    assert check_agent(agent).ok, str(check_agent(agent))
    policy, alone = ScriptedPolicy(["look"]), ScriptedPolicy(["look"])
    done = asyncio.run(agent.act(begin("a", "o"), policy))
    assert done == asyncio.run(ChatAgent(system="").act(begin("a", "o"), alone)) and policy.prompts == alone.prompts
    assert agent.write(DemonstrationInputs("go")) == "go" and tuple(agent.needs) == () and not agent.needs_tools
    assert math.isclose(sum(chances((0.0, 0.0), 1.0)), 1.0)


def test_two_groups_of_one_task_leave_one_solution_of_it(store: Store) -> None:
    Cases().learn(store, [group(attempt("a", "o", actions, True)) for actions in ("n n", "n")], "train")
    assert [case.fields["actions"] for case in store.entries("case")] == [["n"]]
