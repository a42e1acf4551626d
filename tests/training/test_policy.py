"""Policies: from scratch, from a folder, with adapters; saved as ordinary folders and restored from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.errors import CheckpointError, ModelError
from rlhf.inference.embedded.attention import packed_forward
from rlhf.training.policy.model import FromScratch, Lora, Policy, Pretrained, restore, resume
from rlhf.training.policy.tokenizer import END, train_tokenizer

TEXTS = ["You are in the kitchen.", "go north", "open the wooden door", "Zürich – 東京 ✓"] * 8
TINY = FromScratch(hidden_size=16, n_layers=2, n_heads=2, n_kv_heads=1, max_context=64, vocab_size=340)


def built(settings: FromScratch = TINY, seed: int = 0) -> Policy:
    return settings.build(seed, TEXTS)


def logits(policy: Policy, text: str = "open the wooden door") -> torch.Tensor:
    """`[T, V]` by the packed forward pass."""
    ids = torch.tensor(policy.tokenizer.encode(text))
    with torch.no_grad():
        return packed_forward(policy.model, ids, [len(ids)])


def plain_logits(model: Any, tokenizer: Any, text: str = "open the wooden door") -> torch.Tensor:
    """`[T, V]` by whatever attention transformers chose."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokenizer.encode(text)]), use_cache=False).logits[0]
    return found


def stirred(policy: Policy) -> Policy:
    """The same policy with every trainable parameter moved, so that no adapter is zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


# --- the tokenizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*TEXTS[:4], "never seen: Ωμέγα\n\t ", "  spaces  stay  ", ""])
def test_any_text_comes_back_from_the_tokenizer(text: str) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=400, max_context=64)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_frequent_word_is_one_token() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=400, max_context=64)
    for word in (" kitchen", " door", " north", "open"):
        assert len(tokenizer.encode(word)) == 1, word


def test_turns_cost_two_tokens_of_format() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=400, max_context=64)
    said = [{"role": "user", "content": "go north"}, {"role": "assistant", "content": "open"}]
    ids = tokenizer.apply_chat_template(said, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == f"<|user|>go north<|assistant|>open{END}"
    assert len(ids) == len(tokenizer.encode("go north")) + len(tokenizer.encode("open")) + 3
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(END)


# --- from scratch and back from a folder ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_saved_policy_is_an_ordinary_folder(tmp_path: Path, family: Any) -> None:
    policy = built(FromScratch(family=family, hidden_size=16, n_layers=1, n_heads=2, max_context=64, vocab_size=340))
    expected = logits(policy)
    policy.save(tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1, "whoever may read one file may read all"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == family
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    torch.testing.assert_close(plain_logits(model, tokenizer), expected, atol=1e-5, rtol=1e-5)
    again = Pretrained(path=str(tmp_path)).build(seed=5)
    assert torch.equal(logits(again), expected)
    assert not again.is_lora and again.max_context == 64


def test_one_seed_gives_one_policy() -> None:
    first, same, other = built(), built(), built(seed=1)
    assert torch.equal(logits(first), logits(same)) and not torch.equal(logits(first), logits(other))


def test_every_layer_size_is_that_of_the_settings() -> None:
    config = built().model.config
    found = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert found == (16, 2, 2, 1) and config.intermediate_size == 48 and config.head_dim == 32


# --- folders that cannot be used --------------------------------------------------------------------------------------


def spoilt(folder: Path, how: str) -> Path:
    built().save(folder)
    config = json.loads((folder / "config.json").read_text())
    weights = folder / "model.safetensors"
    match how:
        case "weights cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "weights missing":
            weights.unlink()
        case "tokenizer broken":
            (folder / "tokenizer.json").write_text("{")
        case "config broken":
            (folder / "config.json").write_text("{]")
        case "unknown architecture":
            (folder / "config.json").write_text(json.dumps(config | {"model_type": "abacus"}))
        case "a layer too many":
            more = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
            (folder / "config.json").write_text(json.dumps(config | more))
        case "no chat template":
            (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("weights cut", "SafetensorError"),
        ("weights missing", "model.safetensors"),
        ("tokenizer broken", "the model cannot be loaded"),
        ("config broken", "the model cannot be loaded"),
        ("unknown architecture", "abacus"),
        ("a layer too many", "nothing for model.layers.2"),
        ("no chat template", "no chat template"),
    ],
)
def test_an_unreadable_model_folder(tmp_path: Path, how: str, says: str) -> None:
    folder = spoilt(tmp_path / "model", how)
    with pytest.raises(ModelError) as error:
        Pretrained(path=str(folder)).build(seed=0)
    text = str(error.value)
    assert says in text and f"policy.path {folder}" in text and "do:" in text


def test_an_adapter_for_layers_that_are_not_there() -> None:
    with pytest.raises(ModelError, match=r"policy.lora.target_modules"):
        built(FromScratch(hidden_size=16, n_heads=2, n_layers=1, vocab_size=340, lora=Lora(target_modules=("c_attn",))))


# --- adapters ---------------------------------------------------------------------------------------------------------


def with_adapter(kind: str, folder: Path, **lora: Any) -> tuple[Any, Policy]:
    """Settings and policy with an adapter over a model from scratch, or over a saved one."""
    adapter = Lora(rank=2, alpha=4.0, **lora)
    settings: Any
    if kind == "from_scratch":
        settings = FromScratch(
            hidden_size=16, n_layers=2, n_heads=2, n_kv_heads=1, max_context=64, vocab_size=340, lora=adapter
        )
        policy = built(settings)
        policy.save_base(folder / "run")
    else:
        built().save(folder / "model")
        settings = Pretrained(path=str(folder / "model"), lora=adapter)
        policy = settings.build(seed=0)
    return settings, policy


KINDS = pytest.mark.parametrize("kind", ["from_scratch", "pretrained"])


@KINDS
def test_only_adapters_are_trained(tmp_path: Path, kind: str) -> None:
    _, policy = with_adapter(kind, tmp_path)
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert not any("lm_head" in name or "embed_tokens" in name for name in trained)
    # An adapter begins as nothing: the policy is its base.
    assert torch.equal(logits(policy), logits(built()))


@KINDS
def test_a_saved_adapter_is_an_ordinary_peft_folder(tmp_path: Path, kind: str) -> None:
    _, policy = with_adapter(kind, tmp_path)
    stirred(policy).save(tmp_path / "saved")
    assert len({file.stat().st_mode for file in (tmp_path / "saved").iterdir()}) == 1
    named = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["base_model_name_or_path"]
    base, tokenizer = AutoModelForCausalLM.from_pretrained(named), AutoTokenizer.from_pretrained(tmp_path / "saved")
    found = plain_logits(PeftModel.from_pretrained(base, str(tmp_path / "saved")).eval(), tokenizer)
    torch.testing.assert_close(found, logits(policy), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, logits(built()), atol=1e-3), "the adapter does something"


@KINDS
def test_an_adapter_is_restored_and_trained_on(tmp_path: Path, kind: str) -> None:
    settings, policy = with_adapter(kind, tmp_path, dropout=0.25)
    stirred(policy).save(tmp_path / "saved")
    again = resume(settings, tmp_path / "saved", tmp_path / "run")
    assert torch.equal(logits(again), logits(policy)) and again.is_lora
    trained, expected = (
        [name for name, p in found.model.named_parameters() if p.requires_grad] for found in (again, policy)
    )
    assert trained == expected
    dropouts = {m.p for name, m in again.model.named_modules() if "lora_dropout" in name and hasattr(m, "p")}
    assert dropouts == {0.25}
    with again.as_reference() as reference:
        ids = torch.tensor(again.tokenizer.encode("open the wooden door"))
        assert torch.equal(packed_forward(reference, ids, [len(ids)]), logits(built()))


def test_full_weights_are_restored(tmp_path: Path) -> None:
    policy = stirred(built())
    policy.save(tmp_path / "saved")
    assert torch.equal(logits(restore(TINY, tmp_path / "saved", tmp_path)), logits(policy))


def test_a_reference_has_the_number_format_of_the_policy(tmp_path: Path) -> None:
    built().save(tmp_path / "policy")
    policy = Pretrained(path=str(tmp_path / "policy"), dtype="bfloat16").build(seed=0)
    policy.keep_reference(tmp_path)
    with policy.as_reference() as reference:
        assert reference.dtype is torch.bfloat16 and reference is not policy.model
        assert not any(p.requires_grad for p in reference.parameters())


def test_there_is_no_reference_before_one_is_kept() -> None:
    with pytest.raises(ModelError, match="no reference"), built().as_reference():
        pass


# --- checkpoints of something else ------------------------------------------------------------------------------------


def test_another_model_is_not_gone_on_with(tmp_path: Path) -> None:
    built().save(tmp_path)
    bigger = FromScratch(hidden_size=32, n_layers=2, n_heads=2, n_kv_heads=1, max_context=64, vocab_size=340)
    with pytest.raises(CheckpointError, match=r"another model: hidden_size 16\n *expected: .*hidden_size 32"):
        resume(bigger, tmp_path, tmp_path)
    with pytest.raises(CheckpointError, match="an adapter False"):
        resume(FromScratch(hidden_size=16, n_layers=2, n_heads=2, lora=Lora()), tmp_path, tmp_path)


def test_an_adapter_of_another_base(tmp_path: Path) -> None:
    _, policy = with_adapter("from_scratch", tmp_path)
    policy.save(tmp_path / "saved")
    shutil.rmtree(tmp_path / "run" / "base")
    other = built(FromScratch(hidden_size=32, n_layers=2, n_heads=2, max_context=64, vocab_size=340, lora=Lora()))
    other.save_base(tmp_path / "run")
    with pytest.raises(CheckpointError, match="the adapter cannot be loaded"):
        restore(TINY, tmp_path / "saved", tmp_path / "run")


@KINDS
def test_a_cut_checkpoint(tmp_path: Path, kind: str) -> None:
    settings, policy = with_adapter(kind, tmp_path)
    policy.save(tmp_path / "saved")
    weights = tmp_path / "saved" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="the policy of this checkpoint cannot be used"):
        restore(settings, tmp_path / "saved", tmp_path / "run")
