"""Expert iteration: what is kept of the attempts, that imitating it helps, and that a stopped stage goes on exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Task, Trajectory, Turn
from rlhf.errors import RecipeError, TrainingError
from rlhf.estimate.arithmetic import arithmetic
from rlhf.recipe import load
from rlhf.training.contrib.expert_iteration import Attempts
from tests import test_resume as resume
from tests.training import runs, words

#: Knows the words, and solves about a quarter of the tasks.
START = {"kind": "supervised", "n_demonstrations": 256, "random_share": 0.7, "epochs": 12, "batch_size": 16,
         "optimizer": {"lr": 5.0e-3}}  # fmt: skip
ROUNDS: dict[str, Any] = {
    "kind": "supervised", "epochs": 4, "batch_size": 16, "optimizer": {"lr": 4.0e-3},
    "rejection_sampling": {"rounds": 3, "tasks_per_round": 32, "group_size": 8},
}  # fmt: skip
OUTCOME = {"right": {"kind": "outcome"}}


# --- what is kept ----------------------------------------------------------------------------------------------------


def attempt(number: int, tokens: Sequence[int], solved: bool, task: str = "t") -> Trajectory:
    said = Generation(Prompt((1, 2)), tuple(tokens), (0.0,) * len(tokens), Finish.STOP, 0)
    outcome = Outcome.SOLVED if solved else Outcome.FAILED
    return Trajectory(task, number, "", (Turn(Action("x", (said,)), ""),), outcome)


def group(found: Sequence[tuple[Sequence[int], float, bool]], task: str = "t") -> ScoredGroup:
    attempts = tuple(attempt(i, tokens, solved, task) for i, (tokens, _, solved) in enumerate(found))
    return ScoredGroup(task, attempts, tuple(Score({}, (score,), score) for _, score, _ in found))


def kept(found: Sequence[tuple[Sequence[int], float, bool]], **settings: Any) -> list[int]:
    return [t.attempt for t in Attempts(**settings).kept([group(found)])]


def test_the_best_solved_attempts_are_kept_each_once() -> None:
    # Solved are 0, 2, 3 and 4. The highest score is that of 4; of the three others, which score 1, attempt 3 has the
    # fewest tokens, and 2 says what 0 says.
    found = [((5, 6), 1.0, True), ((5,), 1.5, False), ((5, 6), 1.0, True), ((7,), 1.0, True), ((8, 8, 8), 2.0, True)]
    assert kept(found, max_per_task=9) == [4, 3, 0]
    assert kept(found, max_per_task=2) == [4, 3]


def test_best_is_above_the_mean_of_the_group_solved_or_not() -> None:
    # Scores of 1, 1.5, 1, 1 and 2 have a mean of 1.3.
    found = [((5, 6), 1.0, True), ((5,), 1.5, False), ((5, 6), 1.0, True), ((7,), 1.0, True), ((8, 8, 8), 2.0, True)]
    assert kept(found, keep="best", max_per_task=9) == [4, 1]
    assert kept([((5,), 1.0, True), ((6,), 1.0, True)], keep="best") == []
    assert kept([((n,), 0.7, False) for n in range(3)], keep="best") == [], "0.7 three times is no more than its mean"


def test_an_attempt_that_sampled_nothing_is_not_kept() -> None:
    assert kept([((), 1.0, True), ((5,), 0.0, False)]) == []


@given(n=st.integers(1, 9), per_round=st.integers(1, 9), rounds=st.integers(1, 6))
def test_every_task_comes_once_before_any_comes_again(n: int, per_round: int, rounds: int) -> None:
    tasks = [Task(str(i)) for i in range(n)]
    source = Attempts(tasks_per_round=per_round)
    drawn = [[t.id for t in source.tasks(tasks, number, 7)] for number in range(rounds)]
    assert all(len(set(ids)) == len(ids) == min(n, per_round) for ids in drawn)
    flat = [i for ids in drawn for i in ids]
    for lap in range(len(flat) // n):
        assert len(set(flat[lap * n : (lap + 1) * n])) == n


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a policy that solves about a quarter of the tasks."""
    folder = tmp_path_factory.mktemp("start")
    done = runs.run(runs.write(folder, [START]), folder / "run")
    assert 0.1 < done.result["success_after"] < 0.4
    assert done.result["success_before"] is None  # nothing that the policy did by itself was trained on
    return runs.newest(done.folder) / "policy"


def learn(start: Path, folder: Path, stages: list[dict[str, Any]], **changes: Any) -> runs.Done:
    changes = {"policy": {"kind": "pretrained", "path": str(start)}, "rewards": OUTCOME, **changes}
    return runs.run(runs.write(folder, stages, **changes), folder / "run")


@pytest.mark.parametrize("keep", ["solved", "best"])
def test_imitating_what_succeeded_raises_success(start: Path, tmp_path: Path, keep: str) -> None:
    done = learn(start, tmp_path, [ROUNDS | {"rejection_sampling": ROUNDS["rejection_sampling"] | {"keep": keep}}])
    assert done.result["success_before"] < 0.4 and done.result["success_after"] > 0.8, done.result
    assert done.result["interval_before"][1] < done.result["interval_after"][0]
    lines = [line for line in runs.log(done.folder) if "rollout/success" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["rollout/n_episodes"] for line in lines] == [256.0] * 3 == [done.result["n_episodes"] / 3] * 3
    assert lines[0]["rollout/success"] < lines[-1]["rollout/success"]
    # No more than two of a task, and of no task but those that were attempted.
    assert all(0 < line["supervised/n_demonstrations"] <= 2 * 32 for line in lines)
    assert all(0 < line["supervised/kept_tasks_share"] <= 1 for line in lines)
    assert {("0-supervised", n, "train") for n in (1, 2, 3)} <= set(runs.stored(done.folder))


def test_each_stage_starts_with_the_weights_of_the_one_before(tmp_path: Path) -> None:
    short = {"rounds": 1, "tasks_per_round": 8, "group_size": 4, "keep": "best"}
    stages = [
        START | {"epochs": 6},
        ROUNDS | {"epochs": 1, "rejection_sampling": short},
        ROUNDS | {"rejection_sampling": short},
    ]
    done = runs.run(runs.write(tmp_path, stages, evaluation={"n_tasks": 4}), tmp_path / "run")
    folder = done.folder / "checkpoints"
    starts = [folder / f"{i}-supervised-000000" for i in range(3)]
    ends = [folder / "1-supervised-000001", folder / "2-supervised-000001"]
    assert runs.weights(ends[0]) == runs.weights(starts[2])
    assert len({str(runs.weights(f)) for f in (*starts, ends[1])}) == 4
    assert done.result["success_before"] is not None


def test_a_stage_that_was_stopped_goes_on_with_its_round(start: Path, tmp_path: Path) -> None:
    rounds = ROUNDS | {"epochs": 1, "rejection_sampling": {"rounds": 3, "tasks_per_round": 4, "group_size": 4}}
    policy = {"kind": "pretrained", "path": str(start)}
    path = runs.write(tmp_path, [rounds, rounds], policy=policy, rewards=OUTCOME, evaluation={"n_tasks": 6})
    whole = runs.run(path, tmp_path / "whole")
    calls: list[int] = []
    with words.on_every_step(path, lambda: calls.append(1)):
        runs.run(path, tmp_path / "counted")
    third = len(calls) // 3
    assert resume.run_with_interruptions(path, tmp_path / "stopped", [third, third]) == 2
    assert resume.everything(tmp_path / "stopped") == resume.everything(whole.folder)
    assert max(runs.curve(whole.folder, "optimizer/n_updates")) == 3  # one update a round


# --- what is refused -------------------------------------------------------------------------------------------------


def test_attempts_of_which_none_succeeds_say_what_to_do(tmp_path: Path) -> None:
    few = {"rounds": 1, "tasks_per_round": 2, "group_size": 2}
    path = runs.write(tmp_path, [ROUNDS | {"rejection_sampling": few}], evaluation={"n_tasks": 2})
    with pytest.raises(TrainingError, match="no attempt qualifies for imitation") as caught:
        runs.run(path, tmp_path / "run")
    assert caught.value.where == "round 1 of 0-supervised" and caught.value.got.startswith("0 of 4 attempts solved")
    assert "keep: best" in caught.value.hint
    assert ("0-supervised", 1, "train") in runs.stored(tmp_path / "run")  # for whoever wants to know why


@pytest.mark.parametrize(
    ("stage", "changes", "says"),
    [
        ({"n_demonstrations": 9}, {}, ["stages[0].n_demonstrations", "stages[0].rejection_sampling takes the place"]),
        ({"random_share": 0.5}, {}, ["stages[0].random_share", "no effect"]),
        ({"rejection_sampling": {"rounds": 0}}, {}, ["stages[0].rejection_sampling.rounds"]),
        ({"rejection_sampling": {"keep": "solve"}}, {}, ["stages[0].rejection_sampling.keep", "solved"]),
        (
            {"rejection_sampling": {"max_per_tasks": 1}},
            {},
            ["stages[0].rejection_sampling.max_per_tasks", "did you mean 'max_per_task'"],
        ),
        ({"rejection_sampling": {"keep": "best", "group_size": 1}}, {}, ["keep: best", "group_size"]),
        (
            {"rejection_sampling": {"keep": "best"}},
            {"rewards": {"a": {"kind": "outcome", "weight": 0}}},
            ["rewards", "weight"],
        ),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(
    tmp_path: Path, stage: dict[str, Any], changes: dict[str, Any], says: list[str]
) -> None:
    path = runs.write(tmp_path, [ROUNDS | stage], **changes)
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert all(text in str(caught.value) for text in says), caught.value


def test_the_arithmetic_tells_the_most_that_can_be_imitated(tmp_path: Path) -> None:
    [stage] = arithmetic(load(runs.write(tmp_path, [ROUNDS])))["stages"]
    # 3 rounds of 32 x 8 episodes, of which 32 x 2 are kept: 4 epochs of 64 / 16 updates each.
    assert (stage["n_episodes"], stage["n_demonstrations"], stage["n_updates"]) == (768, 192, 48)


def test_an_environment_without_an_oracle_will_do(tmp_path: Path) -> None:
    path = runs.write(tmp_path, [ROUNDS])
    text = (tmp_path / "words.py").read_text()
    (tmp_path / "words.py").write_text(text.replace("def plan(", "def planned("))
    assert load(path).stages[0].rejection_sampling == Attempts(rounds=3, tasks_per_round=32, group_size=8)
