"""A stage that ends early: when, what it leaves, and that a resumed run ends where one that ran on does."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.errors import RecipeError
from rlhf.recipe import load
from rlhf.training.checkpoints.store import State
from rlhf.training.hooks.stopping import EarlyStop
from rlhf.training.run import Interrupted
from tests.training import runs, words

SUPERVISED = {"kind": "supervised", "n_demonstrations": 32, "epochs": 1, "optimizer": {"lr": 1.0e-3}}
#: Steps that change nothing that can be seen: no evaluation is better than the first.
STILL = {
    "kind": "policy_gradient",
    "steps": 9,
    "tasks_per_step": 2,
    "group_size": 2,
    "evaluate_every": 1,
    "checkpoint_every": 0,
    "patience": 2,
    "filters": {"drop_zero_advantage": False},
    "optimizer": {"lr": 1.0e-12},
}


def recipe(folder: Path, **changes: Any) -> Path:
    evaluation = {"n_tasks": 6, "validation_n_tasks": 8}
    return runs.write(folder, [SUPERVISED, STILL | changes], evaluation=evaluation)


def state_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs.newest(folder) / "state.json").read_text())
    return found


@pytest.mark.parametrize(
    ("n_since_best", "patience", "stalls"), [(2, 2, True), (3, 2, True), (1, 2, False), (0, 1, False), (9, None, False)]
)
def test_a_stage_stalls_after_evaluations_without_a_best_one(
    n_since_best: int, patience: int | None, stalls: bool
) -> None:
    best = "0-policy_gradient-000090"
    state = State(1, "policy_gradient", 6, False, 0, watched=6, n_since_best=n_since_best, best=best, best_low=0.5)
    said: list[str] = []
    run: Any = SimpleNamespace(state=state, checkpoints=Path("checkpoints"), progress=SimpleNamespace(say=said.append))
    assert EarlyStop(patience).ends_stage(run, run) is stalls
    assert bool(said) is stalls and all(f"checkpoints/{best}" in text for text in said)


def test_a_stage_ends_when_its_patience_does(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path), tmp_path / "run")
    state = state_of(done.folder)
    # the first evaluation is the best, two more are no better; the run is over and measured
    assert (state["step"], state["finished"], state["watched"]) == (3, True, 3)
    assert state["best"] == "1-policy_gradient-000001" and (done.folder / "checkpoints" / state["best"]).is_dir()
    assert done.result["success_after"] is not None
    assert "1-policy_gradient ends after step 3" in done.said and state["best"] in done.said
    whole = runs.run(recipe(tmp_path / "whole", patience=None), tmp_path / "whole" / "run")
    assert state_of(whole.folder)["step"] == 9


def test_a_later_stage_counts_its_own_evaluations(tmp_path: Path) -> None:
    path = runs.write(tmp_path, [SUPERVISED, STILL, STILL], evaluation={"n_tasks": 6, "validation_n_tasks": 8})
    state = state_of(runs.run(path, tmp_path / "run").folder)
    # the best is still that of the stage before: the first two of this one are no better
    assert (state["stage"], state["step"], state["best"]) == (2, 2, "1-policy_gradient-000001")


def test_a_resumed_run_ends_where_one_that_ran_on_does(tmp_path: Path) -> None:
    path, out = recipe(tmp_path), tmp_path / "cut"
    whole = runs.run(path, tmp_path / "whole")

    def press() -> None:
        """Ctrl-C in the second step, and again in the evaluation after the last one."""
        lines = runs.log(out) if (out / "metrics.jsonl").exists() else []
        n_steps = sum("rollout/success" in line for line in lines)
        if n_steps in presses:
            presses.remove(n_steps)
            signal.raise_signal(signal.SIGINT)

    presses = [1, 3]
    for is_again in (False, True):
        with words.on_every_step(path, press), pytest.raises((Interrupted, KeyboardInterrupt)):
            runs.run(path, out, resume=is_again)
    runs.run(path, out, resume=True)
    names = ("step", "best", "best_low", "watched", "n_since_best", "finished", "results")
    assert {n: state_of(out)[n] for n in names} == {n: state_of(whole.folder)[n] for n in names}
    assert runs.weights(runs.newest(out)) == runs.weights(runs.newest(whole.folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate_every": 0},
        {"patience": 8},
        {"evaluate_every": 3},
        {"advantage": {"kind": "gae"}, "critic": {"warmup_steps": 7}},
    ],
)
def test_a_patience_that_never_ends_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    evaluation = {"n_tasks": 6} if changes.get("evaluate_every") == 0 else {"n_tasks": 6, "validation_n_tasks": 8}
    path = runs.write(tmp_path, [SUPERVISED, STILL | changes], evaluation=evaluation)
    with pytest.raises(RecipeError, match="patience has no effect: there are too few evaluations") as caught:
        load(str(path))
    assert caught.value.where == "stages[1].patience"
