"""What each memory shows, from worked examples, and what holds for all of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.base import History
from agents.chat import ChatAgent
from agents.check import ScriptedPolicy, check_agent
from agents.memory.base import DemonstrationInputs, Exchange, ParsedReply
from agents.memory.budget import TokenBudget
from agents.memory.contrib.constant import ConstantMemory
from agents.memory.contrib.diff import DiffHistory, difference
from agents.memory.subgoals import Subgoals
from agents.memory.summary import Summary
from agents.memory.window import Window
from agents.tools import ToolAgent
from rlhf.catalog import CATALOG
from rlhf.data import Action, Finish, Generation, Message, Prompt, Role, Task, Turn
from rlhf.recipe.builder import build_part
from tests.agents.spoken import Speaks, texts

MEMORIES = sorted(CATALOG["memory"])


def agent_with(kind: str, **keys: Any) -> ChatAgent:
    think = "require" if kind == "constant" else "off"
    memory = build_part("memory", {"kind": kind, **keys}, "agent.memory", base=Path.cwd())
    return ChatAgent(system="", memory=memory, think=think)


def scribe(*acts: str, summary: str = "summary {}") -> Speaks:
    """A policy that says `acts` when it is to act, and counts what it is to remember."""
    return Speaks(acts, memory=(summary.format(i) for i in range(1, 100)))


def play(agent: ChatAgent, acts: list[str], *, says: Any = "seen {}".format) -> tuple[Speaks, tuple[Turn, ...]]:
    """Let the agent act once for each of `acts`; after turn i the environment says `says(i)`."""
    policy, turns = scribe(*acts), ()
    while policy.acts:
        action = asyncio.run(agent.act(History(Task("t"), "opening", turns), policy))
        turns = (*turns, Turn(action, says(len(turns))))
    return policy, turns


def said(shown: tuple[str, tuple[Message, ...]]) -> list[str]:
    return texts(shown[1])


@pytest.mark.parametrize("kind", MEMORIES)
def test_an_agent_with_it_keeps_the_contract(kind: str) -> None:
    report = check_agent(agent_with(kind))
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", MEMORIES)
def test_what_was_sampled_keeps_its_ids_and_is_never_words_of_a_prompt(kind: str) -> None:
    policy, turns = play(agent_with(kind), [f"go {i}" for i in range(30)])
    sampled = {g.token_ids for turn in turns for g in turn.generations}
    for _, messages in policy.shown:
        for message in messages:
            assert (message.role is Role.ASSISTANT) == (message.token_ids is not None)
            assert message.token_ids is None or message.token_ids in sampled


@pytest.mark.parametrize("memory", [Summary(every=2, keep=1), Window(turns=1)], ids=["summary", "window"])
def test_what_begins_a_prompt_is_said_by_the_user_with_tools_too(memory: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": None}}]
    task, turns = Task("t", info={"tools": tools}), tuple[Turn, ...]()
    agent, policy = (
        ToolAgent(tool_definitions="chat_template", memory=memory),
        ScriptedPolicy(('{"name": "f", "arguments": {}}',)),
    )
    for i in range(6):
        action = asyncio.run(agent.act(History(task, "OPENING", turns, (), ((),) * i), policy))
        turns = (*turns, Turn(action, f"reply {i}", valid=True))
    roles = [message.role for message in policy.prompts[-1] if message.role is not Role.SYSTEM]
    assert roles[0] is Role.USER


def test_a_summary_is_asked_for_when_it_is_time_and_kept_with_the_turn() -> None:
    agent = ChatAgent(system="", memory=Summary(every=2, keep=1, ask="Sum up."))
    policy, turns = play(agent, ["a", "b", "c", "d", "e"])
    roles = [role for role, _ in policy.shown]
    # Two turns are shown; before the fourth action three are finished: the first two of them are summed up.
    assert (
        roles
        == [
            "",
            "",
            "",
            "memory",
            "",
            "",
        ][: len(roles)]
    )
    assert said(policy.shown[3]) == ["opening\n> a\nseen 0\n> b\n\nSum up."]
    assert said(policy.shown[4]) == ["opening\nsummary 1\nseen 1", "> c", "seen 2"]
    assert dict(turns[3].action.notes) == {"summary": "summary 1", "summarised": "2"}
    assert [g.role for g in turns[3].generations] == ["memory", ""]
    # The next turn finds it again: nothing is asked twice.
    assert said(policy.shown[5]) == ["opening\nsummary 1\nseen 1", "> c", "seen 2", "> d", "seen 3"]


def test_a_later_summary_is_made_of_the_one_before() -> None:
    policy, _ = play(ChatAgent(system="", memory=Summary(every=2, keep=1, ask="Sum up.")), list("abcdefg"))
    asked = [said(s) for s in policy.shown if s[0] == "memory"]
    assert asked[1] == ["summary 1\nseen 1\n> c\nseen 2\n> d\n\nSum up."]


def test_a_summary_is_bounded_however_much_the_policy_writes() -> None:
    policy, turns = scribe(*[f"go {i}" for i in range(20)], summary="blah " * 10_000), ()
    agent = ChatAgent(system="", memory=Summary(every=3, max_chars=50))
    while policy.acts:
        action = asyncio.run(agent.act(History(Task("t"), "opening", turns), policy))
        turns = (*turns, Turn(action, "seen"))
    assert max(len(m.content) for _, messages in policy.shown for m in messages) < 200


def test_subgoals_show_finished_chunks_as_summaries_and_the_present_one_in_full() -> None:
    # E1's figure: 3 finished chunks of 4 turns and a present one of 2 turns are 3 summaries and 2 pairs, not 14 pairs.
    acts = [f"Subgoal: part {i // 4 + 1}\nact {i}" if i % 4 == 0 else f"act {i}" for i in range(15)]
    policy, _ = play(ChatAgent(system="", memory=Subgoals(ask="Sum up.")), acts)
    assert said(policy.shown[-1]) == [
        "opening\nSubgoal 1: part 1\nsummary 1\nSubgoal 2: part 2\nsummary 2\nSubgoal 3: part 3\nsummary 3\nseen 11",
        "> act 12",
        "seen 12",
        "> act 13",
        "seen 13",
    ]
    asked = [said(s)[0] for s in policy.shown if s[0] == "memory"]
    assert len(asked) == 3
    assert asked[0] == (
        "Subgoal: part 1\nopening\n> act 0\nseen 0\n> act 1\nseen 1\n> act 2\nseen 2\n> act 3\n\nSum up."
    )


def test_a_finished_subgoal_is_retrieved_for_one_turn() -> None:
    memory = Subgoals(ask="Sum up.", max_retrievals=1)
    acts = ["Subgoal: one\na", "b", "Subgoal: two\nc", "retrieve 1", "d", "retrieve 1", "retrieve 1", "e"]
    policy, turns = play(ChatAgent(system="", memory=memory), acts)
    assert [turn.action.text for turn in turns] == ["a", "b", "c", "d", "retrieve 1", "e"]
    assert said(policy.shown[5])[0] == "opening\nSubgoal 1: one\nopening\n> a\nseen 0\n> b\nseen 1"
    assert turns[3].action.notes["retrieved"] == "1" and len(turns[3].generations) == 3
    # Only as often as allowed: the second request of a turn is an action like any other.
    assert turns[4].action.text == "retrieve 1"


@pytest.mark.parametrize("parse", ["tolerant", "strict"])
def test_a_subgoal_is_retrieved_in_the_form_of_an_action(parse: Any) -> None:
    acts = ["Subgoal: one\n<action>a</action>", "Subgoal: two\n<action>b</action>"]
    acts += ["<action>retrieve 1</action>", "<action> Retrieve 1 </action>", "<action>c</action>"]
    agent = ChatAgent(system="", memory=Subgoals(ask="Sum up."), format="tagged", parse=parse)
    _, turns = play(agent, acts)
    assert [turn.action.text for turn in turns] == ["a", "b", "c"]
    assert turns[2].action.notes["retrieved"] == "1 1"


def test_a_subgoal_that_never_ends_is_ended() -> None:
    policy, _ = play(ChatAgent(system="", memory=Subgoals(max_turns=3)), ["Subgoal: all\ngo", *["go"] * 20])
    acted = [messages for role, messages in policy.shown if not role]
    assert max(map(len, acted)) == 2 * 3 - 1
    assert sum(role == "memory" for role, _ in policy.shown) == 6


def test_differences_from_the_observation_before() -> None:
    before = "HP 10\nRoom A\nYou see: key\nExit north"
    after = "HP 9\nRoom A\nYou see: key, lamp\nExit north"
    long = "\nA wall of text that goes on and on, and on, and on, and on."
    lines = ["@@ -1 +1 @@", "-HP 10", "+HP 9", "@@ -3 +3 @@", "-You see: key", "+You see: key, lamp"]
    assert difference(before + long, after + long).splitlines() == lines
    assert difference(before, before) == "(no change)"
    assert difference("a", "b") == "b", "shorter than its differences"
    observations = [before + long, before + long, after + long]
    policy, _ = play(ChatAgent(system="", memory=DiffHistory()), ["x"] * 4, says=lambda i: observations[min(i, 2)])
    assert said(policy.shown[-1])[4:] == ["(no change)", "> x", "\n".join(lines)]


def test_a_list_of_possible_actions_stands_with_the_newest_observation_alone() -> None:
    agent = ChatAgent(system="", memory=DiffHistory(), show_admissible=True)
    turns = tuple(Turn(Action(str(i), (_generation(i),)), "same") for i in range(2))
    policy = scribe("go")
    asyncio.run(agent.act(History(Task("t"), "same", turns, ("x",), (("a",), ("b",))), policy))
    shown = said(policy.shown[0])
    assert shown[-1] == "(no change)\n\nPossible actions:\n- x" and shown[2] == "(no change)"


def _generation(i: int) -> Generation:
    return Generation(Prompt((1,)), (i, 7), (0.0, 0.0), Finish.STOP, 0)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=25), st.integers(16, 120), st.integers(1, 5))
def test_a_budget_holds_and_nothing_is_left_out_without_need(lengths: list[int], budget: int, at_a_time: int) -> None:
    agent = ChatAgent(system="", memory=TokenBudget(max_tokens=budget, at_a_time=at_a_time))
    policy, _ = play(agent, ["go"] * len(lengths), says=lambda i: "w " * lengths[i] + str(i))
    for turn, shown in enumerate(policy.shown):
        length = policy.n_tokens(shown[1])
        words = 1 + sum(lengths[:turn]) + turn  # the opening, what was said, and its numbers
        if words + turn <= budget:
            assert length == words + turn, "everything fits"
        smallest = 1 + 1 + (lengths[turn - 1] + 1 if turn else 0)  # opening, dots and newest observation
        assert length <= max(budget, smallest)
        assert said(shown)[-1].endswith(str(turn - 1)) if turn else True


def test_old_observations_are_left_out_several_at_a_time_so_that_prompts_stay_the_same() -> None:
    agent = ChatAgent(system="", memory=TokenBudget(max_tokens=40, at_a_time=3))
    policy, _ = play(agent, ["go"] * 12, says=lambda i: f"one two three {i}")
    n_left_out = [said(shown).count("(left out)") for shown in policy.shown]
    assert set(n_left_out) <= {0, 3, 6, 9} and n_left_out == sorted(n_left_out) and n_left_out[-1] > 0
    assert said(policy.shown[-1])[0] == "opening" and said(policy.shown[-1])[-1] == "one two three 10"


def test_constant_memory_shows_the_opening_and_one_exchange() -> None:
    agent = ChatAgent(system="", memory=ConstantMemory(max_turns=4), think="require")
    policy, turns = play(agent, [f"<think>I know {i}</think>go {i}" for i in range(4)])
    assert [turn.action.text for turn in turns] == [f"go {i}" for i in range(4)]
    assert said(policy.shown[0]) == ["opening\n[4 turns left]"]
    assert said(policy.shown[3]) == ["opening\n...\nseen 1", "> go 2", "seen 2\n[1 turn left]"]
    assert policy.shown[3][1][1].token_ids == turns[2].generations[0].token_ids
    with pytest.raises(ValueError, match="think is 'off', expected 'require'"):
        ChatAgent(memory=ConstantMemory())


def test_turns_that_a_start_state_gives_take_none_of_those_left() -> None:
    agent = ChatAgent(system="", memory=ConstantMemory(max_turns=4), think="require")
    given_turns = tuple(Turn(Action(f"given {i}"), f"seen {i}") for i in range(6))
    for turns, left in (((), "4 turns"), ((_sampled(), _sampled()), "2 turns")):
        policy = scribe("<think>I know</think>go")
        asyncio.run(agent.act(History(Task("t"), "opening", (*given_turns, *turns)), policy))
        assert said(policy.shown[-1])[-1].endswith(f"[{left} left]")


def _sampled() -> Turn:
    return Turn(Action("go", (Generation(Prompt((1,)), (5,), (0.0,), Finish.STOP, 0),)), "seen")


def test_a_reply_without_thoughts_does_not_wipe_the_constant_memory() -> None:
    agent = ChatAgent(system="", memory=ConstantMemory(), think="require")
    policy, turns = play(agent, ["go", "<think>I know 1</think>look", "go", "go", "<think>I know 4</think>go", "go"])
    assert [turn.action.text for turn in turns] == ["", "look", "", "", "go", ""]
    assert said(policy.shown[1]) == ["opening\nseen 0"], "nothing was remembered yet"
    kept = ["opening\n...\nseen 0", "> look"]
    assert said(policy.shown[2]) == [*kept, "seen 1"]
    assert said(policy.shown[3]) == [*kept, "seen 1\nseen 2"], "what it knew, what that led to, and the refusal"
    assert said(policy.shown[4]) == [*kept, "seen 1\nseen 3"], "no longer, however often"
    assert said(policy.shown[5])[1:] == ["> go", "seen 4"]


@pytest.mark.parametrize("kind", MEMORIES)
@given(action=st.text(min_size=1).map(lambda text: " ".join(text.split())).filter(lambda t: t.isalnum()))
def test_what_is_demonstrated_is_read_back(kind: str, action: str) -> None:
    agent = agent_with(kind)
    shown = DemonstrationInputs(action, recall="the key is red", subgoal="find the door", before="find the key")
    written = agent.write(shown)
    policy = scribe(written)
    done = asyncio.run(agent.act(History(Task("t"), "opening"), policy))
    assert done.text == action and done.error is None
    # The policy of this test says the same whatever it is asked; a manager cannot read it.
    left = {"subgoals": {"subgoal": "find the door"}, "managed": {"refused": "the reply is not JSON"}}
    assert done.notes == left.get(kind, {})
    assert ("the key is red" in written) == (kind == "constant")
    remembered = agent.write(replace(shown, role="memory"))
    assert remembered == ('{"op": "ADD", "text": "the key is red"}' if kind == "managed" else "the key is red")


def test_a_window_of_none_shows_one_message() -> None:
    policy, _ = play(ChatAgent(system="", memory=Window(turns=0)), ["a", "b"])
    assert said(policy.shown[1]) == ["opening\n...\nseen 0"]


@pytest.mark.parametrize("memory", [Summary(every=1, keep=0), Subgoals(max_turns=1)])
def test_thoughts_are_no_part_of_a_summary(memory: Summary | Subgoals) -> None:
    policy, turns = scribe("a", "b", "c", summary=f"<think>hmm {'m' * 2000}</think>\nsummary {{}}"), ()
    while policy.acts:
        action = asyncio.run(ChatAgent(system="", memory=memory).act(History(Task("t"), "opening", turns), policy))
        turns = (*turns, Turn(action, "seen"))
    last = said(policy.shown[-1])[0]
    assert "summary 1" in last and "hmm" not in last


@pytest.mark.parametrize("text", ["\n" * 50_000 + "x", "retrieve " + "9" * 5000, "retrieve 0"])
def test_a_reply_of_any_kind_is_read_at_once(text: str) -> None:
    read = Subgoals().read(text, [Exchange("o", "o", Message(Role.ASSISTANT, "a"), notes={}), Exchange("o", "o")], {})
    assert read == ParsedReply(text) and not read.again


def test_a_window_that_drops_turns_in_blocks_extends_its_prompts_between_two_drops() -> None:
    policy, _ = play(ChatAgent(system="", memory=Window(turns=1, block=3)), list("abcdefgh"))
    shown = [said(prompt) for prompt in policy.shown]
    n_finished = [len(texts) // 2 for texts in shown]
    assert n_finished == [0, 1, 2, 3, 1, 2, 3, 1]  # 1 to 3 after the first drop
    assert shown[4] == ["opening\n...\nseen 2", "> d", "seen 3"]
    starts_anew = [after[: len(before)] != before for before, after in pairwise(shown)]
    assert starts_anew == [False, False, False, True, False, False, True]
    one_by_one, _ = play(ChatAgent(system="", memory=Window(turns=1)), list("abcdefgh"))
    assert [len(said(prompt)) // 2 for prompt in one_by_one.shown] == [0, 1, 1, 1, 1, 1, 1, 1]
