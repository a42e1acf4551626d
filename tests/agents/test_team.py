"""Teams that a policy builds: edits, order, who reads whom, replays, and what they cost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.base import History
from agents.chat import ChatAgent
from agents.check import check_agent
from agents.contrib.critic import ActorCritic
from agents.contrib.team import BUILD, MEMBER, TEAM, Graph, Team
from agents.stores.remembering import Remembering
from rewards.contrib.team_cost import TeamCost
from rlhf.data import Action, Outcome, Task, Trajectory, Turn
from rlhf.evaluation.store import read_trajectories
from tests.agents.spoken import Speaks
from tests.training import runs

AGENT = Team(build_system="", actor=ChatAgent(system=""))
EDITS = ["add Map: Say where we are.", "add risk: Say what may go wrong.", "link map -> risk", "done"]


def test_roles_speak_in_the_order_of_the_links_and_the_last_are_read_by_the_actor() -> None:
    policy = Speaks(["go east", "go west"], build=EDITS, member=["A hall.", "A pit east.", "A pit.", "None."])
    first = asyncio.run(AGENT.act(History(Task("t"), "Dark."), policy))
    assert first.text == "go east" and first.notes[TEAM].splitlines() == [
        "add map: Say where we are.", "add risk: Say what may go wrong.", "link map -> risk"
    ]  # fmt: skip
    assert [g.role for g in first.generations] == [BUILD] * 4 + [MEMBER] * 2 + [""]
    asks = [said for role, said in policy.told if role == BUILD]
    assert asks[1] == [f"Dark.\nadd map: Say where we are.\n{AGENT.ask}"]
    heard = [said for role, said in policy.told if role == MEMBER]
    assert heard == [["Say where we are.", "Dark.\nmap:"], ["Say what may go wrong.", "Dark.\nmap: A hall.\nrisk:"]]
    assert policy.told[-1][1] == ["Dark.\nrisk: A pit east."]  # the map's words reached it through the other alone
    # The team is on its turn: the next one builds nothing, and another agent of the same keys goes on with it.
    then = History(Task("t"), "Dark.", (Turn(first, "A pit!"),))
    second = asyncio.run(Team(build_system="", actor=ChatAgent(system="")).act(then, policy))
    assert [g.role for g in second.generations] == [MEMBER] * 2 + [""] and TEAM not in second.notes
    assert policy.told[-1][1] == ["Dark.", "> go east", "A pit!\nrisk: None."]


def test_edits_that_cannot_be_made_are_answered_and_end_somewhere() -> None:
    lines = ["hm", "link a -> b", "add a: x", "add a: y", "add b: y", "add c: z", "link a -> b", "link b -> a"]
    policy = Speaks(["wait"], build=lines, member=["1", "2"])
    action = asyncio.run(Team(actor=ChatAgent(system=""), max_roles=2).act(History(Task("t"), "Dark."), policy))
    assert action.text == "wait" and action.notes[TEAM] == "add a: x\nadd b: y\nlink a -> b"
    asks = [said[-1].splitlines()[-2] for role, said in policy.told if role == BUILD]
    assert asks[1:4] == ["Write 'add NAME: INSTRUCTION', 'link NAME -> NAME' or 'done'.", "There is no role a.",
                         "add a: x"]  # fmt: skip
    assert asks[4] == "There is a role a already." and asks[6] == "There are 2 roles, and no more may be."
    graph = Graph()
    said = [graph.edit(line, 2) for line in ("add a: x", "link a -> a", "add b: x", "link a -> b", "link a -> b")]
    assert said == ["", "That would be a cycle.", "", "", "That link is there already."]
    assert graph.edit("link b -> a", 2) == "That would be a cycle."
    alone = asyncio.run(AGENT.act(History(Task("t"), "Dark."), Speaks(["wait"], build=["done"])))
    assert alone.text == "wait" and alone.notes == {TEAM: ""}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), max_size=12))
def test_no_order_of_links_makes_a_cycle(pairs: list[tuple[str, str]]) -> None:
    graph = Graph()
    for name in "abcd":
        graph.edit(f"add {name}: x", 4)
    taken: set[tuple[str, str]] = set()
    for first, second in pairs:
        made = not graph.edit(f"link {first} -> {second}", 4)
        reach = {first}  # by brute force: whether the new link would lead back
        cyclic, front = first == second, {second}
        for _ in range(4):
            front = {b for a, b in taken if a in front}
            cyclic |= bool(front & reach)
        assert made == (not cyclic and (first, second) not in taken)
        taken |= {(first, second)} if made else set()
    order = [name for name, _ in graph.order()]
    assert sorted(order) == list("abcd") and all(order.index(a) < order.index(b) for a, b in taken)


def test_it_keeps_the_contract_with_any_actor_and_refuses_what_must_be_outside() -> None:
    for actor in (ChatAgent(), ActorCritic(max_rounds=1)):
        report = check_agent(Team(actor=actor, max_edits=2))
        assert report.ok, str(report)
    with pytest.raises(ValueError, match="an agent that can be nested: wrap it around the other one"):
        Team(actor=Remembering())


def test_a_team_costs_what_it_was_worked_out_to() -> None:
    edits = "add a: x\nadd b: x\nadd c: x\nlink a -> b\nlink b -> c"
    turns = (Turn(Action("go", notes={TEAM: edits}), ""), Turn(Action("go"), ""))
    found = TeamCost()(Task("t"), Trajectory("t", 0, "", turns, Outcome.FAILED))
    assert found.value == pytest.approx(-0.2) and found.per_turn == pytest.approx((-0.2, 0.0))
    assert TeamCost(exempt=9)(Task("t"), Trajectory("t", 0, "", turns, Outcome.FAILED)).value == 0


def test_a_recipe_trains_the_builder_alone(tmp_path: Path) -> None:
    agent = {"kind": "team", "build_system": "", "ask": "?", "max_edits": 2, "actor": {"system": ""}}
    rewards = {"words": {"kind": "environment"}, "cost": {"kind": "team_cost", "weight": 0.0}}
    stage = {"kind": "policy_gradient", "steps": 1, "tasks_per_step": 2, "group_size": 4, "train_roles": [BUILD]}
    stage |= {"advantage": {"kind": "hrpo", "reward": "cost"}}
    made = runs.run(runs.write(tmp_path, [stage], agent=agent, rewards=rewards), tmp_path / "run")
    records = read_trajectories(made.folder / "trajectories", phase="train")
    calls = [g for r in records for g in r.trajectory.generations]
    assert {BUILD, ""} <= {g.role for g in calls}
    built = sum(len(g.token_ids) for g in calls if g.role == BUILD)
    assert runs.curve(made.folder, "batch/n_policy_tokens") <= [float(built)]
