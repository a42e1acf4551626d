"""Where requests stand in the tree of a session's conversations, and why they begin rows anew."""

from __future__ import annotations

from agents.tool_calls import ToolCall
from rlhf.data import Finish, Role
from rlhf.gateway.agent import ExternalAgent
from rlhf.gateway.conversation import ChatMessage, Conversations
from rlhf.gateway.recording import chats_of
from rlhf.gateway.request import ChatRequest

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)


def user(text: str) -> ChatMessage:
    return ChatMessage(Role.USER, text)


def reply(text: str, *calls: ToolCall) -> ChatMessage:
    return ChatMessage(Role.ASSISTANT, text, calls)


def told(
    known: Conversations, *messages: ChatMessage, says: ChatMessage, ids: tuple[int, ...], finish: Finish = Finish.STOP
) -> str:
    """Ask and be answered; returns the reason of the fork, empty without one."""
    place = known.place(messages)
    known.record(place, (), says, ids, finish)
    return place.fork.reason if place.fork else ""


def test_a_reply_keeps_its_ids_however_a_client_writes_it_again() -> None:
    known = Conversations()
    assert told(known, user("a"), says=reply("", ToolCall("f", {"x": 1, "y": 2})), ids=(5, 6)) == ""
    place = known.place([user("a"), reply(" ", ToolCall("f", {"y": 2, "x": 1})), user("b")])
    assert place.fork is None and place.messages[1].token_ids == (5, 6)
    told(known, user("c"), says=reply("", ToolCall("f", {"x": [{"y": 5.0}], "z": 0.5})), ids=(7,))
    place = known.place([user("c"), reply("", ToolCall("f", {"x": [{"y": 5}], "z": 0.5})), user("d")])
    assert place.fork is None and place.messages[1].token_ids == (7,)


def test_reasoning_that_a_client_strips_or_keeps_is_the_same_reply() -> None:
    known = Conversations()
    told(known, user("a"), says=reply("well"), ids=(5,))
    for text in ("well", "<think>so</think>\n\nwell", "\nwell "):
        assert known.place([user("a"), reply(text), user("b")]).messages[1].token_ids == (5,)


def test_each_reason_of_a_fork_is_told_with_the_first_message_that_differs() -> None:
    known = Conversations()
    told(known, user("a"), says=reply("b"), ids=(1,))
    told(known, user("a"), reply("b"), user("c"), says=reply("d"), ids=(2,))
    changed = known.place([user("a"), reply("B"), user("c")]).fork
    assert changed and (changed.reason, changed.at) == ("changed", 1)
    assert "'b'" in changed.recorded and "'B'" in changed.got
    fresh = known.place([user("x")]).fork
    assert fresh and (fresh.reason, fresh.at) == ("fresh", 0)
    again = known.place([user("a"), reply("b"), user("c")]).fork
    assert again and (again.reason, again.at) == ("again", 3)
    other = known.place([user("a"), reply("b"), user("c"), reply("d"), user("e")], TOOLS).fork
    assert other and other.reason == "tools"


def test_a_reply_that_was_cut_is_not_gone_on_from() -> None:
    known = Conversations()
    told(known, user("a"), says=reply("b"), ids=(1,), finish=Finish.LENGTH)
    place = known.place([user("a"), reply("b"), user("c")])
    assert place.fork and place.fork.reason == "cut" and place.messages[1].token_ids is None


def test_replies_keep_their_ids_under_another_beginning() -> None:
    known = Conversations()
    told(known, user("a"), says=reply("b"), ids=(1,))
    place = known.place([ChatMessage(Role.SYSTEM, "s"), user("a"), reply("b"), user("c")])
    assert place.fork and place.messages[2].token_ids == (1,)


def test_what_stands_for_a_message_never_changes_within_a_row() -> None:
    known = Conversations()
    told(known, user("x"), says=reply("y"), ids=(9,))
    begun = (user("a"), reply("b"), user("c"))  # nobody has sampled "b" yet
    assert told(known, *begun, says=reply("d"), ids=(2,)) == "fresh"
    told(known, user("x"), reply("y"), user("z"), says=reply("b"), ids=(7,))
    place = known.place([*begun, reply("d"), user("e")])
    assert place.fork is None and [m.token_ids for m in place.messages] == [None, None, None, (2,), None]


def test_two_conversations_of_one_session_go_on_side_by_side() -> None:
    known = Conversations()
    assert told(known, user("a"), says=reply("1"), ids=(1,)) == ""
    assert told(known, user("b"), says=reply("2"), ids=(2,)) == "fresh"
    assert told(known, user("a"), reply("1"), user("c"), says=reply("3"), ids=(3,)) == ""
    assert told(known, user("b"), reply("2"), user("c"), says=reply("4"), ids=(4,)) == ""


def test_conversations_are_recorded_as_chats_in_which_each_reply_is_learnt_once() -> None:
    known = Conversations(tools_as_text=True)
    begun = (user("a"), reply("few"), user("b"))  # nobody has sampled "few"
    told(known, *begun, says=reply("1"), ids=(1,))
    told(known, *begun, reply("1"), user("c"), says=reply("2"), ids=(2,))
    told(known, *begun, reply("1"), user("d"), says=reply("3"), ids=(3,))
    told(known, *begun, reply("1"), user("d"), reply("3"), user("e"), says=reply("4"), ids=(4,), finish=Finish.LENGTH)
    place = known.place([user("x")], TOOLS)
    known.record(place, TOOLS, reply("", ToolCall("f", {})), (5,), Finish.STOP)
    for place_of in ("system_prompt", "chat_template"):
        rows = list(chats_of(known, ExternalAgent(tool_definitions=place_of), lambda ids: f"said {ids[0]}"))
        said = [
            [(m["content"], m.get("weight", 1)) for m in row["messages"] if m["role"] == "assistant"] for row in rows
        ]
        assert said == [
            [("few", 0), ("said 1", 1), ("said 2", 1)],
            [("few", 0), ("said 1", 0), ("said 3", 1)],
            [("said 5", 1)],
        ]
        assert [row.get("tools") for row in rows] == [None, None, list(TOOLS) if place_of == "chat_template" else None]
        first = rows[2]["messages"][0]
        assert first["role"] == ("system" if place_of == "system_prompt" else "user")


def test_what_is_text_in_the_schema_of_a_tool_stays_text() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"q": {"type": "string"}}}}}
    said = "<function=f><parameter=q>2024</parameter></function>"
    _, [call] = ExternalAgent(tool_format="xml").read(said, ChatRequest((), tools=(tool,)), was_cut=False)
    assert call == ToolCall("f", {"q": "2024"})


def test_text_before_a_call_keeps_its_own_brackets() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for style, written in (("json", '{"name": "f", "arguments": {}}'), ("python", "[f()]")):
        found = ExternalAgent(tool_format=style).read(f"Of {{a}} [b]: {written}", ChatRequest((), tools=(tool,)), False)
        assert found == ("Of {a} [b]:", (ToolCall("f", {}),))
