"""Language models as guides, over a real connection: subgoals paid once, replies judged once, nothing made up."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from rewards.contrib.guides import Feedback, Subgoals, named, reached
from rewards.judges.asking import Unreadable
from rlhf.data import Action, Outcome, Trajectory, Turn
from tests.rewards.test_judge import judged
from tests.test_endpoint import completion, served

FENCED = re.compile(r"^BEGIN (\w+)\n(.*?)\nEND \1$", re.DOTALL | re.MULTILINE)


def attempt(*turns: tuple[str, str], number: int = 0) -> Trajectory:
    made = tuple(Turn(Action(action), reply) for action, reply in turns)
    return Trajectory("t", number, "Open the door.", made, Outcome.FAILED)


KEY, DOOR = ("take key", "You have the key."), ("open door", "The door is open.")
WAIT = ("wait", "Nothing happens.")


def shown(body: dict[str, Any]) -> tuple[str, list[str]]:
    found = FENCED.findall(body["messages"][1]["content"])
    [mark] = {m for m, _ in found}
    return mark, [text for _, text in found]


def guide(body: dict[str, Any], _: int) -> Any:
    """Names the key and the door, and finds the actions that got them."""
    mark, texts = shown(body)
    if len(texts) == 1:
        assert texts == ["Open the door."]
        return completion(f"First the key.\nSUBGOAL {mark}: has the key\n- SUBGOAL {mark}: the door is open\n")
    assert texts[0] == "1. has the key\n2. the door is open"
    lines = [
        f"REACHED {mark}: {goal} AT {number}"
        for goal, words in ((1, "take key"), (2, "open door"))
        for number in re.findall(rf"Action (\d+): {words}", texts[1])
    ]
    return completion("\n".join(lines or [f"REACHED {mark}: none"]))


def test_a_subgoal_is_paid_once_on_the_turn_that_reaches_it() -> None:
    attempts = [attempt(WAIT, KEY, KEY, DOOR, number=0), attempt(KEY, number=1), attempt(WAIT, number=2)]
    with served(guide) as (url, requests):
        group = judged(Subgoals(url=url, model="m", bonus=2.0), attempts)
    assert [score.turns for score in group.scores] == [(0.0, 1.0, 0.0, 1.0), (1.0,), (0.0,)]
    assert "2 of 2 subgoals" in group.scores[0].parts["r"].why and len(requests) == 1 + 3


def test_turns_that_were_given_are_not_paid() -> None:
    given = [replace(attempt(KEY, DOOR, KEY), n_given=1)]
    with served(guide) as (url, _):
        assert judged(Subgoals(url=url, model="m", bonus=2.0), given).scores[0].turns == (0.0, 1.0, 0.0)
    with served(progress) as (url, _):
        assert judged(Feedback(url=url, model="m", bonus=0.5), given).scores[0].turns == (0.0, 0.5, 0.0)


def test_lines_that_name_what_there_is_not_are_no_answer() -> None:
    assert named("SUBGOAL ab: x\nSUBGOAL cd: y\n  subgoal ab: x", "ab") == ["x"]
    assert reached("REACHED ab: 1 AT 3\nREACHED ab: 1 AT 2\nREACHED cd: 2 AT 1", "ab", 2, 3) == {1: 2}
    assert reached("REACHED ab: NONE", "ab", 2, 3) == {}
    for reply in ("", "REACHED: 1 AT 1", "REACHED ab: 3 AT 1", "REACHED ab: 1 AT 4", "REACHED ab: 1 AT 0"):
        with pytest.raises(Unreadable):
            reached(reply, "ab", 2, 3)
    with pytest.raises(Unreadable):
        named("SUBGOAL: x", "ab")


def test_a_guide_that_makes_actions_up_is_an_error_and_never_a_score() -> None:
    def reply(body: dict[str, Any], number: int) -> Any:
        mark, texts = shown(body)
        return guide(body, number) if len(texts) == 1 else completion(f"REACHED {mark}: 1 AT 99")

    with served(reply) as (url, _):
        group = judged(Subgoals(url=url, model="m", max_requests=2), [attempt(KEY)])
    assert not group.scores and "of 2 subgoals and 1 actions" in group.failures[0].message


def progress(body: dict[str, Any], _: int) -> Any:
    mark, (told, reply) = shown(body)
    assert told == "Open the door."
    return completion(f"VERDICT {mark}: {'no' if reply == WAIT[1] else 'yes'}")


def test_a_reply_is_judged_once_and_paid_when_it_is_new_to_the_attempt() -> None:
    attempts = [attempt(KEY, WAIT, KEY, DOOR, number=0), attempt(WAIT, DOOR, number=1), attempt(number=2)]
    with served(progress) as (url, requests):
        group = judged(Feedback(url=url, model="m", bonus=0.5), attempts)
    assert [score.turns for score in group.scores] == [(0.5, 0.0, 0.0, 0.5), (0.0, 0.5), ()]
    assert len(requests) == 3  # three different replies
    said = [m["content"] for body in requests for m in body["messages"]]
    assert not any("take key" in text for text in said)  # the policy's words are not shown


def test_feedback_that_cannot_be_had_is_an_error() -> None:
    with served(lambda body, _: completion("perhaps")) as (url, _):
        group = judged(Feedback(url=url, model="m", max_requests=1), [attempt(KEY)])
    assert not group.scores and group.failures[0].outcome is Outcome.REWARD_ERROR
