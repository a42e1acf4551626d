"""Whole runs that begin in the middle or branch: stopped and resumed they are the same, and what they store says so."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf.cli import app
from rlhf.errors import RecipeError
from rlhf.estimate.arithmetic import arithmetic
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from rlhf.training.stages.demonstrations import load as load_demonstrations
from tests.test_resume import PressAt, assert_equal, run_with_interruptions
from tests.training import runs, words

#: So that some of what the policy says is right.
SUPERVISED = {"kind": "supervised", "n_demonstrations": 48, "epochs": 6, "batch_size": 4, "optimizer": {"lr": 3.0e-3}}
STAGE = {
    "kind": "policy_gradient",
    "steps": 5,
    "tasks_per_step": 4,
    "group_size": 6,
    "checkpoint_every": 2,
    "evaluate_every": 2,
    "optimizer": {"lr": 3.0e-3},
}
REVERSE = {"sampler": {"kind": "reverse_curriculum", "segments": 3, "n_demonstrations": 6}}
STAGED = {"sampler": {"kind": "reverse_curriculum", "segments": 3, "schedule": "staged", "stage_steps": 1}}
EXIT = {"sampler": {"kind": "exploratory_iteration", "p_new": 0.4, "max_size": 8}}
TREE = {"rollout": {"kind": "tree"}, "advantage": {"kind": "tree_grpo"}}
KINDS = {"reverse": REVERSE, "staged": STAGED, "exit": EXIT, "tree": TREE, "exit-tree": EXIT | TREE}


def moved(run: Path) -> bool:
    """Whether attempts differ in some group: there is something to learn."""
    return any(
        x for r in read_trajectories(run / "trajectories", phase="train") for row in r.advantages or () for x in row
    )


#: What has to happen in a run for its end to say something.
KEPT = dict.fromkeys(KINDS, moved) | {
    "exit": lambda run: max(runs.curve(run, "sampling/n_stored")) > 2,
    "staged": lambda run: runs.curve(run, "sampling/stage") == [0, 1, 2, 2, 2],
}


def recipe(folder: Path, *stages: Any, **changes: Any) -> Path:
    environment = {"kind": "./words.py:Words", "n_turns": 3, "n_tasks": 12}
    limits = {"max_turns": 4, "max_tokens": 6}
    evaluation = {"n_tasks": 6, "validation_n_tasks": 4}
    values = {"environment": environment, "limits": limits, "evaluation": evaluation, **changes}
    return runs.write(folder, list(stages), **values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_equals_one_that_was_not(tmp_path: Path, kind: str) -> None:
    path = recipe(tmp_path, SUPERVISED, STAGE | KINDS[kind])
    with words.on_every_step(path, counter := PressAt(-1)):
        runs.run(path, tmp_path / "whole")
    assert KEPT[kind](tmp_path / "whole"), "this test can fail"
    draw = random.Random(kind)
    at = [draw.randrange(counter.n_steps // 8, counter.n_steps // 2) for _ in range(4)]
    assert run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    assert_equal(tmp_path / "stopped", tmp_path / "whole")


def test_evaluations_begin_at_the_beginning_and_training_does_not(tmp_path: Path) -> None:
    path = recipe(tmp_path, SUPERVISED, STAGE | REVERSE)
    done = runs.run(path, tmp_path / "run")
    shown = load_demonstrations(done.folder / "demonstrations" / "1.jsonl")
    assert [d.task.id for d in shown] == [f"words/{i}" for i in range(6)] and all(d.trajectory.solved for d in shown)
    played = {d.task.id: d.trajectory.turns for d in shown}
    trained = list(read_trajectories(done.folder / "trajectories", phase="train"))
    assert {r.trajectory.n_given for r in trained} == {0, 1, 2}
    for record in trained:
        t = record.trajectory
        name, _, n_given = record.task_id.partition("@")
        assert t.n_given == int(n_given or 0) and t.turns[: t.n_given] == played.get(name, ())[: t.n_given]
        assert record.score is not None and not any(record.score.turns[: t.n_given])
    evaluated = list(read_trajectories(done.folder / "trajectories", phase="eval"))
    assert evaluated and all(r.trajectory.n_given == 0 and "@" not in r.task_id for r in evaluated)
    assert {"sampling/start_success", "sampling/prefix_turns_mean"} <= set(runs.log(done.folder)[-2])


def test_demonstrations_without_a_middle_are_noticed_before_anything_is_trained(tmp_path: Path) -> None:
    path = recipe(tmp_path, STAGE | REVERSE, environment={"kind": "./words.py:Words", "n_turns": 1})
    with pytest.raises(RecipeError, match="no demonstration is long enough for a later start state"):
        runs.run(path, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_tree_of_a_run_is_stored(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path, SUPERVISED, STAGE | TREE), tmp_path / "run")
    records = list(read_trajectories(done.folder / "trajectories", phase="train", steps=[5]))
    branches = [r.trajectory for r in records if r.trajectory.parent is not None]
    assert len(records) == 24 and len(branches) == 16
    by_number = {(r.task_id, r.trajectory.attempt): r.trajectory for r in records}
    for t in branches:
        assert t.turns[: t.n_shared] == by_number[t.task_id, t.parent].turns[: t.n_shared]
    assert runs.curve(done.folder, "rollout/n_replayed_turns")[-1] == sum(t.n_shared for t in branches)
    assert runs.curve(done.folder, "rollout/n_episodes") == [24.0] * 5


def test_what_a_tree_comes_to_is_shown(tmp_path: Path) -> None:
    path = recipe(tmp_path, STAGE | TREE)
    [figures] = arithmetic(load(path))["stages"]
    # 4 tasks x 6 attempts, of which 4 x 2 trees begin at the start; a branch replays at most 3 of its 4 turns.
    assert (figures["episodes_per_step"], figures["branches_per_step"]) == (24, 16)
    assert figures["max_shared_turns_per_step"] == 48
    shown = CliRunner().invoke(app, ["show", str(path)], env={"COLUMNS": "200"}).output
    assert "16 of these episodes branch off others of their task: at most 48 of the turns are replayed" in shown
    single = ["stages.0.rollout={kind: independent}", "stages.0.advantage={kind: grpo}"]
    alone = CliRunner().invoke(app, ["show", str(path), *single]).output
    assert "branch off" not in alone and "policy_gradient" in alone


@pytest.mark.parametrize(
    ("overrides", "where", "says"),
    [
        (["stages.0.group_size=4"], "stages[0].group_size", "a multiple of 1 + rounds x branches_per_round"),
        (["environment={kind: ./blind.py:Blind}"], "stages[0].rollout.kind", "replayable=True"),
        (
            [
                "stages.0.rollout={kind: independent}",
                "stages.0.sampler={kind: exploratory_iteration}",
                "agent={kind: ./blind.py:Mum}",
            ],
            "stages[0].sampler.kind",
            "a method `write(action)`",
        ),
        (
            [
                "stages.0.rollout={kind: independent}",
                "stages.0.sampler={kind: reverse_curriculum}",
                "environment={kind: ./blind.py:Unshown}",
            ],
            "stages[0].sampler.kind",
            "a method `plan(task, taken)`",
        ),
    ],
)
def test_what_a_replay_needs_is_asked_for_before_anything_loads(
    tmp_path: Path, overrides: list[str], where: str, says: str
) -> None:
    path = recipe(tmp_path, STAGE | TREE)
    (tmp_path / "blind.py").write_text(BLIND)
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    assert caught.value.where == where and says in caught.value.expected, str(caught.value)


BLIND = """
from dataclasses import dataclass

from environments.base import Properties
from rlhf.data import Task


@dataclass(frozen=True)
class Blind:
    properties = Properties()

    def tasks(self, split):
        return [Task("blind")]

    def start(self, task):
        raise NotImplementedError


class Unshown(Blind):
    properties = Properties(replayable=True)


@dataclass(frozen=True)
class Mum:
    async def act(self, history, policy):
        raise NotImplementedError
"""


@pytest.mark.slow
@pytest.mark.extended
def test_a_sparse_task_is_learnt_from_near_its_goal(tmp_path: Path) -> None:
    # Six words in a row of which a fifth are said right: from the beginning hardly an episode is ever rewarded.
    # `benchmarks/starts.py` has more seeds.
    shown = {"kind": "supervised", "n_demonstrations": 64, "epochs": 3, "batch_size": 4, "optimizer": {"lr": 3.0e-3}}
    stage = {**STAGE, "steps": 36, "tasks_per_step": 8, "group_size": 8, "checkpoint_every": 0, "evaluate_every": 0}
    after = {}
    for name, sampler in {
        "beginning": {"kind": "shuffled"},
        "reverse": {"kind": "reverse_curriculum", "segments": 6, "n_demonstrations": 64},
    }.items():
        path = recipe(
            tmp_path / name,
            shown,
            stage | {"sampler": sampler},
            seed=1,
            environment={"kind": "./words.py:Words", "n_turns": 6, "n_tasks": 128},
            rewards={"solved": {"kind": "outcome"}},
            limits={"max_turns": 7, "max_tokens": 4},
            evaluation={"n_tasks": 128},
        )
        after[name] = runs.run(path, tmp_path / name / "run").result["success_after"]
    assert after["beginning"] < 0.05 and after["reverse"] > 0.2, after
