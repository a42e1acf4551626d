"""Whole runs of a tiny recipe that samples with vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf.build.evaluate import evaluate
from rlhf.recipe.evaluation_request import EvaluationRequest
from tests.tiers import tiered
from tests.training import runs

#: Enough that some attempts succeed and some fail.
SUPERVISED = {"kind": "supervised", "n_demonstrations": 128, "random_share": 0.5, "epochs": 12, "batch_size": 16}
POLICY_GRADIENT = {
    "kind": "policy_gradient",
    "steps": 3,
    "tasks_per_step": 4,
    "group_size": 8,
    "optimizer": {"lr": 5.0e-3},
    "filters": {"drop_zero_advantage": False},
}
GREEDY = {"n_tasks": 48, "temperature": 0.0}


@pytest.mark.parametrize("lora", tiered([None, {"rank": 4}], None), ids=["full weights", "adapter"])
def test_a_run_trains_with_vllm_and_is_evaluated_alike_by_both_engines(tmp_path: Path, lora: Any) -> None:
    stages = [{**SUPERVISED, "optimizer": {"lr": 5.0e-3 if lora is None else 2.0e-2}}, POLICY_GRADIENT]
    policy = {**runs.BASE["policy"], "head_dim": 32, **({} if lora is None else {"lora": lora})}
    recipe = runs.write(tmp_path, stages, policy=policy, engine={"kind": "vllm"}, evaluation=GREEDY)
    environment, children = dict(os.environ), set(psutil.Process().children(recursive=True))
    done = runs.run(recipe, tmp_path / "run")
    variables = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS")
    assert {name: os.environ.get(name) for name in variables} == {name: environment.get(name) for name in variables}
    left = [p for p in psutil.Process().children(recursive=True) if p not in children]
    _, alive = psutil.wait_procs([p for p in left if p.name().startswith("VLLM")], timeout=10)
    assert not alive
    # Every delivery was proven, and what was sampled has the log-probs that the trainer computes.
    assert len(runs.curve(done.folder, "delivery/canary_gap")) >= 3
    assert max(runs.curve(done.folder, "delivery/canary_gap")) < 1e-3
    assert max(runs.curve(done.folder, "loss/sampler_logprob_diff_max")) < 1e-3
    assert min(runs.curve(done.folder, "delivery/canary_moved")[-2:]) > 0
    assert set(runs.curve(done.folder, "rollout/n_infra_errors")) == {0.0}
    # The embedded engine, over the checkpoint, does in every episode what vLLM did at the end of the run.
    after = json.loads((done.folder / "result.json").read_text())["after"]
    newest = str(runs.newest(done.folder))
    asked = EvaluationRequest(target=str(recipe), overrides=("engine.kind=transformers",), checkpoint=newest)
    mine = evaluate(asked)
    found = (
        mine["success"]["value"],
        mine["success"]["n"],
        mine["n_errors"],
        mine["score"]["value"],
        mine["turns_mean"],
    )
    assert found == tuple(after[name] for name in ("success", "n", "n_errors", "return_mean", "n_turns_mean"))
