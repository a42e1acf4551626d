"""Models of Qwen3's shapes with random weights, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 151_936
#: Hidden size, feed-forward size, layers, query heads, key-value heads.
SHAPES = {
    "tiny": (64, 192, 2, 4, 2),
    "0.6b": (1024, 3072, 28, 16, 8),
    "1.7b": (2048, 6144, 28, 16, 8),
    "4b": (2560, 9728, 36, 32, 8),
    "8b": (4096, 12_288, 36, 32, 8),
}
DEVICES = ("cpu", "cuda")


def here() -> str:
    """The device that a benchmark takes if it is not told."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_model(name: str, device: str) -> Any:
    """The model, in bfloat16 on a GPU and in float32 on a CPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, inner, layers, heads, groups = SHAPES[name]
    config = Qwen3Config(
        vocab_size=VOCABULARY if name != "tiny" else 30_000, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=groups, head_dim=128,
        tie_word_embeddings=name not in ("4b", "8b"), max_position_embeddings=32_768, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)


def save(name: str, folder: Path, device: str) -> None:
    """Write the model to a folder, with a tokenizer of bytes and made-up words that knows all its ids."""
    from rlhf.training.policy.tokenizer import train_tokenizer

    model = make_model(name, device)
    n_vocab = int(model.config.vocab_size)
    tokenizer = train_tokenizer(["a b c"], vocab_size=300, max_context=4096)
    tokenizer.add_tokens([f" w{i}" for i in range(n_vocab - len(tokenizer))])
    model.config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
