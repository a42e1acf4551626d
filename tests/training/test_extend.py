"""A finished run that is given more steps: to the bit the run that had them from its begin, or a word about why not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import CheckpointError, RecipeError
from rlhf.recipe import load
from tests.commands import run as command
from tests.test_resume import LOSS, POLICY_GRADIENT, SHORT, SUPERVISED, everything
from tests.training import runs

CONSTANT = {"lr": 3.0e-3, "schedule": "constant"}
STAGES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": {"kind": "grpo"}},
    "kl": {"advantage": {"kind": "gigpo"}, "loss": LOSS["gigpo"]},
    "critic": {"advantage": {"kind": "gae"}, "critic": {"optimizer": {"lr": 1.0e-2, "schedule": "constant"}}},
    "background": {"checkpoint_in_background": True, "checkpoint_every": 3},
}


def recipe(folder: Path, steps: int, **changes: Any) -> Path:
    """Two stages, the last with a constant learning rate."""
    stage = {**POLICY_GRADIENT, "steps": steps, "optimizer": CONSTANT, **changes}
    return runs.write(
        folder,
        [SUPERVISED, stage],
        policy=runs.BASE["policy"] | {"hidden_size": 16},
        evaluation={"n_tasks": 6, "watch_n_tasks": 4},
        rewards={**runs.BASE["rewards"], "short": SHORT},
    )


def resume(run: Path, *words: str) -> Any:
    """`rlhf train --resume`, in this process."""
    return command("train", "--resume", run, *words)


@pytest.mark.parametrize("name", STAGES)
def test_a_finished_run_with_more_steps_equals_one_that_had_them(tmp_path: Path, name: str) -> None:
    runs.run(recipe(tmp_path, 7, **STAGES[name]), tmp_path / "whole")
    run = tmp_path / "run"
    runs.run(recipe(tmp_path, 2, **STAGES[name]), run)
    first = (run / "result.json").read_text()
    for steps, key in (("4", "steps"), ("7", "stages.1.steps")):  # after the 2nd and the 4th an evaluation was due
        ended = resume(run, f"{key}={steps}")
        assert ended.exit_code == 0, ended.stderr
        assert f"has {steps} steps from now on" in ended.stderr and "caution: the constant" not in ended.stderr
        assert load(run).stages[1].steps == int(steps)
    assert everything(run) == everything(tmp_path / "whole")
    assert (run / "after-000002" / "result.json").read_text() == first
    assert (run / "after-000004" / "after-eval-000004.parquet").is_file()
    assert "this run is finished" in resume(run).stderr


def test_where_the_rate_falls_over_the_stage_it_is_said(tmp_path: Path) -> None:
    linear = {"lr": 3.0e-3, "schedule": "linear"}
    runs.run(recipe(tmp_path, 2, optimizer=linear), tmp_path / "run")
    said = " ".join(resume(tmp_path / "run", "steps=4").stderr.split())
    assert re.search(
        r"linear schedule of optimizer falls over 4 steps instead of 2, which was to be \S+ now and is", said
    )
    assert "not the one that 4 steps would have made" in said


def test_a_run_that_was_stopped_is_extended_too(tmp_path: Path) -> None:
    runs.run(recipe(tmp_path, 4), tmp_path / "whole")
    run = tmp_path / "run"
    runs.run(recipe(tmp_path, 3), run)
    for path in (run / "checkpoints").glob("1-policy_gradient-00000[23]"):
        path.rename(path.with_name(path.name + ".damaged"))  # as if it had been stopped after the first step
    (run / "checkpoints" / "1-policy_gradient-000002.damaged").rename(run / "checkpoints" / "1-policy_gradient-000002")
    assert resume(run, "steps=4").exit_code == 0
    assert everything(run)["weights"] == everything(tmp_path / "whole")["weights"]


def test_what_cannot_be_extended_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    runs.run(recipe(tmp_path, 2), run)
    shorter = resume(run, "steps=1")
    assert shorter.exit_code == 2 and "can be extended, but not shortened" in shorter.stderr
    other = resume(run, "steps=3", "stages.1.group_size=8")
    assert other.exit_code == 2 and "stages.1.group_size" in other.stderr
    assert load(run).stages[1].steps == 2

    newest = runs.newest(run)  # as earlier versions left it
    state = json.loads((newest / "state.json").read_text())
    del state["of_steps"]
    (newest / "files.json").unlink()
    (newest / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="cannot be extended"):
        runs.run(recipe(tmp_path, 3), run, resume=True)
    assert load(run).stages[1].steps == 2, "nothing was changed"


def test_a_run_that_ended_by_patience_is_not_extended(tmp_path: Path) -> None:
    patient = {"evaluate_every": 1, "patience": 1, "optimizer": {"lr": 1.0e-9}}
    done = runs.run(recipe(tmp_path, 5, **patient), tmp_path / "run")
    assert "no better evaluation" in done.said
    with pytest.raises(RecipeError, match="stopped by the patience"):
        runs.run(recipe(tmp_path, 6, **patient), tmp_path / "run", resume=True)
