"""Agents that ask the policy in two roles: both learn, and the credit that tells them apart is what they learn by."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf.evaluation.store import read_trajectories
from tests.combinations import ACTS, LOSSES
from tests.training import errands, runs

SUPERVISED = {
    "kind": "supervised",
    "n_demonstrations": 256,
    "random_share": 0.5,
    "epochs": 12,
    "batch_size": 16,
    "optimizer": {"lr": 5.0e-3},
}
POLICY_GRADIENT = {"kind": "policy_gradient", "tasks_per_step": 8, "group_size": 8, **LOSSES["ppo_clip"], "steps": 16}
FORGETFUL = {"system": "", "memory": {"kind": "window", "turns": 0}}
PLANNER = {
    "kind": "planner",
    "plan_system": "",
    "executor": FORGETFUL,
    "show_opening": False,
    "max_turns_per_subgoal": 1,
    "max_plans_per_turn": 1,
}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(1, 5))]


def learn(folder: Path, seed: int, lr: float, **changes: Any) -> runs.Done:
    """Imitate, then learn, in a world or with an agent of `errands.py`."""
    stage = {**POLICY_GRADIENT, **changes.pop("stage"), "optimizer": {"lr": lr, "schedule": "linear"}}
    path = runs.write(folder, [SUPERVISED, stage], seed=seed, **changes)
    shutil.copy(errands.__file__, folder / "errands.py")
    return runs.run(path, folder / "run")


def planned(folder: Path, seed: int, **advantage: Any) -> runs.Done:
    """A planner that names the word to say, half of the time a random one, and an executor that sees no other."""
    stage = {"advantage": {"kind": "two_level", **advantage}}
    return learn(folder, seed, 6.0e-3, environment={"kind": "./errands.py:Errands"}, agent=PLANNER, stage=stage)


def reviewed(folder: Path, seed: int) -> runs.Done:
    """An actor that says a random word half of the time, and a critic whose verdicts are random."""
    agent = {"kind": "./errands.py:Doubter", "critic_system": "", "actor": FORGETFUL, "max_rounds": 1}
    world = {"kind": "./words.py:Words", "n_turns": 1}
    return learn(folder, seed, 3.0e-3, environment=world, agent=agent, stage={"advantage": {"kind": "reviews"}})


def right_subgoals(done: runs.Done, steps: list[int]) -> float:
    """Share of the subgoals of some steps that name the word to be said."""
    found = []
    for record in read_trajectories(done.folder / "trajectories", phase="train", steps=steps):
        left = errands.Errands().words(int(record.trajectory.task_id.split("/")[-1]))
        for turn in record.trajectory.turns:
            found.append(turn.action.notes["subgoal"] == left[0])
            if turn.action.error is None:  # else nothing was said, and the same word is still to be said
                left = left[1:]
    return sum(found) / len(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_planner_and_an_executor_learn(tmp_path: Path, seed: int) -> None:
    done = planned(tmp_path, seed)
    assert done.result["success_before"] < 0.35 and done.result["success_after"] > 0.85, done.result
    assert runs.ever_above(done.folder, *ACTS["two_level"])
    options, alone = (runs.curve(done.folder, f"credit/n_{name}") for name in ("options", "singleton_options"))
    # Every turn has a subgoal of its own, and nearly all are compared with others that name the same word.
    assert options[0] > 80 and max(alone) < 0.25 * min(options), (options, alone)
    # The planner names the right word more often: it is judged by what became of its words.
    before, after = right_subgoals(done, [1]), right_subgoals(done, [14, 15, 16])
    assert before < 0.75 and after > before + 0.2, (before, after)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.extended
def test_an_actor_and_a_critic_learn(tmp_path: Path, seed: int) -> None:
    done = reviewed(tmp_path, seed)
    assert done.result["success_before"] < 0.7 and done.result["success_after"] > 0.9, done.result
    assert min(runs.curve(done.folder, "credit/n_reviews")) > 48  # of 64 attempts of one turn
    # The critic, whose verdicts were drawn, ends by saying how attempts come out.
    right = runs.curve(done.folder, "credit/right_reviews_share")
    assert right[0] < 0.65 and sum(right[-3:]) / 3 > 0.85, right
