"""A run that was stopped and resumed equals one that was not, to the last bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.evaluation.store import read_trajectories
from rlhf.tasks.shuffled import ShuffledTasks
from rlhf.training import loop
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.run import Interrupted, Run
from rlhf.training.update import update
from tests.training import children, runs, words

LORA = {"rank": 2, "dropout": 0.2}
SUPERVISED = {"kind": "supervised", "n_demonstrations": 12, "random_share": 0.5, "epochs": 2, "batch_size": 4}
POLICY_GRADIENT = {
    "kind": "policy_gradient",
    "steps": 5,
    "tasks_per_step": 3,
    "group_size": 4,
    "minibatches": 2,
    "evaluate_every": 2,
    "checkpoint_every": 1,
    "optimizer": {"lr": 3.0e-3, "schedule": "linear"},
}

#: A score that differs between attempts of a policy that knows nothing yet, so that every step has updates.
SHORT = {"kind": "overlong", "max_tokens": 6, "buffer": 5}

#: With a reference, which a resumed run takes from the checkpoint of its stage's begin, and a coefficient that moves.
LOSS = {
    "grpo": {"kind": "ppo_clip"},
    "gigpo": {"kind": "ppo_clip", "kl": "k3", "kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 30},
}


def recipe(folder: Path, advantage: str, lora: dict[str, Any] | None, **changes: Any) -> Path:
    """Two stages; a run of a second."""
    policy = runs.BASE["policy"] | {"hidden_size": 16} | ({"lora": lora} if lora else {})
    stages = [SUPERVISED, {**POLICY_GRADIENT, "advantage": {"kind": advantage}, "loss": LOSS[advantage]}]
    stages = changes.pop("stages", stages)
    evaluation = {"n_tasks": 6, "validation_n_tasks": 4}
    rewards = {**runs.BASE["rewards"], "short": SHORT}
    return runs.write(folder, stages, **{"policy": policy, "evaluation": evaluation, "rewards": rewards, **changes})


def everything(run: Path) -> dict[str, Any]:
    """All that a finished run left, but for what the clock says."""
    records = [
        replace(r, trajectory=replace(r.trajectory, duration_s=0.0)) for r in read_trajectories(run / "trajectories")
    ]
    state = json.loads((runs.newest(run) / "state.json").read_text())
    return {
        "weights": runs.weights(runs.newest(run)),
        "log": runs.lines(run),
        "result": json.loads((run / "result.json").read_text()),
        "files": runs.stored(run),
        "trajectories": records,
        "state": {k: v for k, v in state.items() if k != "train_s"},
    }


def assert_equal(found: Path, expected: Path) -> None:
    for (name, got), wanted in zip(everything(found).items(), everything(expected).values(), strict=True):
        assert got == wanted, name
    assert {s for s, _, _ in runs.stored(found)} >= {"before", "1-policy_gradient", "after"}
    assert max(runs.curve(expected, "optimizer/n_updates")) > 0, "nothing was trained, so there was nothing to differ"


COMBINATIONS = pytest.mark.parametrize(
    ("advantage", "lora"),
    [
        pytest.param("grpo", None, id="grpo-full"),
        pytest.param("gigpo", LORA, id="gigpo-lora"),
        pytest.param("gigpo", None, id="gigpo-full", marks=pytest.mark.extended),
        pytest.param("grpo", LORA, id="grpo-lora", marks=pytest.mark.extended),
    ],
)


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


class PressAt:
    """Presses Ctrl-C in the n-th step of an environment from now on."""

    def __init__(self, n: int) -> None:
        self.n, self.n_steps = n, 0

    def __call__(self) -> None:
        self.n_steps += 1
        if self.n_steps == self.n:
            signal.raise_signal(signal.SIGINT)


def run_with_interruptions(path: Path, out: Path, at: list[int]) -> int:
    """Run, press Ctrl-C at these steps of the processes one after the other, resume; returns how often it was heard."""
    for n_heard, n in enumerate(at):
        with words.on_every_step(path, PressAt(n)):
            try:
                runs.run(path, out, resume=out.exists())
            except (Interrupted, KeyboardInterrupt):
                continue
        return n_heard
    runs.run(path, out, resume=out.exists())
    return len(at)


@COMBINATIONS
def test_ctrl_c_and_resume_equal_an_uninterrupted_run(
    tmp_path: Path, advantage: str, lora: dict[str, Any] | None
) -> None:
    path = recipe(tmp_path, advantage, lora)
    with words.on_every_step(path, counter := PressAt(-1)):
        runs.run(path, tmp_path / "whole")
    # About four presses per run: in demonstrations, in any of the evaluations, in any step.
    draw = random.Random(f"{advantage} {lora}")
    at = [draw.randrange(1, counter.n_steps // 2) for _ in range(6)]
    assert run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    assert_equal(tmp_path / "stopped", tmp_path / "whole")


def test_a_run_that_resumes_in_its_last_evaluation_delivers_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, order, measure, publish = recipe(tmp_path, "grpo", None), list[str](), Run.measure, Run.publish

    async def measured(self: Run, name: str, **how: Any) -> Any:
        order.append(name)
        if name == "after" and order.count("after") == 1:
            raise Interrupted("stopped")
        return await measure(self, name, **how)

    async def published(self: Run, **how: Any) -> None:
        order.append("delivery")
        await publish(self, **how)

    monkeypatch.setattr(Run, "publish", published)
    monkeypatch.setattr(Run, "measure", measured)
    with pytest.raises(Interrupted):
        runs.run(path, tmp_path / "run")
    n = len(order)
    runs.run(path, tmp_path / "run", resume=True)
    assert order[n:] == ["delivery", "after"]


def test_many_stages(tmp_path: Path) -> None:
    again = POLICY_GRADIENT | {"steps": 2, "advantage": {"kind": "rloo"}}
    path = recipe(tmp_path, "gigpo", None, stages=[SUPERVISED, again, SUPERVISED, again])
    with words.on_every_step(path, counter := PressAt(-1)):
        runs.run(path, tmp_path / "whole")
    assert {line["stage"] for line in runs.log(tmp_path / "whole")} == {
        "0-supervised", "1-policy_gradient", "2-supervised", "3-policy_gradient",
    }  # fmt: skip
    draw = random.Random(0)
    at = [draw.randrange(1, counter.n_steps // 2) for _ in range(5)]
    assert run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    assert_equal(tmp_path / "stopped", tmp_path / "whole")


def drawn(folder: Path, stage: str) -> list[list[str]]:
    """Tasks of each step of a stage."""
    found: dict[int, dict[str, None]] = {}
    for r in read_trajectories(folder / "trajectories", stage=stage, phase="train"):
        found.setdefault(r.step, {})[r.trajectory.task_id] = None
    return [list(tasks) for _, tasks in sorted(found.items())]


def test_each_stage_draws_in_an_order_of_its_own_and_goes_on_in_it(tmp_path: Path) -> None:
    stage = POLICY_GRADIENT | {"steps": 3, "evaluate_every": 0, "group_size": 2}
    evaluation = {"n_tasks": 4, "before": False, "attempts": 2}
    path = recipe(tmp_path, "grpo", None, stages=[stage, stage], evaluation=evaluation)
    whole = runs.run(path, tmp_path / "whole")
    first, second = (drawn(whole.folder, name) for name in ("0-policy_gradient", "1-policy_gradient"))
    order = ShuffledTasks(words.Words().tasks("train"), seed=0).draw(9)
    assert [sorted(step) for step in first] == [sorted(t.id for t in order[i : i + 3]) for i in (0, 3, 6)]
    assert len(second) == 3 and {*first[0]}.isdisjoint(second[0])
    runs.stop(path, tmp_path / "stopped", "1-policy_gradient-000001")
    again = runs.run(path, tmp_path / "stopped", resume=True)
    assert drawn(again.folder, "1-policy_gradient") == second
    assert runs.weights(runs.newest(again.folder)) == runs.weights(runs.newest(whole.folder))
    assert "on 8 attempts at 4 unseen tasks, 95% interval" in whole.said


@pytest.mark.parametrize("changes", [{"lora": LORA}, {"dtype": "bfloat16"}], ids=["dropout", "masters"])
def test_a_supervised_stage_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, changes: dict[str, Any]) -> None:
    stage = SUPERVISED | {"epochs": 3, "checkpoint_every": 5}  # of three updates each
    policy = runs.BASE["policy"] | changes
    path = recipe(tmp_path, "grpo", None, policy=policy, stages=[stage], evaluation={"n_tasks": 6})
    runs.run(path, tmp_path / "whole")
    stopped = shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(stopped / "checkpoints" / "0-supervised-000009")
    (stopped / "result.json").unlink()
    again = runs.run(path, stopped, resume=True)
    assert "resuming from" in again.said and "0-supervised-000005" in again.said
    for found in (runs.weights, lambda one: json.loads((one / "state.json").read_text()) | {"train_s": 0}):
        assert found(runs.newest(stopped)) == found(runs.newest(tmp_path / "whole"))
    assert runs.lines(stopped) == runs.lines(tmp_path / "whole")


def test_ctrl_c_loses_no_finished_step(tmp_path: Path) -> None:
    path = recipe(tmp_path, "grpo", None)
    raw = path.read_text()
    path.write_text(raw.replace("checkpoint_every: 1", "checkpoint_every: 0"))
    out = tmp_path / "run"

    def finished() -> list[int]:
        return [line["step"] for line in runs.log(out) if "rollout/success" in line]

    def press() -> None:
        if (out / "metrics.jsonl").exists() and len(finished()) == 3:
            signal.raise_signal(signal.SIGINT)

    with words.on_every_step(path, press), pytest.raises(Interrupted) as stopped:
        runs.run(path, out)
    assert stopped.value.where == "step 3" and runs.newest(out).name == "1-policy_gradient-000003"
    assert str(runs.newest(out)) in stopped.value.what
    again = runs.run(path, out, resume=True)
    assert f"resuming from {out / 'checkpoints' / '1-policy_gradient-000003'}" in again.said
    assert finished() == [1, 2, 3, 4, 5]


def test_ctrl_c_loses_no_update_on_demonstrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SUPERVISED | {"epochs": 3}  # of three updates each
    path = recipe(tmp_path, "grpo", None, stages=[stage], evaluation={"n_tasks": 6})
    runs.run(path, tmp_path / "whole")
    imitated, out = TorchTrainer.sft_update, tmp_path / "run"

    def pressed(self: TorchTrainer, *args: Any) -> Any:
        if self.n_updates == 4 and not (out / "checkpoints" / "0-supervised-000005").exists():
            signal.raise_signal(signal.SIGINT)
        return imitated(self, *args)

    monkeypatch.setattr(TorchTrainer, "sft_update", pressed)
    with pytest.raises(Interrupted) as stopped:
        runs.run(path, out)
    assert stopped.value.where == "step 5" and "0-supervised-000005" in stopped.value.what
    assert "0-supervised-000005" in runs.run(path, out, resume=True).said
    assert runs.lines(out) == runs.lines(tmp_path / "whole")
    assert runs.weights(runs.newest(out)) == runs.weights(runs.newest(tmp_path / "whole"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_in_an_update_lets_its_step_end(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe(tmp_path, "grpo", None)
    path.write_text(path.read_text().replace("checkpoint_every: 1", "checkpoint_every: 0"))
    runs.run(path, tmp_path / "whole")
    n_updates = 0

    def pressed(*args: Any) -> Any:
        nonlocal n_updates
        n_updates += 1
        if n_updates == 3 and when == "before":
            signal.raise_signal(signal.SIGINT)
        found = update(*args)
        if n_updates == 3 and when == "after":
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(loop, "update", pressed)
    out = tmp_path / "run"
    with pytest.raises(Interrupted) as stopped:
        runs.run(path, out)
    assert stopped.value.where == "step 3" and runs.newest(out).name == "1-policy_gradient-000003"
    runs.run(path, out, resume=True)
    assert n_updates == 5, "no step is made twice"
    assert runs.lines(out) == runs.lines(tmp_path / "whole")
    assert runs.weights(runs.newest(out)) == runs.weights(runs.newest(tmp_path / "whole"))


# --- SIGKILL ---------------------------------------------------------------------------------------------------------


def run_with_kills(path: Path, folder: Path, at: list[int]) -> int:
    """Run, kill the process when it touches a file for the n-th time, resume; returns how often it was killed."""
    folder.mkdir()
    out = folder / "run"
    for n_killed, n in enumerate([*at, None]):
        begun = (out / "recipe.yaml").is_file()
        if not begun:
            shutil.rmtree(out, ignore_errors=True)
        how = ["--resume", out] if begun else [path, "--out", out]
        ended = children.run(folder, "train", *how, kill_at=n)
        if ended.code == 0:
            return n_killed
        assert ended.code == -signal.SIGKILL, ended.err
    raise AssertionError("the last process was not to be killed")


@pytest.mark.parametrize(
    ("advantage", "lora"),
    [
        pytest.param("grpo", LORA, id="grpo-lora"),
        pytest.param("gigpo", None, id="gigpo-full", marks=pytest.mark.extended),
    ],
)
@pytest.mark.extended
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path, advantage: str, lora: dict[str, Any] | None) -> None:
    path = recipe(tmp_path, advantage, lora)
    whole = children.run(tmp_path, "train", path, "--out", tmp_path / "run")
    assert whole.code == 0, whole.err
    n = children.n_events(whole)
    # What a process leaves behind changes only where it touches files, so these are all the moments there are.
    draw = random.Random(advantage)
    at = [draw.randrange(n // 20, n // 2) for _ in range(6)]
    assert run_with_kills(path, tmp_path / "killed", at) >= 3
    assert_equal(tmp_path / "killed" / "run", tmp_path / "run")


@pytest.mark.extended
def test_a_killed_run_in_babyai(tmp_path: Path) -> None:
    pytest.importorskip("minigrid")
    path = recipe(
        tmp_path,
        "gigpo",
        None,
        environment={"kind": "babyai", "level": "GoToObj", "max_steps": 5},
        rewards={"success": {"kind": "outcome"}, "invalid": {"kind": "invalid_action"}},
        limits={"max_turns": 5, "max_tokens": 6},
    )
    path.write_text(
        path.read_text().replace("max_context: 128", "max_context: 512").replace("steps: 5\n  ta", "steps: 3\n  ta")
    )
    whole = children.run(tmp_path, "train", path, "--out", tmp_path / "run")
    assert whole.code == 0, whole.err
    n = children.n_events(whole)
    assert run_with_kills(path, tmp_path / "killed", [n // 3, n // 3]) == 2
    assert_equal(tmp_path / "killed" / "run", tmp_path / "run")
