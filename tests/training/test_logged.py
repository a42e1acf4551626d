"""Stored attempts of other runs: learnt from without sampling, shared by runs, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf.data import Outcome, Score, ScoredGroup, Trajectory
from rlhf.errors import DataError, RecipeError, TrainingError
from rlhf.estimate.arithmetic import arithmetic
from rlhf.recipe import load
from rlhf.training.contrib.logged_attempts import OfflineData, OfflineDataHook
from tests import test_resume as resume
from tests.training import runs, words
from tests.training.test_attempts import OUTCOME, START

SAMPLING: dict[str, Any] = {
    "kind": "policy_gradient", "steps": 4, "tasks_per_step": 16, "group_size": 8, "optimizer": {"lr": 1.0e-5},
}  # fmt: skip
OFFLINE: dict[str, Any] = {
    **SAMPLING, "steps": 12, "advantage": {"kind": "dr_grpo"}, "loss": {"kind": "a_lol"}, "epochs": 2,
    "reduction": {"kind": "seq_mean_token_sum"}, "optimizer": {"lr": 3.0e-3},
}  # fmt: skip


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy that solves about a quarter of the tasks, and a run that has attempted some with it."""
    folder = tmp_path_factory.mktemp("logs")
    start = runs.newest(runs.run(runs.write(folder, [START]), folder / "start").folder) / "policy"
    return start, _learn(start, folder / "other", SAMPLING).folder


def _learn(start: Path, folder: Path, stage: dict[str, Any], **changes: Any) -> runs.Done:
    policy = {"kind": "pretrained", "path": str(start)}
    changes = {"rewards": OUTCOME, **changes}
    return runs.run(runs.write(folder, [stage], policy=policy, **changes), folder / "run")


def test_logs_alone_teach(logs: tuple[Path, Path], tmp_path: Path) -> None:
    start, other = logs
    done = _learn(start, tmp_path, OFFLINE | {"offline_data": {"runs": [str(other)], "groups": 32}})
    assert done.result["n_episodes"] == 0
    assert done.result["interval_before"][1] < done.result["interval_after"][0], done.result
    assert set(runs.curve(done.folder, "offline_data/n_stored")) == {64.0}
    assert runs.curve(done.folder, "loss/ratio_max")[-1] > 1.2  # of the present policy to that of the logs


def test_runs_share_what_they_have_stored(logs: tuple[Path, Path], tmp_path: Path) -> None:
    start, other = logs
    logged = {"runs": [str(other), str(tmp_path / "none")], "groups": 4, "newest": 1, "sample": True}
    stage = SAMPLING | {"steps": 2, "tasks_per_step": 2, "group_size": 4, "offline_data": logged}
    path = runs.write(tmp_path, [stage], policy={"kind": "pretrained", "path": str(start)}, rewards=OUTCOME,
                      evaluation={"n_tasks": 6})  # fmt: skip
    done = runs.run(path, tmp_path / "whole")
    assert done.result["n_episodes"] == 16 and arithmetic(load(path))["stages"][0]["n_episodes"] == 16
    assert runs.curve(done.folder, "offline_data/n_groups") == [4.0, 4.0]
    assert runs.curve(done.folder, "offline_data/n_stored") == [16.0, 16.0]  # the last step of the other run
    assert min(runs.curve(done.folder, "batch/n_trained_trajectories")) >= 4 * 8
    calls: list[int] = []
    with words.on_every_step(path, lambda: calls.append(1)):
        runs.run(path, tmp_path / "counted")
    assert resume.run_with_interruptions(path, tmp_path / "stopped", [2 * len(calls) // 3]) == 1
    assert resume.everything(tmp_path / "stopped") == resume.everything(done.folder)


def test_no_group_is_drawn_twice_in_a_step() -> None:
    def group(task: str) -> ScoredGroup:
        attempts = tuple(Trajectory(task, i, "", (), Outcome.SOLVED) for i in range(2))
        return ScoredGroup(task, attempts, (Score({}, (), 0.0), Score({}, (), 1.0)))

    stored = [group(str(i)) for i in range(5)]
    hook = OfflineDataHook(OfflineData(runs=("x",), groups=3), seed="a")
    drawn = [[group.task_id for group in hook._drawn(stored, number)] for number in range(20)]
    assert all(len(set(ids)) == 3 for ids in drawn), "a pass over 5 groups ends within a step of 3"
    assert set(Counter(i for ids in drawn for i in ids).values()) == {12}


def test_runs_without_attempts_are_told_of(logs: tuple[Path, Path], tmp_path: Path) -> None:
    start, _ = logs
    with pytest.raises(RecipeError, match="holds no attempts"):
        _learn(start, tmp_path / "a", OFFLINE | {"offline_data": {"runs": [str(tmp_path)]}})
    few = SAMPLING | {"steps": 1, "tasks_per_step": 2, "group_size": 2}
    same = _learn(start, tmp_path / "b", few, rewards={"same": {"kind": "outcome", "failure": 1.0}})
    with pytest.raises(TrainingError, match="no stored attempts to learn from"):
        _learn(start, tmp_path / "c", OFFLINE | {"offline_data": {"runs": [str(same.folder)]}})


def test_stored_attempts_without_a_role_that_is_trained_are_told_of(logs: tuple[Path, Path], tmp_path: Path) -> None:
    start, other = logs
    with pytest.raises(DataError, match="no generation has a role that is trained"):
        planned = OFFLINE | {"offline_data": {"runs": [str(other)]}, "train_roles": ["plan"], "layout": "generation"}
        agent = {"kind": "planner", "plan_system": "", "executor": {"system": ""}}
        _learn(start, tmp_path, planned, agent=agent, evaluation={"n_tasks": 2})


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"loss": {"kind": "reinforce", "max_weight": None}}, "this loss has no ratio"),
        (
            {"loss": {"kind": "rover"}, "minibatches": 2, "offline_data": {"runs": ["x"], "sample": True}},
            "this loss needs statistics that are not computed for attempts of other runs",
        ),
        ({"advantage": {"kind": "gae"}, "critic": {}}, "a critic cannot value"),
        ({"filters": {"high_entropy_share": 0.2}}, "entropies are not computed for attempts of other runs"),
    ],
)
def test_what_cannot_learn_from_logs_is_refused(tmp_path: Path, stage: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load(runs.write(tmp_path, [SAMPLING | {"offline_data": {"runs": ["x"]}} | stage]))
