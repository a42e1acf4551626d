"""A KL coefficient that adapts: what a run logs follows the formula, and each stage begins anew."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlhf.losses.ppo_clip import PPOClip
from rlhf.training.hooks.base import Step
from rlhf.training.hooks.kl_controller import AdaptiveKL
from rlhf.training.stages.policy_gradient import PolicyGradient
from tests.training import runs

LOSS = {"kind": "ppo_clip", "kl": "k3", "kl_coef": 0.1, "kl_target": 0.2, "kl_horizon": 20}
SUPERVISED = {"kind": "supervised", "n_demonstrations": 64, "random_share": 0.7, "epochs": 8, "batch_size": 16,
              "optimizer": {"lr": 5.0e-3}}  # fmt: skip
STAGE: dict[str, Any] = {"kind": "policy_gradient", "steps": 4, "tasks_per_step": 3, "group_size": 4, "epochs": 2,
                         "filters": {"drop_zero_advantage": False}, "optimizer": {"lr": 1.0e-2}}  # fmt: skip


def test_each_step_leaves_the_next_its_coefficient(tmp_path: Path) -> None:
    path = runs.write(tmp_path, [SUPERVISED, {**STAGE, "loss": LOSS}, {**STAGE, "loss": LOSS, "steps": 1}])
    done = runs.run(path, tmp_path / "run")
    found, divergences = runs.curve(done.folder, "loss/kl_coef"), runs.curve(done.folder, "loss/kl_ref")
    assert len(found) == len(divergences) == 5
    expected, coefficient = [], 0.1
    for i, divergence in enumerate(divergences):
        coefficient = 0.1 if i == 4 else coefficient  # the second stage begins with what its recipe says
        coefficient *= 1 + min(max(divergence / 0.2 - 1, -0.2), 0.2) * 12 / 20  # 12 trajectories of a horizon of 20
        expected.append(coefficient)
    assert found == pytest.approx(expected, rel=1e-12)
    assert min(divergences) < 0.2 < max(divergences), "both directions occur"
    # What is used is what was logged: total = policy + β · divergence, in the first step by the recipe's β.
    first, second = [line for line in runs.log(done.folder) if "loss/total" in line][:2]
    for line, beta in ((first, 0.1), (second, found[0])):
        assert line["loss/total"] - line["loss/policy"] == pytest.approx(beta * line["loss/kl_ref"], rel=1e-3)
    assert json.loads((runs.newest(done.folder) / "state.json").read_text())["kl_coef"] == found[4]


def test_a_step_without_an_update_leaves_the_coefficient() -> None:
    stage = PolicyGradient(loss=PPOClip(kl="k3", kl_coef=0.1, kl_target=0.01))
    hook = AdaptiveKL.of(stage.loss)
    assert hook is not None and AdaptiveKL.of(PolicyGradient().loss) is None
    run: Any = SimpleNamespace(state=SimpleNamespace(kl_coef=None))
    assert hook.loss_of(run, stage.loss, 1) is stage.loss
    run.state.kl_coef = 0.3
    now = replace(stage, loss=hook.loss_of(run, stage.loss, 1))
    step = Step(1, "step 2", now, np.random.default_rng(0))
    asyncio.run(hook.on_step_end(run, run, step))
    assert step.state == {"kl_coef": 0.3} and step.metrics == {"loss/kl_coef": 0.3}


def test_replayed_and_logged_trajectories_count() -> None:
    stage = PolicyGradient(loss=PPOClip(kl="k3", kl_coef=0.1, kl_target=0.2, kl_horizon=20))
    hook, run = AdaptiveKL.of(stage.loss), cast(Any, SimpleNamespace())
    step = Step(1, "step 2", stage, np.random.default_rng(0))  # whose own samples are none
    step.values.update({"loss/kl_ref": 100.0, "batch/n_trained_trajectories": 12.0})
    assert hook is not None
    asyncio.run(hook.on_step_end(run, run, step))
    assert step.state["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 12 / 20))
