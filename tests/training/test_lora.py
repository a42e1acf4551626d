"""Options of adapters: what DoRA computes, delivers and remembers, how adapters are scaled, and quantised bases."""

from __future__ import annotations

import asyncio
import copy
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import make_samples
from rlhf.cli import app
from rlhf.credit.grpo import GRPO
from rlhf.errors import MissingPackageError, ModelError, RecipeError
from rlhf.estimate.meta import meta_model, parameters_of
from rlhf.inference.embedded.attention import packed_forward
from rlhf.inference.embedded.copied import CopiedEngine
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.recipe import load
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.lora import Lora, merged, unadapted
from rlhf.training.policy.model import Policy, Pretrained, restore
from rlhf.training.publisher import Publisher, adapter_parameters, parameters
from rlhf.training.stages.preference import Preference
from rlhf.training.stages.trl_trainers import train_dpo
from tests import recipe_parts
from tests.training.tiny import collect, credit, policy

DORA = Lora(rank=2, dora=True)
IDS = torch.tensor([5, 6, 7, 8, 9])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return packed_forward(model, IDS, [3, 2])


def moved(made: Policy) -> Policy:
    """The policy after two updates, in which its adapters have become something."""
    groups = collect(made, n_tasks=2)
    samples, _ = make_samples(groups, credit(groups, GRPO()))
    trainer = TorchTrainer(made, AdamW(lr=0.05), 4)
    for batches in [*pack_minibatches(samples, 2, Reduction(), 400)] * 2:
        trainer.update(batches, PPOClip())
    return made


@pytest.fixture(scope="module")
def trained() -> Policy:
    return moved(policy(lora=DORA))


# --- DoRA ------------------------------------------------------------------------------------------------------------


def test_adapters_begin_without_a_word_about_quantization() -> None:
    """Where a CPU has bfloat16 instructions, bitsandbytes warns as soon as it is imported, which peft does."""
    code = "import rlhf.training.policy.lora, peft"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gemm_4bit" not in done.stdout + done.stderr


def test_a_row_keeps_the_length_that_was_learnt_for_it() -> None:
    from peft import LoraConfig, get_peft_model

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x)
            return found

    made = One()
    made.layer.weight.data = torch.tensor([[3.0, 4.0]])
    model: Any = get_peft_model(made, LoraConfig(r=1, lora_alpha=2, target_modules=["layer"], use_dora=True))
    layer = model.get_base_model().layer
    assert layer.lora_magnitude_vector["default"].weight.tolist() == [5.0]  # of (3, 4)
    # Twice B A is (0, -4): (3, 0), of length 3, at length 5.
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = (
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[-2.0]]),
    )
    torch.testing.assert_close(merged(layer, torch.tensor([[3.0, 4.0]])), torch.tensor([[5.0, 0.0]]))
    torch.testing.assert_close(layer(torch.tensor([[2.0, 7.0]])), torch.tensor([[10.0]]))


def test_an_update_below_half_a_spacing_of_bfloat16_arrives_when_it_is_merged() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 128, bias=False, dtype=torch.bfloat16))
    nn.init.normal_(made[0].weight, std=0.02)
    model: Any = get_peft_model(made, LoraConfig(r=4, lora_alpha=4, target_modules=["0"]))
    layer = model.get_base_model()[0]
    nn.init.normal_(layer.lora_B["default"].weight, std=1e-4)
    weight, delta = layer.base_layer.weight.detach(), layer.get_delta_weight("default").detach().float()
    found = merged(layer, weight)
    assert found.dtype == torch.bfloat16 and torch.equal(found, merged(layer, weight))
    moved = found.float() - weight.float()
    assert abs(float((moved * delta).sum() / delta.square().sum()) - 1) < 0.2
    nearest = (weight + delta.to(torch.bfloat16)).float() - weight.float()
    assert float((nearest * delta).sum() / delta.square().sum()) < 0.8, "which rounding to the nearest loses"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_model_has_the_weights_that_engines_are_given(dtype: torch.dtype) -> None:
    made = policy(lora=Lora(rank=2))
    made.model.to(dtype)
    with torch.no_grad():
        for name, p in made.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=1e-4)
    sent = {name: value.clone() for name, value in parameters(made.model)}
    plain = unadapted(copy.deepcopy(made.model)).state_dict()
    assert plain.keys() >= sent.keys() and all(torch.equal(plain[name], value) for name, value in sent.items())


def test_it_begins_as_its_base_and_trains_lengths_too() -> None:
    made = policy(lora=DORA)
    torch.testing.assert_close(logits(made.model), logits(policy().model), atol=1e-6, rtol=0)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    moved(made)
    changed = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert any("lora_magnitude_vector" in name for name in changed)


def test_packed_rows_are_those_of_the_merged_model(trained: Policy) -> None:
    whole = copy.deepcopy(trained.model).merge_and_unload()
    torch.testing.assert_close(logits(trained.model), logits(whole), atol=1e-5, rtol=0)
    assert float((logits(trained.model) - logits(policy().model)).abs().max()) > 0.01


def test_it_is_delivered_merged_to_an_engine_of_its_own(trained: Policy) -> None:
    engine = CopiedEngine(copy.deepcopy(policy().model), max_context=trained.max_context)

    async def deliver() -> dict[str, float]:
        try:
            trained.version += 1
            publisher = Publisher(trained, engine)
            await publisher.publish()  # the canary is asked on both sides
            return publisher.figures
        finally:
            await engine.close()

    assert asyncio.run(deliver())["delivery/canary_gap"] < 1e-4


def test_it_is_saved_restored_and_taken_for_a_reference(tmp_path: Path) -> None:
    policy().save(tmp_path / "model")
    settings = Pretrained(path=str(tmp_path / "model"), lora=DORA)
    made = moved(settings.build(seed=0))
    made.save(tmp_path / "checkpoint" / "policy")
    then = logits(made.model)
    again = restore(settings, tmp_path / "checkpoint" / "policy", tmp_path)
    torch.testing.assert_close(logits(again.model), then, atol=0, rtol=0)
    moved(made)
    made.keep_reference(tmp_path / "checkpoint")
    with made.as_reference() as reference:
        torch.testing.assert_close(logits(reference), then, atol=1e-6, rtol=0)
    assert float((logits(made.model) - then).abs().max()) > 1e-3


# --- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rslora", "expected"), [(False, 8 / 4), (True, 8 / math.sqrt(4))])
def test_an_adapter_is_scaled_by_its_rank_or_the_root_of_it(rslora: bool, expected: float) -> None:
    model = policy(lora=Lora(rank=4, alpha=8.0, rslora=rslora)).model
    scales = {m.scaling["default"] for m in model.modules() if hasattr(m, "scaling") and isinstance(m.scaling, dict)}
    assert scales == {expected}


# --- quantised bases -------------------------------------------------------------------------------------------------


def test_a_quantised_base_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.training.policy.lora.find_spec", lambda name: None)
    policy().save(tmp_path / "model")
    with pytest.raises(MissingPackageError) as raised:
        Pretrained(path=str(tmp_path / "model"), lora=Lora(quantization="8bit")).build(seed=0)
    assert raised.value.where == "policy.lora.quantization"
    keys = [f"policy={{kind: pretrained, path: {tmp_path}/model, lora: {{quantization: 4bit}}}}"]
    command = ["train", str(recipe_parts.write(tmp_path)), *keys, "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and "rlhf-agents[quantized]" in done.stderr
    assert not (tmp_path / "run").exists(), "told before anything begins"


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(
    ("quantization", "layer", "most"), [("4bit", "Linear4bit", 0.3), ("8bit", "Linear8bitLt", 0.02)]
)
def test_a_quantised_base_is_near_the_base_and_learns(
    tmp_path: Path, quantization: Any, layer: str, most: float
) -> None:
    plain = policy(hidden_size=64, initializer_range=0.05)
    plain.save(tmp_path / "model")
    settings = Pretrained(path=str(tmp_path / "model"), lora=Lora(quantization=quantization))
    made = settings.build(seed=0)
    assert any(type(m).__name__ == layer for m in made.model.modules())
    exact = logits(plain.model)
    gap = float((logits(made.model).cpu() - exact).norm() / exact.norm())
    assert 0 < gap < most
    moved(made)
    if find_spec("trl") is not None:
        before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
        row = {"chosen_ids": [5, 6, 7], "chosen_mask": [0, 1, 1], "rejected_ids": [5, 6, 8], "rejected_mask": [0, 1, 1]}
        rows = [{**row, "ref_chosen_logps": -3.0, "ref_rejected_logps": -3.0}] * 2
        stage = Preference(batch_size=2, optimizer=AdamW(lr=1e-2))
        train_dpo(made.model.get_base_model(), made.tokenizer, rows, stage, lambda update, logs: None, seed=0)
        changed = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
        assert changed and all(".lora_" in name for name in changed)


@pytest.mark.parametrize(
    ("quantization", "n_bytes"),
    # 4 bits and a share of two scales, 8 bits for 64 numbers and 32 for 256 of those; 8 bits and 32 for a row.
    [("4bit", {4.126953125 / 8}), ("8bit", {1 + 4 / 16, 1 + 4 / 48})],
)
def test_the_memory_of_a_quantised_base(tmp_path: Path, quantization: str, n_bytes: set[float]) -> None:
    policy().save(tmp_path / "model")
    model, _ = meta_model(Pretrained(path=str(tmp_path / "model"), lora=Lora(rank=2)))
    plain, small = parameters_of(model), parameters_of(model, quantization=quantization)
    assert {s.size for s, p in zip(small, plain, strict=True) if s != p} == n_bytes
    # Linear layers of 16 wide: queries and outputs 16 x 16, keys and values too, three of 16 x 48, in two layers.
    assert sum(p.n for p, s in zip(plain, small, strict=True) if p != s) == 2 * (4 * 16 * 16 + 3 * 16 * 48)


# --- what does not go together ---------------------------------------------------------------------------------------

VLLM = "engine={kind: vllm}"
DEEPSPEED = "stages=[{kind: policy_gradient, trainer: {kind: deepspeed, zero_stage: 3}}]"
CRITIC = "stages=[{kind: policy_gradient, advantage: {kind: gae}, critic: %s}]"


@pytest.mark.parametrize(
    ("lora", "override", "where", "says"),
    [
        ("{dora: true}", "engine={kind: vllm, lora: adapter}", "engine.lora", "vLLM cannot hold DoRA"),
        ("{dora: true}", DEEPSPEED, "stages[0].trainer.zero_stage", "whole base weights"),
        ("{quantization: 4bit}", VLLM, "policy.lora.quantization", "vLLM"),
        ("{quantization: 4bit}", "asynchrony={staleness: 1}", "policy.lora.quantization", "a copy"),
        ("{quantization: 4bit}", DEEPSPEED, "policy.lora.quantization", "deepspeed"),
        ("{quantization: 4bit}", CRITIC % "{}", "policy.lora.quantization", "a copy of that base"),
        ("{}", CRITIC % "{lora: {quantization: 4bit}}", "stages[0].critic.lora.quantization", "a critic"),
        ("{quantization: 8bit}", VLLM, "policy.lora.quantization", "vLLM"),
        ("{quantization: 2bit}", "seed=1", "policy.lora.quantization", "4bit"),
    ],
)
def test_pairs_that_are_refused(tmp_path: Path, lora: str, override: str, where: str, says: str) -> None:
    path = recipe_parts.write(tmp_path)
    with pytest.raises(RecipeError) as raised:
        load(str(path), [f"policy={{kind: pretrained, path: some/model, lora: {lora}}}", override])
    assert raised.value.where == where and says in str(raised.value)


def test_a_policy_from_scratch_has_no_base_to_quantize(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="quantization"):
        load(str(recipe_parts.write(tmp_path)), ["policy.lora={quantization: 4bit}"])


@pytest.mark.parametrize("engine", ["engine={kind: vllm, lora: merged}", VLLM])
def test_dora_is_fine_where_it_is_merged(tmp_path: Path, engine: str) -> None:
    keys = ["policy={kind: pretrained, path: some/model, lora: {dora: true}}", engine]
    loaded = load(str(recipe_parts.write(tmp_path)), keys)
    assert loaded.policy.lora == Lora(dora=True)


@pytest.mark.parametrize("targets", [("q_proj", "lm_head"), ("embed_tokens",)])
def test_an_adapter_on_a_weight_with_two_uses_is_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(
        ModelError, match="embeddings and output layer of this model are tied: an adapter cannot change only one"
    ) as raised:
        policy(lora=Lora(rank=2, target_modules=targets))
    assert raised.value.where == "policy.lora.target_modules"


def test_the_hub_is_not_asked_for_the_base_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft.utils.save_and_load as peft_files

    asked: list[Any] = []
    monkeypatch.setattr(peft_files, "check_file_exists_on_hf_hub", lambda *names, **_: asked.append(names))
    made = policy(lora=Lora(rank=2))
    made.model.peft_config["default"].base_model_name_or_path = "someone/model"
    assert dict(adapter_parameters(made.model))
    made.save(tmp_path / "policy")
    assert not asked
