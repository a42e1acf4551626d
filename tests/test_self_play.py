"""Whole runs in which one policy has both seats of a game: rewards reach the seat that earned them, and it learns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf.cli import app
from rlhf.errors import RecipeError, RlhfError
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from rlhf.recipe.checks import cautions
from tests.combinations import ACTS
from tests.environments import heap
from tests.training import runs

SUPERVISED = {
    "kind": "supervised",
    "n_demonstrations": 256,
    "random_share": 0.1,
    "epochs": 14,
    "batch_size": 16,
    "optimizer": {"lr": 5.0e-3},
}
SELF_PLAY = {
    "kind": "policy_gradient",
    "steps": 14,
    "tasks_per_step": 2,
    "group_size": 32,
    "advantage": {"kind": "seats"},
    "optimizer": {"lr": 4.0e-3, "schedule": "linear", "min_lr_ratio": 0.2},
}


def write(folder: Path, stages: list[dict[str, Any]], **changes: Any) -> Path:
    settings = {
        "environment": {"kind": "./heap.py:Heap"},
        "agent": {"kind": "self_play", "player": {"system": "", "memory": {"kind": "window", "turns": 1}}},
        # What cannot be read is no move: who is about to lose must not get away with it.
        "rewards": {"won": {"kind": "environment"}, "invalid": {"kind": "invalid_action", "penalty": 1.0}},
        "limits": {"max_turns": 6, "max_tokens": 4},
    }
    path = runs.write(folder, stages, **(settings | changes))
    shutil.copy(heap.__file__, folder / "heap.py")
    return path


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was shown how games end: whoever can take the last does, and all else is left to chance."""
    folder = tmp_path_factory.mktemp("start")
    return runs.run(write(folder, [SUPERVISED]), folder / "run").folder


def learn(start: Path, folder: Path, **stage: Any) -> runs.Done:
    """Self-play from the policy of `start`."""
    policy = {"kind": "pretrained", "path": str(runs.newest(start) / "policy")}
    return runs.run(write(folder, [{**SELF_PLAY, **stage}], policy=policy), folder / "run")


def against_chance(folder: Path) -> float:
    """Share of games that the newest policy of a run wins against a player who moves at random."""
    given = ["evaluate", str(folder), "environment.opponent=chance", "--n", "128", "--json"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    return float(json.loads(done.stdout.splitlines()[-1])["success"])


@pytest.mark.slow
def test_self_play_learns_to_beat_chance(start: Path, tmp_path: Path) -> None:
    done = learn(start, tmp_path)
    # Both end a game where they can, so the first seat wins by the opening that leaves three, and loses by the other.
    assert done.result["success_before"] < 0.75 and done.result["success_after"] > 0.9
    # Two groups a step, and in each both seats are judged apart.
    assert runs.ever_above(done.folder, *ACTS["seats"]) and set(runs.curve(done.folder, "credit/n_seat_groups")) == {
        4.0
    }
    # The best play wins all games that it begins and three in four of the others against chance: 7/8.
    before, after = against_chance(start), against_chance(done.folder)
    assert before < 0.5 and after > 0.7, (before, after)
    for record in read_trajectories(done.folder / "trajectories", phase="train", steps=[1]):
        seats = [turn.action.notes["seat"] for turn in record.trajectory.turns]
        assert seats == [heap.SEATS[k % 2] for k in range(len(seats))]
        assert [g.role for g in record.trajectory.generations] == seats


def test_one_seat_alone_is_trained_where_trains_names_it(start: Path, tmp_path: Path) -> None:
    done = learn(start, tmp_path, steps=2, train_roles=["second"])
    n_trained = runs.curve(done.folder, "batch/n_policy_tokens")[-1]
    stored = read_trajectories(done.folder / "trajectories", phase="train", steps=[2])
    calls = [g for record in stored for g in record.trajectory.generations]
    assert (
        n_trained == sum(len(g.token_ids) for g in calls if g.role == "second") < sum(len(g.token_ids) for g in calls)
    )


def test_a_role_that_nobody_has_stops_the_run_and_names_those_there_are(start: Path, tmp_path: Path) -> None:
    with pytest.raises(RlhfError) as caught:
        learn(start, tmp_path, steps=1, train_roles=["third"])
    assert "'third'" in str(caught.value) and "'first'" in str(caught.value)


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("{kind: chat}", "this agent would play all seats of the game as one player"),
        ("{kind: self_play, systems: {frist: Begin.}}", r"no such seat(?s:.*)did you mean 'first'"),
    ],
)
def test_an_agent_that_does_not_fit_the_seats_is_refused(tmp_path: Path, agent: str, says: str) -> None:
    path = write(tmp_path, [SELF_PLAY])
    assert load(path).agent
    with pytest.raises(RecipeError, match=says):
        load(path, [f"agent={agent}"])


def test_no_seat_is_told_of_attempts_in_which_others_had_their_secrets(tmp_path: Path) -> None:
    path = write(tmp_path, [SELF_PLAY])
    retry = "stages.0.rollout={kind: retry, retries: 1}"
    with pytest.raises(RecipeError, match=r"stages\[0\].rollout.kind: a retry would show a seat"):
        load(path, [retry])
    assert load(path, [retry, "environment.opponent=chance", "stages.0.advantage={kind: grpo}"])
    ended = CliRunner().invoke(app, ["evaluate", str(path), "--strategy", "reflect_and_retry"])
    assert ended.exit_code == 2 and "would show a seat the private observations of other seats" in ended.stderr, (
        ended.stderr
    )
    assert "got:      reflect_and_retry in" in ended.stderr and "for the seats first, second" in ended.stderr


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"kind": "gigpo"}, "{kind: seats, inner: {kind: gigpo}}"),
        ({"kind": "ktae", "inner": {"kind": "grpo"}}, "{kind: seats, inner: {kind: ktae}}"),
        ({"kind": "seats", "inner": {"kind": "gigpo"}}, ""),
        ({"kind": "task_normalised", "inner": {"kind": "seats"}}, ""),
    ],
)
def test_an_estimator_that_tells_no_seats_apart_is_doubted(tmp_path: Path, stage: Any, says: str) -> None:
    path = write(tmp_path, [SELF_PLAY | {"advantage": stage}])
    said = [text for text in cautions(load(path)) if "does not separate seats" in text]
    assert len(said) == bool(says) and says in "".join(said)
    assert not cautions(load(path, ["environment.opponent=chance"]))  # which has no seats


def test_moves_of_older_versions_are_named_where_they_would_be_praised(tmp_path: Path) -> None:
    path = write(tmp_path, [SELF_PLAY | {"opponents": {"every": 2}, "advantage": {"kind": "gigpo"}}])
    assert any("an older version's among them" in text for text in cautions(load(path)))
