"""SIGKILL at random moments, those of writing included: what is resumed ends as what was never killed, to the bit."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_resume import POLICY_GRADIENT, SHORT, SUPERVISED, assert_equal
from tests.tiers import tiered
from tests.training import children, runs
from tests.training.test_archer_runs import CRITIC as ARCHER

#: How often a run is killed: once in writing and once at any moment, or at length.
KILLS = (2, pytest.param(10, marks=pytest.mark.extended))

#: What each kind of stage has besides; whatever keeps state of its own belongs here.
STAGES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": {"kind": "grpo"}},
    "grpo-in-background": {"advantage": {"kind": "grpo"}, "checkpoint_in_background": True},
    "archer-in-background": {"advantage": {"kind": "archer"}, "critic": ARCHER, "checkpoint_in_background": True},
    "ppo": {"advantage": {"kind": "gae"}, "critic": {"optimizer": {"lr": 1.0e-2, "schedule": "linear"}}},
}


def recipe(folder: Path, name: str) -> Path:
    """Two stages; a run of a second or two, with a checkpoint after every step."""
    return runs.write(
        folder,
        [SUPERVISED, {**POLICY_GRADIENT, "steps": 8, **STAGES[name]}],
        policy=runs.BASE["policy"] | {"hidden_size": 16},
        evaluation={"n_tasks": 6, "validation_n_tasks": 4},
        rewards={**runs.BASE["rewards"], "short": SHORT},
    )


def moments(name: str) -> Iterator[dict[str, Any]]:
    """When to kill: in turn while a checkpoint is written, and so many seconds after a run has begun."""
    draw = random.Random(name)
    while True:
        yield {"kill_at": draw.randrange(1, 40), "within": "checkpoints/."}
        yield {"kill_after_s": draw.uniform(0.05, 1.0)}


@pytest.mark.parametrize("name", tiered(STAGES, "grpo"))
@pytest.mark.parametrize("n_kills", KILLS)
def test_killed_many_times_a_run_equals_an_uninterrupted_one(tmp_path: Path, name: str, n_kills: int) -> None:
    path, out = recipe(tmp_path, name), tmp_path / "killed" / "run"
    whole = children.run(tmp_path, "train", path, "--out", tmp_path / "run")
    assert whole.code == 0, whole.err
    out.parent.mkdir()
    drawn, n_killed = moments(name), 0
    while n_killed < n_kills or not (out / "result.json").is_file():
        if (out / "result.json").is_file():  # it came to its end before it was killed often enough
            assert_equal(out, tmp_path / "run")
            shutil.rmtree(out)
        begun = (out / "recipe.yaml").is_file()
        if not begun:
            shutil.rmtree(out, ignore_errors=True)
        how = ["--resume", out] if begun else [path, "--out", out]
        ended = children.run(out.parent, "train", *how, **(next(drawn) if n_killed < n_kills else {}))
        assert ended.code in (0, -signal.SIGKILL) and "Traceback" not in ended.err, ended.err
        n_killed += ended.code != 0
    assert_equal(out, tmp_path / "run")
