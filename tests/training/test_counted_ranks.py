"""Memory of the ranks of a recipe for eight GPUs: what is estimated, against tensors counted in two real processes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.estimate.dry_run import _Alive
from rlhf.estimate.figures import total
from rlhf.estimate.memory import _pass_of, estimates
from rlhf.recipe import Recipe, load
from rlhf.training.policy.model import Policy
from tests.measured_update import batch
from tests.test_memory import config_folder
from tests.training.together import together

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

#: Seven billion parameters made small: as many layers, heads and numbers in proportion.
SHAPE = {"hidden_size": 256, "intermediate_size": 1344, "num_hidden_layers": 8, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 10_862, "max_position_embeddings": 32_768}
N_TOKENS = 1024


def recipe(folder: Path) -> Recipe:
    """The recipe for eight GPUs, with a model, a budget and a bucket of another size."""
    keys = [f"stages.0.max_tokens_per_microbatch={N_TOKENS}", "stages.0.trainer.bucket_mb=10"]
    return load("deepspeed/full-7b-eight-gpus", [f"policy.path={folder}/model", *keys])


def counted(rank: int, place: Path) -> int:
    """Most bytes of all tensors that this process holds at a time during its second update."""
    made = recipe(place.parent)
    [stage] = made.stages
    config = AutoConfig.from_pretrained(place.parent / "model")
    asked = _pass_of(made, stage, config)
    auto: Any = AutoModelForCausalLM
    one = batch(asked.n_tokens, asked.n_sampled)
    with _Alive(()) as alive:
        model = auto.from_config(config, dtype=torch.bfloat16)
        trainer = stage.trainer.start(Policy.of(model, None, None), stage.optimizer, 2)
        trainer.update([one] * 2, stage.loss)
        alive.most = 0
        trainer.update([one] * 2, stage.loss)
        return alive.most


def test_what_ranks_of_the_recipe_for_eight_gpus_hold_is_estimated_within_15_percent(tmp_path: Path) -> None:
    config_folder(tmp_path / "model", SHAPE, "qwen2")
    [estimate] = estimates(recipe(tmp_path), 2)
    beside = {"engine", "kv_cache", "program", "loading"}
    expected = total(part for part in estimate.parts if part.name not in beside)
    for most in together(counted, tmp_path / "ranks", timeout_s=120.0):
        assert most == pytest.approx(expected, rel=0.15)
