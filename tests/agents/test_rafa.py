"""Reason for future, act for now: what is imagined, what is taken, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from agents.base import History
from agents.chat import ChatAgent
from agents.check import check_agent
from agents.contrib.rafa import IMAGINE, PLANNED, PROPOSE, VALUE, ReasonForFuture
from agents.memory.window import Window
from rlhf.data import Action, Finish, Generation, Prompt, Task, Turn
from tests.agents.spoken import Says

HISTORY = History(Task("door/1"), "A hall.", admissible_actions=("go east", "go west", "wait"))


def act(agent: ReasonForFuture, answer: Callable[[str, str], str], history: History = HISTORY) -> tuple[Action, Says]:
    policy = Says(lambda role, messages: answer(role, messages[-1].content))
    return asyncio.run(agent.act(history, policy)), policy


def treasure(role: str, shown: str) -> str:
    """Going west, then east, is best; what is imagined of an action names it."""
    if role == PROPOSE:
        return "1. go east\n2. go west\n3. wait"
    if role == IMAGINE:
        return f"After {shown.split('> ')[-1].splitlines()[0]}."
    return "9" if "> go west\nAfter go west.\n> go east" in shown else "It is a 3, I think."


def test_the_first_action_of_the_best_future_is_taken() -> None:
    action, policy = act(ReasonForFuture(), treasure)
    assert action.text == "go west" and action.error is None
    assert action.notes == {PLANNED: "go west, go east (0.9)"}
    # B = U = 2: 2 + 4 imagined steps; 1 + 2 calls propose, the 4 ends are valued. `wait` is the third, and left out.
    roles = [role for role, _ in policy.asked]
    assert [roles.count(r) for r in (PROPOSE, IMAGINE, VALUE)] == [3, 6, 4] and ReasonForFuture().max_calls == 13
    assert len(action.generations) == 13 and [g.role for g in action.generations] == roles
    assert not any("wait" in shown for role, shown in policy.asked if role == IMAGINE)


@pytest.mark.parametrize(("breadth", "depth"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2)])
def test_no_more_calls_than_it_says(breadth: int, depth: int) -> None:
    # B = 2, U = 3: 1 + 2; then 2 + 4 + 4, since four futures are more than two; then the same again: 23.
    agent = ReasonForFuture(breadth=breadth, depth=depth)
    _, policy = act(agent, treasure)
    assert len(policy.asked) == agent.max_calls
    assert ReasonForFuture(breadth=2, depth=3).max_calls == 3 + 10 + 10 and ReasonForFuture(depth=1).max_calls == 5


def test_a_value_that_cannot_be_read_is_none() -> None:
    def odd(role: str, shown: str) -> str:
        if role == VALUE:  # of west: 20 of 10, and words; of east, the first, a little
            return "1" if "> go east\nAfter" in shown.partition("> go west")[0] else "20" if "wait" in shown else "good"
        return treasure(role, shown)

    action, _ = act(ReasonForFuture(depth=1), odd)
    assert action.text == "go east" and action.notes[PLANNED].endswith("(0.1)")
    # All equally good: the one that was thought of first.
    assert act(ReasonForFuture(), lambda r, s: "?" if r == VALUE else treasure(r, s))[0].text == "go east"


def test_what_really_happened_stands_before_what_is_imagined() -> None:
    done = Turn(Action("go east", (Generation(Prompt((1,)), (5,), (-0.1,), Finish.STOP, 0),)), "A wall.")
    possible = HISTORY.admissible_actions
    history = History(HISTORY.task, "A hall.", (done,), possible, (possible,))
    _, policy = act(ReasonForFuture(executor=ChatAgent(show_admissible=True)), treasure, history)
    assert all(
        shown.startswith("A hall.\n> go east\nA wall.\n\nPossible actions:\n- go east") for _, shown in policy.asked
    )
    assert "After" not in policy.asked[0][1] and "{n}" not in policy.asked[0][1]


def test_without_a_proposal_there_is_no_action_and_the_policy_reads_why() -> None:
    silent, policy = act(ReasonForFuture(), lambda role, shown: "")
    assert silent.text == "" and silent.error and len(policy.asked) == len(silent.generations) == 1
    # Nothing comes to its mind further on: then what it has is the plan.
    short, _ = act(ReasonForFuture(), lambda r, s: "" if r == PROPOSE and "> go" in s else treasure(r, s))
    assert short.text == "go east" and short.notes[PLANNED] == "go east (0)"


def test_it_keeps_the_contract_of_an_agent() -> None:
    report = check_agent(ReasonForFuture())
    assert report.ok, str(report)
    with pytest.raises(ValueError, match="another than full, expected full"):
        ReasonForFuture(executor=ChatAgent(memory=Window()))


def test_thoughts_that_would_be_gone_are_not_required() -> None:
    with pytest.raises(ValueError, match="think is require"):
        ReasonForFuture(executor=ChatAgent(think="require"))
