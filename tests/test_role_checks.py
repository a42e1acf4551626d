"""Roles of an agent's calls: whole runs that train some of them, and what is refused or doubted beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agents.contrib.critic import ACTOR, CRITIC
from rlhf.errors import RecipeError
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from rlhf.recipe.checks import cautions
from tests import test_self_play as self_play
from tests.commands import run
from tests.training import runs

AGENT = {"kind": "critic", "critic_system": "", "actor": {"system": ""}, "max_rounds": 1}
SUPERVISED = {"kind": "supervised", "n_demonstrations": 24, "random_share": 0.5, "epochs": 3, "batch_size": 4}
STAGE = {
    "kind": "policy_gradient",
    "steps": 2,
    "tasks_per_step": 3,
    "group_size": 4,
    "advantage": {"kind": "reviews"},
    "optimizer": {"lr": 3.0e-3},
    "filters": {"drop_zero_advantage": False},
}


def write(folder: Path, *stages: dict[str, Any], **changes: Any) -> Path:
    return runs.write(folder, list(stages), **{"agent": AGENT, "evaluation": {"n_tasks": 4}} | changes)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy that was shown actions, and a critic that accepts them."""
    folder = tmp_path_factory.mktemp("start")
    return str(runs.newest(runs.run(write(folder, SUPERVISED), folder / "run").folder) / "policy")


@pytest.mark.parametrize("trains", [[ACTOR], [CRITIC], [ACTOR, CRITIC], None], ids=str)
def test_the_roles_that_are_named_are_trained(start: str, tmp_path: Path, trains: Any) -> None:
    policy = {"kind": "pretrained", "path": start}
    done = runs.run(write(tmp_path, STAGE | {"train_roles": trains}, policy=policy), tmp_path / "run")
    for step, n_trained in enumerate(runs.curve(done.folder, "batch/n_policy_tokens"), start=1):
        stored = read_trajectories(done.folder / "trajectories", phase="train", steps=[step])
        calls = [g for record in stored for g in record.trajectory.generations]
        assert {ACTOR, CRITIC} == {g.role for g in calls}
        assert n_trained == sum(len(g.token_ids) for g in calls if g.role in (trains or (ACTOR, CRITIC)))
    assert min(runs.curve(done.folder, "credit/n_reviews")) >= 12  # each attempt has a turn at least, with a review
    assert min(runs.curve(done.folder, "agent/n_review")) >= 1


@pytest.mark.parametrize(
    ("agent", "role", "says"),
    [
        (AGENT, "critc", "did you mean 'critic'"),
        (AGENT, "", "'actor', 'critic'\n"),
        ({"kind": "planner"}, "plans", "did you mean 'plan'"),
        ({"kind": "chat"}, "actor", "expected: ''\n"),
        ({"kind": "chat", "memory": {"kind": "summary"}}, "actor", "'', 'memory'\n"),
        ({"kind": "rafa"}, "valeu", "did you mean 'value'"),
    ],
)
def test_a_role_that_the_agent_does_not_have_is_refused(tmp_path: Path, agent: Any, role: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        load(write(tmp_path, STAGE | {"advantage": {"kind": "grpo"}, "train_roles": [role]}, agent=agent))
    assert caught.value.where == "stages[0].train_roles"


PAIRED = {"kind": "preference"}
REWARD_MODEL = {"kind": "reward_model"}


@pytest.mark.parametrize(
    ("stage", "agent", "do"),
    [
        (PAIRED, {"kind": "planner"}, "level: parting, with pairs.role: ROLE"),
        (REWARD_MODEL, {"kind": "planner"}, "learns of all roles by objective: outcome"),
        (REWARD_MODEL | {"pairs": {"level": "state"}}, AGENT, "level: parting, with pairs.role: ROLE"),
        (PAIRED | {"pairs": {"level": "parting"}}, {"kind": "planner"}, "level: parting, with pairs.role: ROLE"),
        (REWARD_MODEL | {"objective": "outcome"}, {"kind": "planner"}, ""),
        (REWARD_MODEL | {"pairs": {"level": "parting", "role": "plan"}}, {"kind": "planner"}, ""),
        (PAIRED | {"pairs": {"file": "pairs.jsonl"}}, {"kind": "planner"}, ""),
        (PAIRED, {"kind": "chat", "memory": {"kind": "summary"}}, ""),
    ],
)
def test_fresh_pairs_of_calls_in_several_roles_are_refused_before_anything_loads(
    tmp_path: Path, stage: dict[str, Any], agent: Any, do: str
) -> None:
    path = write(tmp_path, stage, agent=agent)
    if not do:
        load(path)
        return
    with pytest.raises(RecipeError, match="no single row of tokens") as caught:
        load(path)
    assert caught.value.where == "stages[0].pairs.level" and do in caught.value.hint
    load(path, is_trained=True)  # another agent may be evaluated


@pytest.mark.parametrize(("level", "do"), [("trajectory", "level: state or parting"), ("parting", "")])
def test_seats_are_compared_action_by_action(tmp_path: Path, level: str, do: str) -> None:
    path = self_play.write(tmp_path, [PAIRED | {"pairs": {"level": level}}])
    if not do:
        load(path)
        return
    with pytest.raises(RecipeError, match="no single row of tokens") as caught:
        load(path)
    assert do in caught.value.hint


def test_whole_attempts_of_an_agent_that_forgets_are_doubted(tmp_path: Path) -> None:
    def said(stage: dict[str, Any], memory: str) -> list[str]:
        agent = {"kind": "chat", "memory": {"kind": memory}}
        return [text for text in cautions(load(write(tmp_path, stage, agent=agent))) if "pairs.level" in text]

    assert "agent.memory window forgets" in said(PAIRED, "window")[0]
    assert not said(PAIRED, "full") and not said(PAIRED | {"pairs": {"level": "parting"}}, "window")
    assert not said(REWARD_MODEL | {"objective": "outcome"}, "window")


WINDOW, SUMMARY = {"memory": {"kind": "window"}}, {"memory": {"kind": "summary"}}
RULES = {"kind": "pattern", "patterns": [r"(?P<subject>\w+) (?P<relation>\w+) (?P<object>\w+)"]}


@pytest.mark.parametrize(
    ("quiet", "asking"),
    [
        ({"kind": "chat"}, {"kind": "chat", **SUMMARY}),
        ({"kind": "tools", **WINDOW}, {"kind": "tools", "memory": {"kind": "managed"}}),
        ({"kind": "planner", "executor": WINDOW}, {"kind": "planner", "executor": SUMMARY}),
        ({"kind": "critic", "actor": WINDOW}, {"kind": "critic", "actor": SUMMARY}),
        (
            {"kind": "remembering", "store": {"kind": "cases"}},
            {"kind": "remembering", "inner": {"kind": "chat", **SUMMARY}, "store": {"kind": "cases"}},
        ),
        (
            {"kind": "remembering", "store": {"kind": "graph", "extractor": RULES}},
            {"kind": "remembering", "store": {"kind": "graph"}},
        ),
    ],
    ids=["chat", "tools", "planner", "critic", "store", "graph"],
)
def test_the_role_of_a_memory_is_there_where_it_asks_the_policy(tmp_path: Path, quiet: Any, asking: Any) -> None:
    stage = STAGE | {"advantage": {"kind": "grpo"}, "train_roles": ["memory"]}
    assert load(write(tmp_path, stage, agent=asking)).stages
    with pytest.raises(RecipeError, match="take a memory that asks the policy") as caught:
        load(write(tmp_path, stage, agent=quiet))
    assert caught.value.where == "stages[0].train_roles"


def test_the_role_of_a_seats_memory_is_there_where_it_asks_the_policy(tmp_path: Path) -> None:
    stage = STAGE | {"advantage": {"kind": "seats"}, "train_roles": ["memory"]}
    with pytest.raises(RecipeError, match="take a memory that asks the policy"):
        load(self_play.write(tmp_path, [stage]))
    agent = {"kind": "self_play", "player": {"system": "", **SUMMARY}}
    assert load(self_play.write(tmp_path, [stage], agent=agent)).stages


def test_a_key_of_the_agent_is_checked(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean 'max_rounds'"):
        load(write(tmp_path, STAGE, agent={"kind": "critic", "max_round": 1}))
    with pytest.raises(RecipeError, match="which parses replies"):
        load(write(tmp_path, STAGE, agent={"kind": "critic", "actor": {"memory": {"kind": "subgoals"}}}))


def test_what_is_probably_not_meant_is_said(tmp_path: Path) -> None:
    assert not cautions(load(write(tmp_path, STAGE)))
    many = load(write(tmp_path, STAGE, agent={"kind": "critic", "max_rounds": 8}))
    assert cautions(many) == ["agent.max_rounds 8 may take 17 calls in a turn, limits.max_generations_per_turn is 16"]
    inner = STAGE | {"advantage": {"kind": "task_normalised", "inner": {"kind": "reviews"}}}
    with pytest.raises(RecipeError, match="kind chat has no critic") as caught:
        load(write(tmp_path, inner, agent={"kind": "chat"}))
    assert caught.value.where == "stages[0].advantage.inner.kind"


def test_a_run_is_evaluated_with_an_agent_of_fewer_roles(tmp_path: Path) -> None:
    policy = {**runs.BASE["policy"], "lora": {"rank": 4, "roles": [CRITIC]}}
    path = write(tmp_path / "r", STAGE | {"steps": 1, "train_roles": [CRITIC]}, policy=policy)
    done = runs.run(path, tmp_path / "run")
    chat = "agent={kind: chat, system: ''}"
    said = run("evaluate", done.folder, chat, "-n", "4", "--out", tmp_path / "e")
    assert said.exit_code == 0, said.output
    found = [g for r in read_trajectories(tmp_path / "e" / "trajectories") for g in r.trajectory.generations]
    assert found and {(g.role, g.prompt.adapter) for g in found} == {("", "")}
    assert run("evaluate", "--verify", tmp_path / "e").exit_code == 0
    for command in ("train", "evaluate"):  # what is not trained yet
        said = run(command, path, chat, "--out", tmp_path / "other")
        assert said.exit_code == 2 and "policy.lora.roles[0]: the agent never calls" in said.output
