"""Actor and critic: who is shown what, when a proposal is done, and what stays of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agents.base import History
from agents.chat import ChatAgent
from agents.check import check_agent
from agents.contrib.critic import ACTOR, CRITIC, ActorCritic
from agents.memory.base import DemonstrationInputs
from agents.memory.contrib.constant import ConstantMemory
from agents.memory.subgoals import Subgoals
from agents.memory.summary import Summary
from agents.memory.window import Window
from rlhf.data import Finish, Task, Turn
from tests.agents.spoken import Says, Speaks

PLAIN: dict[str, Any] = {"critic_system": "", "ask": "Well?", "actor": ChatAgent(system="")}


def play(made: ActorCritic, acts: list[str], says: list[str], n_turns: int = 1) -> tuple[Speaks, tuple[Turn, ...]]:
    policy, turns = Speaks([], **{ACTOR: acts, CRITIC: says}), tuple[Turn, ...]()
    for k in range(n_turns):
        action = asyncio.run(made.act(History(Task("t"), "opening", turns), policy))
        turns = (*turns, Turn(action, action.error or f"seen {k}"))
    return policy, turns


@pytest.mark.parametrize("memory", [{}, {"memory": Window(turns=1)}, {"memory": Summary(every=1, keep=0)}], ids=str)
def test_it_keeps_the_contract_of_an_agent(memory: dict[str, Any]) -> None:
    report = check_agent(ActorCritic(actor=ChatAgent(system="", **memory)))
    assert report.ok, str(report)


def test_what_is_accepted_is_done_and_what_is_not_comes_back_with_the_comment() -> None:
    policy, [turn] = play(ActorCritic(**PLAIN), ["east", "west"], ["Revise: a wall is\nthere", "accept"])
    assert policy.told == [
        (ACTOR, ["opening"]),
        (CRITIC, ["opening\nProposed: east\nWell?"]),
        (ACTOR, ["opening", "> east", "Not yet: a wall is there"]),
        (CRITIC, ["opening\nProposed: west\nWell?"]),
    ]
    assert turn.action.text == "west" and turn.action.error is None
    assert [g.role for g in turn.generations] == [ACTOR, CRITIC, ACTOR, CRITIC]
    assert turn.action.notes == {"review": "revise\naccept", "comment": "a wall is there"}


def test_later_turns_know_what_was_done_and_not_how_it_came_about() -> None:
    made = ActorCritic(**PLAIN, show_turns=1)
    policy, _ = play(made, ["east", "west", "up", "down"], ["revise", "accept", "accept", "accept"], 3)
    assert policy.told[4] == (ACTOR, ["opening", "> west", "seen 0"])
    # The reply that is shown is the sampled one: the second of the actor's, by its ids.
    assert policy.shown[4][1][1].token_ids == policy.replies[2].generation.token_ids
    assert policy.told[5] == (CRITIC, ["opening\n> west\nseen 0\nProposed: up\nWell?"])
    assert policy.told[7] == (CRITIC, ["opening\nseen 0\n> up\nseen 1\nProposed: down\nWell?"])


def test_after_the_last_round_the_last_proposal_is_done() -> None:
    policy, [turn] = play(ActorCritic(**PLAIN, max_rounds=2), ["a", "b", "c"], ["revise: x", "revise"])
    assert turn.action.text == "c" and len(policy.shown) == 5 == ActorCritic(max_rounds=2).max_calls
    assert turn.action.notes == {"review": "revise\nrevise", "comment": "x\n(no comment)"}


@pytest.mark.parametrize("said", ["", "hm", "acceptable?", "I would revise it"])
def test_a_review_that_cannot_be_read_sends_nothing_back(said: str) -> None:
    _, [turn] = play(ActorCritic(**PLAIN), ["a"], [said])
    assert turn.action.text == "a" and turn.action.notes == {"review": "unread"}


def test_thoughts_of_the_critic_are_no_verdict_and_a_comment_is_cut() -> None:
    said = "<think>accept?</think>\n**Revise** - " + "x" * 50
    _, [turn] = play(ActorCritic(**PLAIN, max_comment_chars=5, max_rounds=1), ["a", "b"], [said])
    assert turn.action.notes["comment"] == "xxxxx"


def test_what_the_actor_says_and_cannot_be_read_is_not_reviewed() -> None:
    strict = {**PLAIN, "actor": ChatAgent(system="", format="tagged", parse="strict")}
    policy, turns = play(ActorCritic(**strict), ["a", "<action>a</action>", "b"], ["revise: no"], 2)
    assert turns[0].action.error and [role for role, _ in policy.told][:2] == [ACTOR, ACTOR]
    # Nor is a revision that cannot be read done: the actor reads what was wrong.
    assert turns[1].action.error and turns[1].action.text == ""
    cut = Says("<think>and", finish=Finish.LENGTH)
    action = asyncio.run(ActorCritic(actor=ChatAgent(think="allow")).act(History(Task("t"), "o"), cut))
    assert "cut off" in str(action.error)


def test_a_memory_is_asked_once_a_turn_and_not_again_for_a_revision() -> None:
    made = ActorCritic(critic_system="", actor=ChatAgent(system="", memory=Summary(every=1, keep=0)))
    policy = Speaks(list("abcdefgh"), actor=list("abcdef"), critic=["revise: x"] * 6, memory=["sum"] * 6)
    turns: tuple[Turn, ...] = ()
    for k in range(2):
        action = asyncio.run(made.act(History(Task("t"), "opening", turns), policy))
        turns = (*turns, Turn(action, f"seen {k}"))
    action = asyncio.run(ActorCritic(max_rounds=1, actor=made.actor).act(History(Task("t"), "o", turns), Memory()))
    assert [g.role for g in action.generations] == ["memory", ACTOR, CRITIC, ACTOR]


class Memory(Says):
    """Sends every proposal back."""

    def __init__(self) -> None:
        super().__init__(lambda role, _: {"critic": "revise: x"}.get(role, "go"))


def test_a_demonstration_is_accepted() -> None:
    made = ActorCritic(actor=ChatAgent(format="tagged"))
    assert made.write(DemonstrationInputs("go", role=ACTOR)) == "<action>go</action>"
    assert made.write(DemonstrationInputs("go", role=CRITIC)) == "accept"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"actor": {"memory": Subgoals()}}, "which parses replies"),
        ({"revision_message": "No."}, "{comment}"),
        ({"max_rounds": 0}, "max_rounds"),
    ],
)
def test_keys_that_cannot_work_are_refused(keys: dict[str, Any], says: str) -> None:
    if "actor" in keys:
        keys = {"actor": ChatAgent(**keys["actor"])}
    with pytest.raises(ValueError, match=says):
        ActorCritic(**keys)
    ActorCritic(actor=ChatAgent(think="require", memory=ConstantMemory()))
