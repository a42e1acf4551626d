"""Agents within agents of other kinds: what the inner one is shown, asked, and where it cannot stand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agents.base import History
from agents.chat import ChatAgent
from agents.check import check_agent
from agents.contrib.critic import ACTOR, CRITIC, ActorCritic
from agents.contrib.rafa import IMAGINE, PROPOSE, VALUE, ReasonForFuture
from agents.contrib.self_play import SelfPlay
from agents.contrib.team import Team
from agents.memory.base import DemonstrationInputs
from agents.memory.subgoals import Subgoals
from agents.planner import PLAN, PlannerExecutor
from agents.stores.remembering import Remembering
from rlhf.data import Action, Task, Turn
from rlhf.errors import AgentError
from rlhf.evaluation.store import read_trajectories
from tests.agents.spoken import Speaks
from tests.training import runs

BARE = ChatAgent(system="")
REVIEWED = ActorCritic(actor=BARE, critic_system="", max_rounds=1)


def play(agent: Any, policy: Speaks, n_turns: int) -> list[Action]:
    turns: tuple[Turn, ...] = ()
    for i in range(n_turns):
        action = asyncio.run(agent.act(History(Task("t"), "A hall.", turns), policy))
        turns = (*turns, Turn(action, action.error or f"seen {i}"))
    return [turn.action for turn in turns]


def test_an_executor_that_has_a_critic_sees_the_turns_of_its_subgoal() -> None:
    agent = PlannerExecutor(plan_system="", executor=REVIEWED)
    lines = {PLAN: ["fetch the key", "open the door"], CRITIC: ["accept", "revise: it is west", "accept", "accept"]}
    policy = Speaks([], **lines, actor=["go up", "go east", "go west", "done", "open"])
    actions = play(agent, policy, 3)
    assert [a.text for a in actions] == ["go up", "go west", "open"]
    assert [a.notes.get("subgoal") for a in actions] == ["fetch the key", None, "open the door"]
    assert agent.roles == (PLAN, ACTOR, CRITIC) and agent.needs == ("subgoal",)
    told = [said for role, said in policy.told if role == ACTOR]
    first = ["Subgoal: fetch the key\nA hall.", "> go up", "seen 0"]
    assert told[1] == first and told[2] == [*first, "> go east", "Not yet: it is west"]
    assert told[4] == ["A hall.\nSubgoal: open the door\nseen 1"]
    # What is demonstrated goes all the way in.
    assert agent.write(DemonstrationInputs("go up", subgoal="fetch the key", role=PLAN)) == "fetch the key"
    assert (
        agent.write(DemonstrationInputs("go up", role=CRITIC)) == "accept"
        and agent.write(DemonstrationInputs("go up", role=ACTOR)) == "go up"
    )


def test_an_actor_that_imagines_reads_the_comment_behind_its_observation() -> None:
    agent = ActorCritic(actor=ReasonForFuture(breadth=1, depth=1, executor=BARE), critic_system="")
    lines = {PROPOSE: ["go east", "go west"], IMAGINE: ["a wall", "a key"], VALUE: ["1", "9"]}
    policy = Speaks([], **lines, critic=["revise: a wall is there", "accept"])
    [action] = play(agent, policy, 1)
    assert action.text == "go west" and action.notes["review"] == "revise\naccept"
    assert [g.role for g in action.generations] == [PROPOSE, IMAGINE, VALUE, CRITIC, PROPOSE, IMAGINE, VALUE, CRITIC]
    shown = [said[-1] for role, said in policy.told if role == PROPOSE]
    assert shown[1].startswith("A hall.\nProposed: go east\nNot yet: a wall is there\n")


@pytest.mark.parametrize(
    "agent",
    [
        PlannerExecutor(executor=ReasonForFuture(breadth=1, depth=1)),
        PlannerExecutor(executor=ActorCritic(actor=ReasonForFuture(breadth=1, depth=1))),
        ActorCritic(actor=PlannerExecutor(executor=REVIEWED), max_rounds=1),
        Remembering(inner=PlannerExecutor(executor=REVIEWED)),
    ],
    ids=["plan, imagine", "plan, review, imagine", "review, plan, review", "recall, plan, review"],
)
def test_they_keep_the_contract_of_an_agent(agent: Any) -> None:
    report = check_agent(agent)
    assert report.ok, str(report)


@pytest.mark.parametrize("outer", [lambda a: PlannerExecutor(executor=a), lambda a: ActorCritic(actor=a)])
@pytest.mark.parametrize("inner", [Remembering(), SelfPlay()], ids=["store", "seats"])
def test_what_only_the_outermost_agent_can_be_is_refused(outer: Any, inner: Any) -> None:
    with pytest.raises(ValueError, match="an agent that can be nested: wrap it around the other one"):
        outer(inner)


def test_two_voices_that_name_subgoals_and_what_cannot_be_shown_are_refused() -> None:
    for inner in (PlannerExecutor(), ActorCritic(actor=PlannerExecutor()), Team(actor=PlannerExecutor())):
        with pytest.raises(ValueError, match="names subgoals too"):
            PlannerExecutor(executor=inner)
    with pytest.raises(ValueError, match="of kind subgoals"):
        PlannerExecutor(executor=ChatAgent(memory=Subgoals()))
    with pytest.raises(AgentError, match="cannot be shown demonstrations"):
        PlannerExecutor(executor=ReasonForFuture()).write(DemonstrationInputs("go up"))


def test_a_recipe_nests_them_and_trains_every_role(tmp_path: Path) -> None:
    stage = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 2, "group_size": 2}
    inner = {"kind": "critic", "critic_system": "", "max_rounds": 1, "actor": {"kind": "chat", "system": ""}}
    agent = {"kind": "planner", "plan_system": "", "executor": inner}
    path = runs.write(tmp_path, [stage], agent=agent)
    made = runs.run(path, tmp_path / "run")
    trained = read_trajectories(made.folder / "trajectories", phase="train")
    assert {PLAN, ACTOR} <= {g.role for r in trained for g in r.trajectory.generations}
