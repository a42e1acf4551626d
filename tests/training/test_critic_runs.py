"""Whole runs with a critic: it is resumed to the bit, warms up alone, and learns from what the policy does not."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf.data import Task
from rlhf.errors import ModelError, RecipeError
from rlhf.recipe import load
from rlhf.training.contrib.critics.sweet import SweetCritic
from rlhf.training.critics.value_model import check_contexts
from rlhf.training.critics.values import Critic
from tests import commands
from tests.test_resume import LORA, POLICY_GRADIENT, assert_equal, run_with_interruptions
from tests.training import runs, tiny, words
from tests.training.critics import StepCounter, recipe

RATE = {"optimizer": {"lr": 1.0e-2, "schedule": "linear"}}


def test_a_critic_with_a_shorter_context_than_the_policys_rows_is_refused_before_training(tmp_path: Path) -> None:
    tiny.policy(max_context=64).save(tmp_path / "short")
    path = recipe(tmp_path, "gae", {"path": str(tmp_path / "short")})  # the policy's is 128
    with pytest.raises(ModelError, match="longer than the model supports") as refused:
        runs.run(path, tmp_path / "run")
    assert refused.value.where.startswith("stages[1].critic.path") and refused.value.got == "128"
    critics = {"stages[1].critic": (Critic(path=str(tmp_path / "short")), tuple), "stages[2].critic": (Critic(), tuple)}
    check_contexts(critics, tiny.policy().tokenizer, 64)


def test_privileged_text_counts_towards_the_context_of_a_critic(tmp_path: Path) -> None:
    made = tiny.policy(max_context=64)
    made.save(tmp_path / "short")
    tasks = [Task("a", reference="x"), Task("b", reference="x y z")]
    critic = SweetCritic(path=str(tmp_path / "short"), privileged_text="{reference}")
    n = max(len(made.tokenizer.encode(text, add_special_tokens=False)) for text in ("x", "x y z"))
    assert n > 1
    check_contexts({"stages[1].critic": (critic, lambda: tasks)}, made.tokenizer, 64 - n)
    with pytest.raises(ModelError, match="longer than the model supports") as refused:
        check_contexts({"stages[1].critic": (critic, lambda: tasks)}, made.tokenizer, 65 - n)
    assert refused.value.got == "65" and f"with {n} tokens of privileged_text before" in refused.value.where
    check_contexts({"stages[1].critic": (replace(critic, privileged_text=""), lambda: tasks)}, made.tokenizer, 64)


def test_a_critic_and_a_teacher_may_be_the_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loss, critic = {"kind": "kdrl", "teacher": "base"}, {"path": "base", "lora": LORA}
    stage = {**POLICY_GRADIENT, "steps": 1, "advantage": {"kind": "gae"}, "loss": loss, "critic": critic}
    stage["filters"] = {"drop_zero_advantage": False}
    policy = {"kind": "pretrained", "path": "base", "lora": LORA}
    path = runs.write(tmp_path, [stage], policy=policy, evaluation={"n_tasks": 1})
    done = commands.run("train", path, "--out", "run")
    assert done.exit_code == 0, done.stderr
    assert runs.curve(tmp_path / "run", "critic/n_updates") == [2.0]
    assert runs.curve(tmp_path / "run", "loss/kl_teacher") == [pytest.approx(0.0, abs=1e-9)]


#: Critic, adapters of the policy, advantage. Adapters drop out at random, in the critic's updates too.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "own": ({}, None, "gae"),
    "own-lora": ({"lora": LORA, "head_lr": 0.1}, None, "turn_gae"),
    "own-of-lora": ({"warmup_steps": 2}, LORA, "bilevel_gae"),
    "policy-head": ({"backbone": "policy", "warmup_steps": 1}, None, "turn_gae"),
    "policy-backbone": ({"backbone": "policy", "gradient": "backbone"}, LORA, "gae"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_with_a_critic_equals_one_that_was_not(tmp_path: Path, name: str) -> None:
    critic, lora, advantage = CASES[name]
    path = recipe(tmp_path, advantage, RATE | critic, lora)
    with words.on_every_step(path, counter := StepCounter()):
        runs.run(path, tmp_path / "whole")
    draw = random.Random(name)
    at = [draw.randrange(1, counter.n_steps // 2) for _ in range(6)]
    assert run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    assert_equal(tmp_path / "stopped", tmp_path / "whole")
    losses = runs.curve(tmp_path / "whole", "critic/loss")
    assert len(losses) == 5 and len(set(losses)) == 5
    updates = 2.0 * POLICY_GRADIENT["steps"]  # type: ignore[operator]
    assert runs.curve(tmp_path / "whole", "critic/n_updates")[-1] == updates


def kept_critic(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds of the critic."""
    found: dict[str, Any] = torch.load(checkpoint / "trainer.pt", weights_only=True)["kept"]["critic"]
    return found


@pytest.mark.parametrize("critic", [{}, {"backbone": "policy", "gradient": "backbone"}], ids=["own", "policy"])
def test_a_warm_up_leaves_the_policys_bits_unchanged(tmp_path: Path, critic: dict[str, Any]) -> None:
    path = recipe(tmp_path, "turn_gae", RATE | critic | {"warmup_steps": 3}, steps=4)
    done = runs.run(path, tmp_path / "run")
    checkpoints = done.folder / "checkpoints"
    assert runs.weights(checkpoints / "1-policy_gradient-000003") == runs.weights(
        checkpoints / "1-policy_gradient-000000"
    )
    assert runs.weights(runs.newest(done.folder)) != runs.weights(checkpoints / "1-policy_gradient-000003")
    assert runs.curve(done.folder, "optimizer/n_updates") == [0.0, 0.0, 0.0, 2.0]
    assert runs.curve(done.folder, "critic/n_updates") == [2.0, 4.0, 6.0, 8.0]
    assert kept_critic(checkpoints / "1-policy_gradient-000003")["model"]["head.weight"].any()


def test_a_critic_moves_the_policys_backbone_in_a_step_without_rows_of_the_policy(tmp_path: Path) -> None:
    # As in the next test no group is left of the first step; the critic's updates are a new version all the same.
    path = recipe(tmp_path, "gae", RATE | {"backbone": "policy", "gradient": "backbone"}, steps=2)
    same = yaml.safe_load(path.read_text()) | {"rewards": {"same": {"kind": "outcome", "failure": 1.0}}}
    path.write_text(yaml.safe_dump(same))
    done = runs.run(path, tmp_path / "run")
    checkpoints = done.folder / "checkpoints"
    assert runs.curve(done.folder, "optimizer/n_updates")[0] == 0.0
    before, after = (runs.weights(checkpoints / f"1-policy_gradient-00000{n}") for n in (0, 1))
    assert before != after


def test_patience_does_not_count_while_the_critic_learns_alone(tmp_path: Path) -> None:
    critic, patience = RATE | {"warmup_steps": 4}, {"steps": 7, "evaluate_every": 1, "patience": 2}
    done = runs.run(recipe(tmp_path, "gae", critic, **patience), tmp_path / "run")
    assert runs.curve(done.folder, "optimizer/n_updates") == [0.0, 0.0, 0.0, 0.0, 2.0, 4.0]


@pytest.mark.parametrize(("steps", "every", "counts"), [(7, 1, True), (6, 1, False), (15, 5, False), (16, 5, True)])
def test_evaluations_of_the_warm_up_are_the_best_so_far_for_patience(
    tmp_path: Path, steps: int, every: int, counts: bool
) -> None:
    # Of 7 steps, those after 5 and 6 may be no better than the one after 4. Those after 5, 10 and 15 have none before.
    path = recipe(tmp_path, "gae", RATE | {"warmup_steps": 4}, steps=steps, evaluate_every=every, patience=2)
    with nullcontext() if counts else pytest.raises(RecipeError, match="patience has no effect"):
        load(str(path))


def test_the_critic_learns_from_groups_that_say_nothing_to_the_policy(tmp_path: Path) -> None:
    # Every attempt scores 1 and every value is 0 at first: all advantages of the first step are equal, so they are
    # whitened to 0 and every group is left out of the policy's update. The critic learns to expect 1.
    path = recipe(tmp_path, "gae", {"optimizer": {"lr": 3.0e-2}}, steps=12)
    same = yaml.safe_load(path.read_text()) | {"rewards": {"same": {"kind": "outcome", "failure": 1.0}}}
    path.write_text(yaml.safe_dump(same))
    done = runs.run(path, tmp_path / "run")
    assert runs.curve(done.folder, "batch/n_dropped_groups")[0] == 3.0
    assert runs.curve(done.folder, "optimizer/n_updates")[0] == 0.0
    values = runs.curve(done.folder, "critic/value_mean")
    assert values[0] == 0.0 and values[-1] == pytest.approx(1.0, abs=0.15), values
    assert runs.curve(done.folder, "critic/loss")[-1] < 0.05
