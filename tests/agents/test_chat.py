from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from agents.base import Agent, History
from agents.chat import ChatAgent
from agents.memory.base import DemonstrationInputs
from agents.memory.window import Window
from agents.parsing import parse_action, split_thoughts
from rlhf.data import Action, Finish, Generation, Message, Prompt, Role, Task, Turn
from tests.agents.spoken import Says

DOORS = ("look around", "open Door to kitchen", "take  coin")


def generation(finish=Finish.STOP, ids=(7, 9)):
    return Generation(Prompt((1,)), ids, (0.0,) * len(ids), finish, 0)


def shown_to(agent, given):
    """The messages of the agent's next call."""
    policy = Says("go")
    asyncio.run(agent.act(given, policy))
    return policy.shown[0][1]


def turn(text="go", reply="ok", ids=(7, 9)):
    return Turn(Action(text, (generation(ids=ids),)), reply)


def history(n_turns=0, **kwargs):
    turns = tuple(turn(f"action {i}", f"reply {i}", (i, 9)) for i in range(n_turns))
    return History(Task("t"), "opening", turns, **kwargs)


def said(messages):
    return [(m.role.value, m.content) for m in messages]


def act(agent, text, finish=Finish.STOP, given=None):
    return asyncio.run(agent.act(given or history(), Says(text, finish)))


def test_it_is_an_agent_and_a_value():
    agent = ChatAgent(memory=Window(turns=3))
    assert isinstance(agent, Agent)
    assert pickle.loads(pickle.dumps(agent)) == agent != ChatAgent()


def test_the_action_carries_the_generation():
    policy = Says("go north")
    action = asyncio.run(ChatAgent().act(history(), policy))
    assert (action.text, action.error) == ("go north", None)
    assert action.generations == (policy.replies[0].generation,)
    assert said(policy.shown[0][1])[1:] == [("user", "opening")]


def test_an_empty_system_prompt_leaves_nothing_but_observations():
    messages = shown_to(ChatAgent(system="", show_admissible=False), history(2, admissible_actions=DOORS))
    assert said(messages) == [
        ("user", "opening"),
        ("assistant", "action 0"),
        ("user", "reply 0"),
        ("assistant", "action 1"),
        ("user", "reply 1"),
    ]
    assert [m.token_ids for m in messages] == [None, (0, 9), None, (1, 9), None]


def test_the_system_prompt_says_how_to_answer():
    def system(**kwargs):
        return shown_to(ChatAgent(system="Play.", **kwargs), history())[0]

    assert system() == Message(Role.SYSTEM, "Play. Write the action alone, on one line.")
    assert "<action>" in system(format="tagged").content
    assert "<think>" not in system().content
    assert "may think" in system(think="allow").content
    assert "Think first" in system(think="require").content


def test_opening_messages_of_the_task_come_before_the_observation():
    shots = (Message(Role.USER, "example"), Message(Role.ASSISTANT, "answer"))
    given = replace(history(), task=Task("t", messages=shots))
    assert said(shown_to(ChatAgent(system=""), given)) == [
        ("user", "example"),
        ("assistant", "answer"),
        ("user", "opening"),
    ]


def test_admissible_actions_are_listed_up_to_a_limit():
    agent = ChatAgent(system="", show_admissible=True, max_admissible=2)
    listed = shown_to(agent, history(admissible_actions=DOORS))[-1].content
    assert listed == "opening\n\nPossible actions:\n- look around\n- open Door to kitchen\n- ... and 1 more"
    assert shown_to(agent, history())[-1].content == "opening"  # the environment cannot list them


@given(
    st.lists(st.tuples(st.text(), st.lists(st.text(), max_size=3).map(tuple)), min_size=1, max_size=6), st.booleans()
)
def test_the_messages_of_a_turn_begin_with_those_of_the_turn_before(steps, show):
    agent = ChatAgent(show_admissible=show)
    turns, before, last = [], [], ()
    for i, (reply, admissible) in enumerate(steps):
        messages = shown_to(agent, History(Task("t"), "opening", tuple(turns), admissible, tuple(before)))
        assert messages[: len(last)] == last
        last = messages
        turns.append(turn("a", reply, (i,)))
        before.append(admissible)


def test_a_window_keeps_the_opening_and_the_last_turns():
    agent = ChatAgent(system="", memory=Window(turns=2))
    assert shown_to(agent, history(2)) == shown_to(ChatAgent(system=""), history(2))
    assert said(shown_to(agent, history(5))) == [
        ("user", "opening\n...\nreply 2"),
        ("assistant", "action 3"),
        ("user", "reply 3"),
        ("assistant", "action 4"),
        ("user", "reply 4"),
    ]
    assert said(shown_to(ChatAgent(system="", memory=Window(turns=0)), history(2))) == [
        ("user", "opening\n...\nreply 1")
    ]


def test_a_window_lists_the_actions_that_were_possible_where_it_begins():
    agent = ChatAgent(system="", memory=Window(turns=1), show_admissible=True)
    given = history(2, admissible_actions=("c",), admissible_before=(("a",), ("b",)))
    texts = [m.content for m in shown_to(agent, given) if m.role is Role.USER]
    assert texts == ["opening\n...\nreply 0\n\nPossible actions:\n- b", "reply 1\n\nPossible actions:\n- c"]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("go north", "go north"),
        ("  go   north \n\n", "go north"),
        ("I see a door.\nAction: go north", "go north"),
        ("**Action:** go north", "go north"),
        ("Next action: `go north`", "go north"),
        ("- go north", "go north"),
        ("> go north", "go north"),
        ('"go north"', "go north"),
        ("```\ngo north\n```", "go north"),
        ("```text\ngo north\n```\n", "go north"),
        ("I leave.\n```go north```", "go north"),
        ("go north\n```  ```", "go north"),
        ("go north\n``````", "go north"),
        ("go north\n```text", "go north"),
        ("go north\n```a``` is a word", "go north"),
        ("I think <action>go north</action> is best.", "go north"),
        ("<action>look</action> no, <action> go north </action>", "go north"),
        ("<ACTION>go north</ACTION>", "go north"),
        ("<action>go north", "go north"),
        ("look around.", "look around"),
        ("OPEN DOOR TO KITCHEN", "open Door to kitchen"),
        ("action: take coin!", "take  coin"),
        ("say 'hello' and 'bye'", "say 'hello' and 'bye'"),
        ("'", "'"),
    ],
)
def test_tolerant_parsing(text, action):
    parsed = parse_action(text, DOORS)
    assert (parsed.text, parsed.error) == (action, None)


def test_an_admissible_action_is_found_before_anything_is_cleaned_away():
    assert parse_action("answer: 5", ("answer: 5",)).text == "answer: 5"
    assert parse_action("answer: 5").text == "5"
    assert parse_action("Answer: LOOK", ("look",)).text == "look"
    search = ("answer[Arden]", "search[Arden]")
    assert parse_action("Answer: Vinland", search).text == "Answer: Vinland"
    assert parse_action("Answer: answer[Vinland]", search).text == "answer[Vinland]"
    assert parse_action("Answer: search[Vinland]", search).text == "search[Vinland]"
    assert parse_action("Answer: Answer[arden]", search).text == "answer[Arden]"


@pytest.mark.parametrize(
    ("text", "kwargs", "error"),
    [
        ("", {}, "your action is empty. Write the action alone, on one line."),
        (" \n ``` \n", {}, "your action is empty"),
        ("<action> </action>", {"is_tagged": True}, "your action is empty"),
        ("x" * 201, {}, "your action has 201 characters, at most 200 are allowed"),
        ("let me go", {"is_tagged": True}, "your reply contains no <action>...</action>. Write the action as <action>"),
        ("<action>go nor", {"is_tagged": True, "was_cut": True}, "your reply was cut off before its end"),
        ("a\nb", {"is_strict": True}, "your reply is not one line of text"),
        ("so <action>a</action>", {"is_strict": True, "is_tagged": True}, "contains no <action>"),
        ("<action>a</action><action>b</action>", {"is_strict": True, "is_tagged": True}, "contains no <action>"),
    ],
)
def test_what_cannot_be_read_is_explained(text, kwargs, error):
    parsed = parse_action(text, **kwargs)
    assert parsed.text == ""
    assert parsed.error.startswith("No action was taken: ")
    assert error in parsed.error


def test_a_tag_may_be_forgotten_where_the_action_is_known():
    assert parse_action("Look around", DOORS, is_tagged=True).text == "look around"


def test_strict_takes_the_text_as_it_is():
    assert parse_action(' "Go"  North ', ("go north",), is_strict=True).text == '"Go"  North'
    assert parse_action("<action> go </action>\n", is_strict=True, is_tagged=True).text == "go"


PIECES = [*"ab <>/\n\"'`*:.-\r\x85", "<action>", "</action>", "<think>", "</think>", "Action:", "```"]


@given(
    st.lists(st.sampled_from(PIECES)).map("".join) | st.text(),
    st.lists(st.text(max_size=5), max_size=3).map(tuple),
    st.sampled_from(["plain", "tagged"]),
    st.sampled_from(["off", "allow", "require"]),
    st.sampled_from(["tolerant", "strict"]),
    st.booleans(),
)
@example("\ud800", (), "plain", "off", "tolerant", False)
def test_reading_never_raises_and_always_gives_an_action_or_an_error(text, admissible, form, think, parse, cut):
    agent = ChatAgent(format=form, think=think, parse=parse, max_action_chars=20)
    parsed = agent.read(text, admissible, was_cut=cut)
    assert bool(parsed.text) != bool(parsed.error)
    assert len(parsed.text) <= 20
    assert "\n" not in parsed.text or parsed.text in admissible


@pytest.mark.parametrize("form", ["plain", "tagged"])
@pytest.mark.parametrize("think", ["off", "allow", "require"])
@pytest.mark.parametrize("parse", ["tolerant", "strict"])
@pytest.mark.parametrize("action", ["go north", "open Door to kitchen", "answer 5"])
def test_what_is_written_can_be_read(form, think, parse, action):
    agent = ChatAgent(format=form, think=think, parse=parse)
    assert agent.read(agent.write(DemonstrationInputs(action)), ()).text == action


@pytest.mark.parametrize(
    ("think", "text", "action", "error"),
    [
        ("off", "go", "go", None),
        ("off", "<think>hm</think>go", "", "<think> is not allowed here"),
        ("off", "<think>\n\n</think>\n\ngo", "go", None),
        ("off", "<think>", "", "</think> is missing"),
        ("allow", "<think>north?</think>\ngo", "go", None),
        ("allow", "north?</think>\ngo", "go", None),
        ("allow", "go", "go", None),
        ("allow", "<think>north? go", "", "</think> is missing"),
        ("allow", "<think>a</think>go<think>b", "", "</think> is missing"),
        ("allow", "<think>a</think>", "", "your action is empty"),
        ("require", "<think>a</think>go", "go", None),
        ("require", "go", "", "<think>...</think> is missing before the action. Think first"),
    ],
)
def test_thinking(think, text, action, error):
    got = act(ChatAgent(think=think), text)
    assert got.text == action
    assert (got.error is None) == (error is None)
    assert error is None or error in got.error
    assert len(got.generations) == 1


def test_a_reply_cut_off_in_its_thoughts_says_so():
    got = act(ChatAgent(think="allow"), "<think>where was I", Finish.LENGTH)
    assert "cut off before </think>" in got.error


def test_thoughts_and_answer():
    thoughts = split_thoughts("<think>a</think>b<think>c</think>d")
    assert (thoughts.answer, thoughts.is_finished) == ("d", True)
    assert "a" in thoughts.thought and "c" in thoughts.thought
    assert split_thoughts("b").thought is None


@pytest.mark.parametrize(
    "wrong", [{"memroy": 3}, {"memory": 3}, {"format": "json"}, {"think": "maybe"}, {"max_admissible": 0}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        ChatAgent(**wrong)


def test_importing_agents_and_rewards_loads_no_torch():
    modules = "agents.chat, rewards.shaping.outcome, rewards.shaping.penalties, rewards.answers.exact"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
