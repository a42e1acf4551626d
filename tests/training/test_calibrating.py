"""Calibrated trajectories: which step was bad, what is put in its place, and that a stage imitates it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data import Action, Outcome, Score, ScoredGroup, Trajectory, Turn
from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.rollout.limits import Limits
from rlhf.training.contrib.calibrated_trajectories import calibrated, first_bad_step
from tests.training import runs, words
from tests.training.test_attempts import ROUNDS, START

WORLD = words.Words(n_turns=4)


def test_the_first_bad_step_is_the_one_that_is_no_nearer() -> None:
    assert first_bad_step([5, 4, 4, 3]) == 1 and first_bad_step([3, 2, None]) == 1
    assert first_bad_step([3, 4]) == 0 and first_bad_step([3, 2, 1]) is None
    assert first_bad_step([None, 3]) is None and first_bad_step([4]) is None and first_bad_step([]) is None


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8))
def test_all_steps_before_it_came_nearer(left: list[int]) -> None:
    bad = first_bad_step(left)
    until = len(left) - 1 if bad is None else bad
    assert all(left[k + 1] < left[k] for k in range(until))
    assert bad is None or left[bad + 1] >= left[bad]


def tried(number: int, task: int, said: Sequence[str], solved: bool = False) -> Trajectory:
    turns = tuple(Turn(Action(text, error=None if text else "say a word"), "...") for text in said)
    return Trajectory(f"words/{task}", number, "", turns, Outcome.SOLVED if solved else Outcome.FAILED)


def corrected(*attempts: Trajectory, kept: Sequence[Trajectory] = (), max_per_task: int = 2) -> list[list[str]]:
    """What is done in each correction."""
    by_task: dict[str, list[Trajectory]] = {}
    for t in attempts:
        by_task.setdefault(t.task_id, []).append(t)
    groups = [
        ScoredGroup(task, tuple(found), tuple(Score({}, (0.0,) * len(t.turns), 0.0) for t in found))
        for task, found in by_task.items()
    ]
    tasks = {task.id: task for task in WORLD.tasks("train")}
    found = asyncio.run(calibrated(WORLD, tasks, groups, kept, Limits(max_turns=8), max_per_task=max_per_task))
    assert all(d.trajectory.solved for d in found)
    return [[turn.action.text for turn in d.trajectory.turns] for d in found]


def test_own_actions_stand_and_the_oracle_goes_on_from_the_bad_one() -> None:
    right = WORLD.words(3)
    wrong = next(w for w in words.WORDS if w != right[2])
    # Two right words and a wrong one, which ends the episode; a reply that could not be read is nobody's step.
    assert corrected(tried(0, 3, [right[0], "", right[1], wrong])) == [right]
    # Attempts that begin alike have one correction; solved ones have none, and one that only ran out of turns neither.
    same = [tried(i, 3, [right[0], right[1], wrong]) for i in range(2)]
    assert corrected(*same, tried(2, 3, right, solved=True), tried(3, 3, right[:2])) == [right]
    # There is room for max_per_task of a task, kept attempts among them, and each task has its own.
    early = tried(4, 3, [next(w for w in words.WORDS if w != right[0])])
    assert len(corrected(same[0], early)) == 2 and len(corrected(same[0], early, max_per_task=1)) == 1
    assert corrected(same[0], kept=[tried(9, 3, right, solved=True)], max_per_task=1) == []


def test_what_could_not_be_corrected_is_refused(tmp_path: Path) -> None:
    stage = ROUNDS | {"rejection_sampling": {"calibrate": True}}
    assert load(runs.write(tmp_path / "with", [stage])).stages[0].rejection_sampling.calibrate
    path = runs.write(tmp_path / "without", [stage])
    without = path.with_name("words.py")
    without.write_text(without.read_text().replace("def plan(", "def planned("))
    with pytest.raises(RecipeError, match="attempts at these tasks cannot get oracle corrections"):
        load(path)


def test_a_stage_imitates_corrections(tmp_path: Path) -> None:
    short = ROUNDS | {
        "epochs": 1,
        "rejection_sampling": {"rounds": 2, "tasks_per_round": 6, "group_size": 2, "calibrate": True},
    }
    done = runs.run(runs.write(tmp_path, [START | {"epochs": 2, "n_demonstrations": 32}, short]), tmp_path / "run")
    logged = [line for line in runs.log(done.folder) if "supervised/n_calibrated" in line]
    assert len(logged) == 2 and sum(v["supervised/n_calibrated"] for v in logged) > 0
    for values in logged:
        assert values["supervised/n_demonstrations"] >= values["supervised/n_calibrated"]
        assert values["supervised/kept_tasks_share"] > 0.5, "most tasks have an attempt or a correction"
