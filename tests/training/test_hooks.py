"""Hooks: when the loop calls them, what they may change, and what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.batching.samples import Sample
from rlhf.training import stage_components as parts
from rlhf.training.contrib.imitate_failed_tasks import FailedImitation
from rlhf.training.contrib.judge_refresh import JudgeRefreshHook
from rlhf.training.contrib.league import League
from rlhf.training.contrib.reference_reset import ReferenceResetHook
from rlhf.training.contrib.reward_memory import StatefulRewards
from rlhf.training.contrib.reward_refresh import RewardRefreshHook
from rlhf.training.critics.settings import CriticHook
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.hooks.collapse import CollapseHook
from rlhf.training.hooks.replay import ReplayBuffer
from rlhf.training.hooks.reward_monitor import RewardMonitorHook
from rlhf.training.hooks.stopping import EmptyStop
from tests.training import runs

STAGE: dict[str, Any] = {"kind": "policy_gradient", "steps": 3, "tasks_per_step": 2, "group_size": 2,
                         "checkpoint_every": 1, "filters": {"drop_zero_advantage": False}}  # fmt: skip


class Recorder(StageHook):
    """Notes each call, and counts finished steps."""

    key = "recorder"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.n = 0

    def open(self, run: Any, parts: Any) -> None:
        self.calls.append("open")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.n = state["n"]

    def ends_stage(self, run: Any, parts: Any) -> bool:
        self.calls.append("ends_stage")
        return False

    def loss_of(self, run: Any, loss: Any, number: int) -> Any:
        self.calls.append(f"loss_of {number}")
        return loss

    def before_step(self, run: Any, step: Step) -> None:
        self.calls.append(f"before {step.where}")

    @asynccontextmanager
    async def rollout(self, run: Any) -> AsyncIterator[None]:
        self.calls.append("rollout begins")
        yield
        self.calls.append("rollout ends")

    async def transform_groups(self, run: Any, step: Step, groups: Any) -> Any:
        self.calls.append(f"{len(groups)} groups")
        return groups

    def critic_values(self, step: Step) -> None:
        self.calls.append("expected")

    def transform_samples(self, parts: Any, step: Step, samples: Sequence[Sample]) -> Sequence[Sample]:
        self.calls.append(f"{len(samples)} samples")
        return samples

    def extend_samples(self, samples: Sequence[Sample], rng: Any) -> tuple[Sequence[Sample], dict[str, float]]:
        self.calls.append("fill")
        return samples, {"custom/filled": 1.0}

    async def after_update(self, run: Any, parts: Any, step: Step) -> None:
        assert step.values["custom/filled"] == 1.0
        self.calls.append("after_update")

    async def on_step_end(self, run: Any, parts: Any, step: Step) -> None:
        self.calls.append("on_step_end")
        self.n += 1
        step.metrics["custom/n"] = float(self.n)
        step.cautions["recorder"] = "caution: a word of the recorder"

    def on_evaluation(self, run: Any, success: float) -> None:
        self.calls.append("on_evaluation")

    async def between_steps(self, run: Any, parts: Any) -> None:
        self.calls.append(f"between after {run.state.step}")

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def on_stage_end(self, run: Any) -> None:
        self.calls.append("leave")


def run_with(patch: pytest.MonkeyPatch, hook: Callable[[], StageHook]) -> None:
    """Add a hook to those of every stage that begins."""
    own = parts.hooks_of
    patch.setattr(parts, "hooks_of", lambda *given: [*own(*given), hook()])


def test_hooks_are_called_in_the_order_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    run_with(monkeypatch, lambda: recorder)
    stage = {**STAGE, "steps": 2, "evaluate_every": 1}
    done = runs.run(runs.write(tmp_path, [stage], evaluation={"n_tasks": 4, "validation_n_tasks": 4}), tmp_path / "run")

    def of_step(number: int) -> list[str]:
        begin = ["ends_stage", f"loss_of {number}", f"before step {number + 1} of 0-policy_gradient"]
        sampled = ["rollout begins", "rollout ends", "2 groups", "expected", "4 samples", "fill"]
        return [*begin, *sampled, "after_update", "on_step_end"]

    between = ["on_evaluation", "between after 1"]  # after the last step there is no evaluation
    assert recorder.calls == [
        *["open", "between after 0"], *of_step(0), *between, *of_step(1), "between after 2", "leave",
    ]  # fmt: skip
    assert runs.curve(done.folder, "custom/n") == [1.0, 2.0]
    assert done.said.count("a word of the recorder") == 1, "a caution is told once in a run"


def test_a_checkpoint_keeps_the_state_of_a_hook_under_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, Recorder)
    path, out = runs.write(tmp_path, [STAGE]), tmp_path / "run"
    runs.stop(path, out, "0-policy_gradient-000001")
    kept = torch.load(runs.newest(out) / "trainer.pt", weights_only=True)["kept"]
    assert set(kept) == {"sampler", "monitor", "empty", "recorder"} and kept["recorder"]["n"] in (1, 2)
    done = runs.run(path, out, resume=True)
    assert runs.curve(done.folder, "custom/n") == [1.0, 2.0, 3.0]


def test_hooks_that_keep_something_have_the_keys_of_older_checkpoints() -> None:
    kept = (
        CollapseHook,
        EmptyStop,
        StatefulRewards,
        CriticHook,
        ReplayBuffer,
        ReferenceResetHook,
        FailedImitation,
        RewardMonitorHook,
        RewardRefreshHook,
        JudgeRefreshHook,
        League,
    )
    assert [hook.key for hook in kept] == ["monitor", "empty", "memories", "critic", "buffer", "reference", "hard",
                                           "watches", "refresher", "keeper", "league"]  # fmt: skip


class Ending(StageHook):
    """Ends the stage after its first step."""

    def ends_stage(self, run: Any, parts: Any) -> bool:
        return bool(run.state.step)


def test_a_hook_may_end_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, Ending)
    done = runs.run(runs.write(tmp_path, [STAGE]), tmp_path / "run")
    assert len(runs.curve(done.folder, "rollout/success")) == 1 and done.result["success_after"] is not None


class Emptying(StageHook):
    """Leaves nothing to train on."""

    def transform_samples(self, parts: Any, step: Step, samples: Sequence[Sample]) -> Sequence[Sample]:
        return []


def test_a_step_of_which_a_hook_leaves_no_rows_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, Emptying)
    done = runs.run(runs.write(tmp_path, [STAGE]), tmp_path / "run")
    assert runs.curve(done.folder, "batch/n_trained_trajectories") == [0.0] * 3
    assert runs.weights(runs.newest(done.folder)) == runs.weights(
        done.folder / "checkpoints" / "0-policy_gradient-000000"
    )


class Waiting(StageHook):
    """Keeps the policy as it is in the first step, as a critic does that warms up."""

    def before_step(self, run: Any, step: Step) -> None:
        step.trains_policy = step.number > 0


def test_a_step_that_does_not_train_the_policy_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, Waiting)
    done = runs.run(runs.write(tmp_path, [STAGE]), tmp_path / "run")
    assert runs.curve(done.folder, "batch/n_trained_trajectories") == [0.0, 4.0, 4.0]
    assert runs.curve(done.folder, "sampling/n_empty_steps") == [0.0, 0.0], "the first step is not counted"
