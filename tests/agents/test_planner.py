"""Planner and executor: when a subgoal begins, how it ends, and who is shown what."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agents.base import History
from agents.chat import ChatAgent
from agents.check import check_agent
from agents.memory.base import DemonstrationInputs
from agents.memory.summary import Summary
from agents.memory.window import Window
from agents.planner import PLAN, PlannerExecutor
from agents.tools import ToolAgent
from rlhf.data import (
    Action,
    Finish,
    Generation,
    Outcome,
    Prompt,
    Role,
    Score,
    ScoredGroup,
    Task,
    Trajectory,
    Turn,
)
from rlhf.rollout.runner import RolloutBatch
from tests.agents.spoken import Speaks


def agent(**keys: Any) -> PlannerExecutor:
    return PlannerExecutor(**{"plan_system": "", "executor": ChatAgent(system=""), **keys})


def play(made: PlannerExecutor, plans: list[str], acts: list[str], n_turns: int) -> tuple[Speaks, tuple[Turn, ...]]:
    policy, turns = Speaks(acts, **{PLAN: plans}), ()
    for i in range(n_turns):
        action = asyncio.run(made.act(History(Task("t"), "opening", turns), policy))
        turns = (*turns, Turn(action, action.error or f"seen {i}"))
    return policy, turns


@pytest.mark.parametrize("memory", [{}, {"memory": Window(turns=1)}], ids=["full", "window"])
def test_it_keeps_the_contract_of_an_agent(memory: dict[str, Any]) -> None:
    report = check_agent(agent(executor=ChatAgent(system="", **memory)))
    assert report.ok, str(report)


@pytest.mark.parametrize("executor", [ChatAgent(), ToolAgent(), ChatAgent(system="")], ids=["chat", "tools", "silent"])
def test_the_executor_is_told_how_a_subgoal_ends(executor: ChatAgent) -> None:
    policy, _ = play(agent(executor=executor, done="Reached"), ["find the key", "open"], ["reached", "look"], 1)
    system = [m.content for m in policy.shown[-1][1] if m.role is Role.SYSTEM]
    assert [text.count("Reply reached when the subgoal is reached.") for text in system] == [1] * bool(executor.system)


def test_a_subgoal_holds_until_the_executor_says_done() -> None:
    acts = ["go east", "take key", "done", "go west", "open"]
    _, turns = play(agent(), ["find the key", "open the door"], acts, 4)
    assert [t.action.text for t in turns] == ["go east", "take key", "go west", "open"]
    assert [[g.role for g in t.generations] for t in turns] == [["plan", ""], [""], ["", "plan", ""], [""]]
    assert [dict(t.action.notes) for t in turns] == [
        {"subgoal": "find the key"},
        {},
        {"subgoal ended": "done", "subgoal": "open the door"},
        {},
    ]


def test_the_planner_sees_subgoals_and_the_executor_the_turns_of_its_own() -> None:
    policy, _ = play(agent(), ["find the key", "open the door"], ["go east", "take key", "done", "go west", "open"], 4)
    plans = [said for role, said in policy.told if role == PLAN]
    assert plans == [["opening\nNext subgoal:"], ["opening\n1. find the key: done\nseen 1\nNext subgoal:"]]
    acts = [said for role, said in policy.told if role != PLAN]
    assert acts[1] == ["Subgoal: find the key\nopening", "> go east", "seen 0"]
    assert acts[3] == ["opening\nSubgoal: open the door\nseen 1"]
    assert acts[4] == ["opening\nSubgoal: open the door\nseen 1", "> go west", "seen 2"]


def test_a_planner_can_be_shown_what_earlier_subgoals_ended_in() -> None:
    acts = ["read", "done", "done", "take", "done", "eat"]
    policy, _ = play(agent(show_ends=True), ["learn", "look", "cook", "eat"], acts, 3)
    assert [said for role, said in policy.told if role == PLAN][1:] == [
        ["opening\n1. learn: done\nseen 0\nNext subgoal:"],
        ["opening\n1. learn: done\nseen 0\n2. look: done\nseen 0\nNext subgoal:"],
        ["opening\n1. learn: done\nseen 0\n2. look: done\n3. cook: done\nseen 1\nNext subgoal:"],
    ], "an observation in which two were named stands once, where it was made"


def test_a_subgoal_that_never_ends_is_ended() -> None:
    _, turns = play(agent(max_turns_per_subgoal=3), ["one", "two", "three"], ["go"] * 7, 7)
    assert [t.action.notes.get("subgoal") for t in turns] == ["one", None, None, "two", None, None, "three"]
    assert turns[3].action.notes["subgoal ended"] == "out of turns"


def test_a_planner_that_loops_is_told_to_act() -> None:
    policy, turns = play(agent(), ["a", "b", "c"], ["done", "done", "go"], 2)
    assert turns[0].action.error and "'done' was said 2 times" in turns[0].action.error
    assert [g.role for g in turns[0].generations] == ["plan", "", "plan", ""]
    # The subgoal named last is still there; the executor reads why nothing was done.
    assert turns[1].action.text == "go" and len(turns[1].generations) == 1
    assert policy.told[-1][1][-1] == turns[0].action.error


def test_a_plan_of_nothing_and_one_without_end_are_bounded() -> None:
    _, turns = play(agent(max_turns_per_subgoal=1, max_subgoal_chars=10), ["", "word " * 1000], ["go", "go"], 2)
    assert [t.action.notes["subgoal"] for t in turns] == ["(none)", "word word "]


def test_what_is_demonstrated_is_what_it_would_say() -> None:
    made = agent()
    assert made.write(DemonstrationInputs("go east", subgoal="find the key", role=PLAN)) == "find the key"
    assert made.write(DemonstrationInputs("go east", subgoal="find the key", before="find the key")) == "go east"
    # A subgoal that is reached is first said to be, then the next is named, then something is done.
    assert made.write(DemonstrationInputs("go west", subgoal="open the door", before="find the key")) == "done"
    assert (
        made.write(DemonstrationInputs("go west", subgoal="open the door", before="find the key", n_calls=2))
        == "go west"
    )


def test_episodes_hold_nothing_in_the_agent() -> None:
    made = agent()
    first, second = (play(made, ["a", "b"], ["x", "done", "y"], 2)[1] for _ in range(2))
    assert first == second
    assert isinstance(first[0].action, Action)


def test_a_turn_may_name_several_subgoals_and_none_is_forgotten() -> None:
    made = agent(max_turns_per_subgoal=1)
    policy, turns = play(made, ["a", "b", "c", "d"], ["go", "done", "stay", "wait"], 3)
    assert dict(turns[1].action.notes) == {"subgoal": "b\nc", "subgoal ended": "out of turns\ndone"}
    plans = [said[0] for role, said in policy.told if role == PLAN]
    assert plans[3] == "opening\n1. a: out of turns\n2. b: done\n3. c: out of turns\nseen 1\nNext subgoal:"


def test_done_ends_a_subgoal_also_where_one_may_be_named_in_a_turn() -> None:
    _, turns = play(agent(max_plans_per_turn=1), ["a", "b"], ["go", "done", "stay", "done"], 2)
    assert [t.action.text for t in turns] == ["go", "stay"] and turns[1].action.notes["subgoal"] == "b"


def test_parts_of_an_action_are_kept() -> None:
    from agents.tools import ToolAgent

    two = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    _, turns = play(agent(executor=ToolAgent(system="")), ["a"], [two], 1)
    assert len(turns[0].action.parts) == 2


@pytest.mark.parametrize("word", ["done", "Done.\n"])
@pytest.mark.parametrize("style", ["json", "hermes", "python"])
def test_an_executor_that_calls_tools_ends_a_subgoal_with_the_word_that_it_is_taught(style: Any, word: str) -> None:
    from agents.tool_calls import ToolCall, write_calls
    from agents.tools import ToolAgent

    made = agent(executor=ToolAgent(system="", tool_format=style))
    assert made.write(DemonstrationInputs("go", subgoal="b", before="a")) == "done"
    call = write_calls([ToolCall("f", {})], style)
    _, turns = play(made, ["a", "b"], [call, word, call, "well done"], 3)
    assert [t.action.text for t in turns] == [ToolCall("f", {}).text, ToolCall("f", {}).text, ""]
    assert dict(turns[1].action.notes) == {"subgoal": "b", "subgoal ended": "done"}
    assert turns[2].action.error and "No tool was called" in turns[2].action.error


def test_an_old_list_of_possible_actions_is_not_shown_again() -> None:
    made = agent(executor=ChatAgent(system="", show_admissible=True, memory=Window(turns=0)))
    before = Turn(Action("go", notes={"subgoal": "a"}), "seen")
    history = History(Task("t"), "opening", (before,), ("new way",), (("old way",),))
    policy = Speaks(["go"])
    asyncio.run(made.act(history, policy))
    assert "new way" in policy.told[0][1][0] and "old way" not in policy.told[0][1][0]


def test_two_who_name_subgoals_are_refused() -> None:
    from agents.memory.subgoals import Subgoals

    with pytest.raises(ValueError, match=r"executor\.memory is of kind subgoals"):
        agent(executor=ChatAgent(memory=Subgoals()))


def test_a_demonstrated_executor_says_done_also_after_it_was_asked_for_a_summary() -> None:
    from rlhf.rollout.renderer import Renderer
    from rlhf.training.stages.demonstrations import Demonstration, render
    from tests.training.tiny import policy

    turns = tuple(Turn(Action(text), "seen") for text in ("go", "take", "open"))
    played = Trajectory("t", 0, "opening", turns, Outcome.SOLVED)
    shown = Demonstration(Task("t"), played, ((),) * 3, subgoals=("key", "key", "door"))
    renderer = Renderer(policy().tokenizer)
    made = agent(executor=ChatAgent(system="", memory=Summary(every=1, keep=0)))
    [found] = asyncio.run(render([shown], made, renderer))
    calls = [(g.role, renderer.reply_text(g.token_ids)) for g in found.turns[2].generations]
    assert calls == [("memory", ""), ("", "done"), ("plan", "door"), ("", "open")]


def test_subgoals_that_were_reached_are_counted() -> None:
    def turn(role: str, **notes: str) -> Turn:
        generation = Generation(Prompt((1,)), (2,), (-0.1,), Finish.STOP, 0, role=role)
        named = {name.replace("_", " "): text for name, text in notes.items()}
        return Turn(Action("go", (generation,), notes=named), "...")

    # Named, out of turns; then a turn in which one is named, done at once, and the next is named; that one is done.
    turns = (
        turn("plan", subgoal="a"), turn("plan", subgoal="b\nc", subgoal_ended="out of turns\ndone"),
        turn("plan", subgoal="d", subgoal_ended="done"), turn(""),
    )  # fmt: skip
    tried = [Trajectory("t", i, "", found, Outcome.FAILED) for i, found in enumerate((turns, turns[:1]))]
    group = ScoredGroup("t", tuple(tried), tuple(Score({}, (0.0,) * len(t.turns), 0.0) for t in tried))
    metrics = RolloutBatch((group,), 1.0).metrics()
    assert metrics["agent/n_subgoals_reached"] == 2 / 2 and metrics["agent/n_subgoal"] == 4 / 2
    plain = replace(group, trajectories=tuple(replace(t, turns=(turn(""),) * len(t.turns)) for t in tried))
    assert "agent/n_subgoals_reached" not in RolloutBatch((plain,), 1.0).metrics()
