"""Memory that ends in the middle of a run: the key is named, nothing is lost, and it goes on with less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf.device import allocation_failure
from rlhf.errors import TrainingError
from tests.commands import run
from tests.training import runs
from tests.training.test_deepspeed_runs import SHORT, STEPS, SUPERVISED

#: A loss that finds no room for what it makes of a large micro-batch, from the third update on.
GREEDY = """
import torch
from rlhf.losses.ppo_clip import PPOClip

CALLS = []


class Greedy(PPOClip):
    def __call__(self, inputs):
        CALLS.append(len(inputs.weights))
        if len(CALLS) > 2 and len(inputs.weights) > 60:
            torch.empty(2**50, dtype=torch.uint8)
        return super().__call__(inputs)
"""
REWARDS: runs.Values = {**runs.BASE["rewards"], "short": SHORT}
GREEDILY: runs.Values = {
    **STEPS, "tasks_per_step": 4, "minibatches": 1, "checkpoint_every": 4, "max_tokens_per_microbatch": 200,
    "loss": {"kind": "./greedy.py:Greedy"},
}  # fmt: skip


def test_a_run_without_memory_names_the_key_and_goes_on_with_less(tmp_path: Path) -> None:
    folder, out = tmp_path / "recipe", tmp_path / "run"
    path = runs.write(folder, [SUPERVISED, GREEDILY], evaluation={"n_tasks": 4}, rewards=REWARDS)
    (folder / "greedy.py").write_text(GREEDY)
    ended = run("train", path, "--out", out)
    assert ended.exit_code == 2
    said = " ".join(ended.stderr.split())
    assert "stages[1]: out of memory" in said and "you tried to allocate" in said
    assert f"rlhf train --resume {out} stages.1.max_tokens_per_microbatch=100" in said
    assert runs.newest(out).name == "1-policy_gradient-000002"  # what was finished is there
    again = run("train", "--resume", out, "stages.1.max_tokens_per_microbatch=100")
    assert again.exit_code == 0, again.output
    steps = [line["step"] for line in runs.lines(out) if "loss/total" in line and "policy" in line["stage"]]
    assert steps == [1, 2, 3, 4]


#: A selection that finds no room for what it makes of the groups of a step.
CROWDED = """
import torch
from rlhf.tasks.selection import All


class Crowded(All):
    def __call__(self, *args):
        torch.empty(2**50, dtype=torch.uint8)
"""


def test_rollouts_without_memory_name_the_keys_of_the_engine(tmp_path: Path) -> None:
    folder, out = tmp_path / "recipe", tmp_path / "run"
    stage = {key: value for key, value in GREEDILY.items() if key != "loss"}
    path = runs.write(folder, [{**stage, "selection": {"kind": "./crowded.py:Crowded"}}], evaluation={"n_tasks": 4})
    (folder / "crowded.py").write_text(CROWDED)
    ended = run("train", path, "--out", out)
    said = " ".join(ended.stderr.split())
    assert ended.exit_code == 2 and "out of memory during rollouts" in said, said
    assert "engine.max_sessions" in said and "gpu_memory_utilization" in said and "limits.max_tokens" in said
    assert "max_tokens_per_microbatch" not in said


#: The environment of the other runs, without memory for the tasks of an evaluation once a step is logged.
FULL = """

class Full(Words):
    def tasks(self, split):
        import pathlib, torch
        log = pathlib.Path({log!r})
        if split == "dev" and log.exists() and "rollout/" in log.read_text():
            torch.empty(2**50, dtype=torch.uint8)
        return super().tasks(split)
"""


def test_an_evaluation_between_steps_without_memory_names_the_keys_of_the_engine(tmp_path: Path) -> None:
    folder, out = tmp_path / "recipe", tmp_path / "run"
    stage = {key: value for key, value in GREEDILY.items() if key != "loss"} | {"evaluate_every": 1}
    path = runs.write(folder, [stage], evaluation={"n_tasks": 4}, environment={"kind": "./words.py:Full"})
    with (folder / "words.py").open("a") as file:
        file.write(FULL.format(log=str(out / "metrics.jsonl")))
    ended = run("train", path, "--out", out)
    said = " ".join(ended.stderr.split())
    assert ended.exit_code == 2 and "evaluation (step 1): out of memory during rollouts" in said, said
    assert "engine.max_sessions" in said and "max_tokens_per_microbatch" not in said


def test_a_failed_allocation_is_known_by_its_cause() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50, dtype=torch.uint8)
    assert "allocate" in (allocation_failure(raised.value) or "")
    wrapped = TrainingError("raised an exception")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert allocation_failure(wrapped) == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert allocation_failure(MemoryError()) == "no memory left"
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert allocation_failure(cublas) == str(cublas)
    assert allocation_failure(RuntimeError("another")) is None and allocation_failure(None) is None
