"""Any causal model: small random models of many families, sampled from, recomputed and trained.

`docs/models.md` has the table of what is tested here.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.data import Generation, Prompt, SamplingParams
from rlhf.errors import ModelError
from rlhf.inference.embedded.attention import ATTENTION_NAME, packed_forward, use_packed_attention
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.embedded.model_probe import TESTED, check_rows
from rlhf.training.policy.model import Lora, Policy, Pretrained, restore
from rlhf.training.policy.templates import TEMPLATES
from rlhf.training.policy.tokenizer import train_tokenizer
from tests.training import runs

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOW = {"sliding_window": 8}
#: What each family has that the smallest Llama has not.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": WINDOW,
    "gemma": {"head_dim": 8},
    "gemma2": {**WINDOW, "head_dim": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**WINDOW, "head_dim": 8},
    "glm4": {},
    "gpt2": {"n_inner": 48},
    "gpt_neox": {},
    "gpt_oss": {**MOE, **WINDOW, "head_dim": 8},
    "granite": {},
    "granitemoe": MOE,
    "llama": {},
    "mistral": WINDOW,
    "mixtral": MOE,
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": MOE,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {},
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 24},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**MOE, "head_dim": 8, "decoder_sparse_step": 1},
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": WINDOW,
}
QUICK = ("gemma2", "gpt2", "mixtral")
EACH = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.extended) for name in FAMILIES]
SCORE = """
def score(task, trajectory):
    return sum(sum(map(ord, turn.action.reply_text)) % 7 for turn in trajectory.turns) / 7
"""
TEXT = ["Say red. Say green. Say blue. Say white. red green blue white Right. Wrong."]


def tokenizer() -> Any:
    return train_tokenizer(TEXT, vocab_size=330, max_context=128)


def made(family: str, **more: Any) -> Any:
    """A model with three layers and weights far from uniform, and its tokenizer's special tokens."""
    torch.manual_seed(0)
    words = tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(words), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "bos_token_id": None, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id,
    }  # fmt: skip
    shape |= {**FAMILIES.get(family, {}), **more}
    if family == "gpt2":
        shape = {name: shape[name] for name in shape if name not in ("num_key_value_heads", "intermediate_size")}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model.eval()


@torch.no_grad()
def alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of one row as the library computes them, `[L, V]`."""
    now = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    model.set_attn_implementation(now)
    return found


def rows() -> list[torch.Tensor]:
    """Rows of which two begin alike, longer than any window here."""
    torch.manual_seed(1)
    found = [torch.randint(10, len(tokenizer()), (n,)) for n in (40, 17, 25)]
    return [*found, torch.cat([found[0][:30], found[2][:6]])]


@pytest.mark.parametrize("family", EACH)
def test_sampled_recomputed_and_plain_log_probs_are_equal(family: str) -> None:
    model, given = made(family), rows()
    plain = [alone(model, row) for row in given]
    engine = TransformersEngine(model, max_context=128)
    packed = packed_forward(model, torch.cat(given), [len(row) for row in given]).log_softmax(-1)
    assert float((packed - torch.cat(plain)).abs().max()) < 1e-4

    async def sample() -> list[Generation]:
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=1)
        return list(await asyncio.gather(*(engine.generate(Prompt(tuple(r.tolist()), (1,)), params) for r in given)))

    for generation in asyncio.run(sample()):
        n, ids = generation.prompt.n_tokens, torch.tensor(generation.full_ids)
        again = packed_forward(model, ids, [len(ids)]).log_softmax(-1)
        sampled = torch.tensor(generation.logprobs)
        for found in (again, alone(model, ids)):
            assert float((found[n - 1 : -1].gather(1, ids[n:, None])[:, 0] - sampled).abs().max()) < 1e-4


@pytest.mark.parametrize("family", [name for name in FAMILIES if WINDOW.items() <= FAMILIES[name].items()])
def test_the_window_is_shorter_than_the_rows(family: str) -> None:
    near, far = made(family), made(family, sliding_window=64)
    assert float((alone(near, rows()[0]) - alone(far, rows()[0])).abs().max()) > 1e-2


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
@pytest.mark.parametrize("family", EACH)
def test_two_steps_of_training(family: str, lora: dict[str, Any] | None, tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = None
    made(family).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    policy = {"kind": "pretrained", "path": str(tmp_path / "model"), "template": "plain", "lora": lora}
    stage = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 4, "group_size": 4, "optimizer": {"lr": 1.0e-3},
             "filters": {"drop_zero_advantage": False}}  # fmt: skip
    (tmp_path / "mine.py").write_text(SCORE)
    mine = {"mine": {"kind": "./mine.py:score"}}
    path = runs.write(tmp_path, [stage], policy=policy, evaluation={"n_tasks": 4}, rewards=mine)
    done = runs.run(path, tmp_path / "run")
    assert min(runs.curve(done.folder, "optimizer/grad_norm")) > 0
    assert max(runs.curve(done.folder, "loss/sampler_logprob_diff_max")) < 1e-4
    settings = Pretrained(path=str(tmp_path / "model"), template=Path("plain"), lora=Lora(rank=2) if lora else None)
    again = restore(settings, runs.newest(done.folder) / "policy", done.folder)
    before = settings.build(0)
    assert again.tokenizer.chat_template == TEMPLATES["plain"]
    trained = dict(again.model.named_parameters())
    moved = [name for name, p in before.model.named_parameters() if not torch.equal(p, trained[name])]
    assert moved and all("lora" in name for name in moved) == bool(lora)


def test_the_page_lists_what_is_tested() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text("utf-8")
    listed = {name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert listed == set(FAMILIES) == TESTED


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "more", "told"), [
    ("bloom", {"n_head": 4, "n_layer": 2}, "the model does not allow its attention to be replaced"),
    ("falcon", {"num_kv_heads": 2}, "the model does not allow its attention to be replaced"),
    ("mamba", {}, "mixes tokens outside of attention|does not allow its attention"),
    ("llama4_text", {**MOE, "head_dim": 8, "intermediate_size_mlp": 48}, "chunked_attention"),
])  # fmt: skip
def test_a_model_that_cannot_be_packed_is_refused_in_words(family: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        Policy.of(made(family, **more), tokenizer(), None)


def test_positions_that_the_longest_row_changes_are_refused_beyond_the_short_ones() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64, **factors}
    model = made("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert TransformersEngine(model, max_context=64).max_context == 64
    with pytest.raises(ModelError, match="rope_type is longrope") as caught:
        TransformersEngine(model, max_context=65)
    assert "limits.max_context: 64" in str(caught.value)


def test_an_untested_family_is_probed() -> None:
    model = made("arcee")
    Policy.of(model, tokenizer(), None)
    assert model.config._attn_implementation == ATTENTION_NAME
    backwards = made("roberta", type_vocab_size=1)
    use_packed_attention(backwards)
    with pytest.raises(ModelError, match="packed rows of this model"):
        check_rows(backwards)


@pytest.mark.parametrize(("template", "told"), [
    (None, "policy.template: plain"),
    ("plan", "did you mean 'plain'?"),
    ("chatml", "lacks tokens of this template"),
])  # fmt: skip
def test_a_base_model_without_a_template_says_what_to_do(template: str | None, told: str, tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = None
    made("llama").save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        Pretrained(path=str(tmp_path), template=Path(template) if template else None).build(0)
    assert told in str(caught.value)


def test_a_template_of_ones_own_is_a_file(tmp_path: Path) -> None:
    words = tokenizer()
    words.pad_token = None
    made("llama").save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    policy = Pretrained(path=str(tmp_path), template=tmp_path / "own.jinja").build(0)
    assert policy.tokenizer.chat_template == "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert policy.tokenizer.pad_token is not None
