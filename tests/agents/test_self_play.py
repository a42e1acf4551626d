"""Self-play: a conversation for each seat, and a role on what it says."""

from __future__ import annotations

import asyncio

from agents.base import History
from agents.chat import ChatAgent
from agents.check import check_agent
from agents.contrib.self_play import SelfPlay
from agents.memory.base import DemonstrationInputs
from agents.memory.window import Window
from rlhf.data import Task, Turn
from tests.agents.spoken import Speaks

A, B = "player 0", "player 1"


def play(made: SelfPlay, says: list[str], seats: list[str]) -> tuple[Speaks, tuple[Turn, ...]]:
    policy, turns = Speaks(says), tuple[Turn, ...]()
    for k in range(len(says)):
        history = History(Task("t"), "opening", turns, seats=tuple(seats[: k + 1]))
        action = asyncio.run(made.act(history, policy))
        turns = (*turns, Turn(action, action.error or f"seen {k}"))
    return policy, turns


def test_each_seat_reads_what_was_said_to_it_and_nothing_else() -> None:
    made = SelfPlay(player=ChatAgent(system=""))
    policy, turns = play(made, ["a", "b", "c", "d"], [A, B, A, B])
    assert [role for role, _ in policy.told] == [A, B, A, B]
    assert policy.told[2][1] == ["opening", "> a", "seen 1"]
    assert policy.told[3][1] == ["seen 0", "> b", "seen 2"]
    assert [dict(turn.action.notes) for turn in turns] == [{"seat": A}, {"seat": B}, {"seat": A}, {"seat": B}]
    assert [turn.action.text for turn in turns] == ["a", "b", "c", "d"]


def test_a_seat_may_move_twice_and_reads_its_own_mistake() -> None:
    made = SelfPlay(player=ChatAgent(system="", format="tagged", parse="strict"))
    policy, turns = play(made, ["<action>a</action>", "b", "<action>b</action>"], [A, B, B])
    assert turns[1].action.error is not None and turns[1].action.notes["seat"] == B
    assert policy.told[2][1] == ["seen 0", "> ", turns[1].action.error]


def test_seats_have_instructions_and_memories_of_their_own() -> None:
    made = SelfPlay(player=ChatAgent(system="Play.", memory=Window(turns=1)), systems={B: "Defend."})
    policy, _ = play(made, list("abcdef"), [A, B, A, B, A, B])
    assert policy.told[4][1][0].startswith("Play.") and policy.told[5][1][0].startswith("Defend.")
    assert "seen 0" in policy.told[5][1][1] and policy.told[5][1][-1].endswith("seen 4")
    assert not any("seen 3" in text for text in policy.told[5][1])


def test_without_seats_it_is_a_chat_agent() -> None:
    policy, turns = play(SelfPlay(player=ChatAgent(system="")), ["a", "b"], ["", ""])
    assert policy.told == [("", ["opening"]), ("", ["opening", "> a", "seen 0"])]
    assert all(not turn.action.notes for turn in turns)
    alone = asyncio.run(SelfPlay().act(History(Task("t"), "opening"), Speaks(["look"])))
    assert alone.text == "look"


def test_a_demonstration_is_written_as_the_player_writes() -> None:
    made = SelfPlay(player=ChatAgent(format="tagged"))
    assert made.write(DemonstrationInputs("go", role=A)) == "<action>go</action>" and made.needs == ()


def test_it_keeps_what_agents_promise_and_can_be_hashed() -> None:
    report = check_agent(SelfPlay())
    assert [(f.promise, f.detail) for f in report.findings if not f.ok] == []
    assert hash(SelfPlay(systems={A: "x"})) == hash(SelfPlay(systems={A: "x"}))
