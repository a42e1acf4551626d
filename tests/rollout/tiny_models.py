"""Random causal LMs of about 50 thousand parameters, and the plain forward pass that everything is compared with."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlhf.data import Generation, Prompt
from rlhf.inference.embedded.engine import TransformersEngine

N_VOCAB = 97

#: name -> model class, config class, query heads, key-value heads, tied embeddings: GQA, MHA and MQA are all there.
FAMILIES: dict[str, tuple[Any, Any, int, int, bool]] = {
    "qwen3-gqa-tied": (Qwen3ForCausalLM, Qwen3Config, 4, 2, True),
    "qwen2-mha": (Qwen2ForCausalLM, Qwen2Config, 3, 3, False),
    "llama-mqa-tied": (LlamaForCausalLM, LlamaConfig, 6, 1, True),
}


def tiny_model(family: str = "qwen3-gqa-tied", attention: str = "eager", seed: int = 0) -> Any:
    """One seed gives one model. Weights are large, so that next-token distributions are far from uniform."""
    model_class, config_class, n_heads, n_kv_heads, tied = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=N_VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=16,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        initializer_range=0.2,
        attn_implementation=attention,
    )
    return model_class(config).eval()


def lora_model(seed: int = 0) -> Any:
    """A Qwen3 with a LoRA adapter whose weights are not zero."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(seed=seed), settings)
    torch.manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@torch.no_grad()
def plain_logprobs(model: Any, generation: Generation, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs `[T]` of the sampled tokens from one plain pass of `model` over prompt and generation."""
    ids = torch.tensor([generation.full_ids])
    begin = len(generation.prompt.token_ids)
    logits = model(ids, use_cache=False).logits[0, begin - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]


def blas_keeps_rows() -> bool:
    """Whether this machine's matrix products round a row alike whatever rows are beside it."""
    x, w = torch.randn(64, 48), torch.randn(97, 48)
    return all(torch.equal(F.linear(x[:n], w), F.linear(x, w)[:n]) for n in (8, 16, 24, 40))


def make_engine(model: Any = None, **settings: Any) -> TransformersEngine:
    """An engine over `model`, or over the default one."""
    return TransformersEngine(model or tiny_model(), **{"max_context": 400, **settings})


def prompt_of(n: int, seed: int = 0, stop_ids: tuple[int, ...] = ()) -> Prompt:
    """A random prompt of `n` tokens."""
    rng = random.Random(seed)
    return Prompt(tuple(rng.randrange(N_VOCAB) for _ in range(n)), stop_ids)


def gap(model: Any, generation: Generation, temperature: float = 1.0) -> float:
    """Largest difference between the engine's log-probs and those of a plain pass."""
    plain = plain_logprobs(model, generation, temperature)
    return float((plain - torch.tensor(generation.logprobs)).abs().max()) if len(plain) else 0.0


async def steps(n: int) -> None:
    """Let everything else run `n` times."""
    for _ in range(n):
        await asyncio.sleep(0)
