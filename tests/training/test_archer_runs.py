"""Whole runs of ArCHer: resumed to the bit with buffer and slow copy, and warmed up with the policy left alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_resume import LORA, POLICY_GRADIENT, assert_equal, run_with_interruptions
from tests.tiers import tiered
from tests.training import runs, words
from tests.training.critics import StepCounter, recipe

CRITIC = {
    "kind": "archer", "updates_per_step": 3, "batch_size": 4, "capacity": 40,
    "optimizer": {"lr": 1.0e-2, "schedule": "linear"},
}  # fmt: skip


#: Critic and adapters of the policy. Adapters drop out at random, in the critic's updates too.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "own": ({"warmup_steps": 1}, None),
    "own-lora": ({"lora": LORA, "head_lr": 0.05}, None),
    "policy-head": ({"backbone": "policy"}, LORA),
}


@pytest.mark.parametrize("name", tiered(CASES, "own"))
def test_a_stopped_run_equals_one_that_was_not(tmp_path: Path, name: str) -> None:
    critic, lora = CASES[name]
    path = recipe(tmp_path, "archer", CRITIC | critic, lora)
    with words.on_every_step(path, counter := StepCounter()):
        runs.run(path, tmp_path / "whole")
    draw = random.Random(name)
    at = [draw.randrange(1, counter.n_steps // 2) for _ in range(4)]
    assert run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    assert_equal(tmp_path / "stopped", tmp_path / "whole")
    steps = int(POLICY_GRADIENT["steps"])  # type: ignore[call-overload]
    assert runs.curve(tmp_path / "whole", "critic/n_updates") == [3.0 * (i + 1) for i in range(steps)]
    stored = runs.curve(tmp_path / "whole", "critic/n_stored")
    assert len(set(stored)) > 1 and max(stored) <= 40  # more came than it holds
    whole, stopped = (
        torch.load(runs.newest(tmp_path / run) / "trainer.pt", weights_only=True)["kept"]["critic"]
        for run in ("whole", "stopped")
    )
    for name in ("model", "copy"):  # a finished run can be given more steps, for which it keeps the critic
        torch.testing.assert_close(whole[name], stopped[name], rtol=0, atol=0)


def test_a_warm_up_leaves_the_policys_bits_unchanged(tmp_path: Path) -> None:
    done = runs.run(recipe(tmp_path, "archer", CRITIC | {"warmup_steps": 3}, steps=4), tmp_path / "run")
    start, third = (runs.weights(done.folder / "checkpoints" / f"1-policy_gradient-{n:06d}") for n in (0, 3))
    assert third == start and runs.weights(runs.newest(done.folder)) != start
    assert runs.curve(done.folder, "optimizer/n_updates") == [0.0, 0.0, 0.0, 2.0]
    assert runs.curve(done.folder, "critic/n_updates") == [3.0, 6.0, 9.0, 12.0]
    state = torch.load(
        done.folder / "checkpoints" / "1-policy_gradient-000003" / "trainer.pt", weights_only=True
    )["kept"]["critic"]  # fmt: skip
    assert state["model"].keys() == state["copy"].keys()
    assert state["model"]["head.q1.2.weight"].any() and state["copy"]["head.q1.2.weight"].any()
    assert not torch.equal(state["model"]["head.q1.2.weight"], state["copy"]["head.q1.2.weight"])
    assert 0 < state["buffer"]["rewards"].numel() <= 40
