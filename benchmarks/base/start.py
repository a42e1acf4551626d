"""Initial weights of the base model: random, except for a previous-token head and an induction head.

    python benchmarks/base/start.py --out runs/base/start
    python benchmarks/base/start.py --halve model --out base      # a trained model in bfloat16, as it is shipped

The pair copies from the context (Olsson et al., arXiv 2209.11895): a head of the first layer writes each token's
predecessor beside it, and a head of the second attends to tokens whose predecessor is the present one. A model of this
size does not form it within ten million tokens, so it is written into the weights, all of which are trained afterwards;
Trockman & Kolter (arXiv 2305.09828) initialise attention by its trained form too. The tokenizer is that of the base.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
#: Shape: width, layers, heads and their width, width of the feed-forward layers.
WIDTH, LAYERS, HEADS, HEAD, INNER = 192, 5, 4, 64, 512
#: Base of the rotary frequencies: most pairs of a head turn too slowly to tell positions apart, and match content.
THETA = 1e6
#: Value of the residual's last dimension in every token, relative to the others: heads that look at positions read it.
CONSTANT = 4.0
#: Weights of the fastest rotary pairs in the previous-token head.
PAIRS = (0.4, 0.3, 0.2, 0.1)
#: Scale of what the previous-token head writes, and of the token that the induction head copies.
WRITTEN, COPIED = 0.06, 0.2
#: Weights of the query and key norms of both heads' layers, and of the last norm: how peaked attention and logits are.
PEAKED, SURE = 1.4, 3.0
#: Layer of the induction head; the previous-token head is in the first.
INDUCTION = 1


def write_previous(layer: Any, n: int) -> None:
    """Make head 0 attend to the previous token, and write its dimensions 0 to `n` into dimensions `n` to 2 `n`."""
    attention, half = layer.self_attn, HEAD // 2
    frequencies = THETA ** (-torch.arange(half) / half)
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight[:HEAD] *= 0.1
        for pair, weight in enumerate(PAIRS):
            size = 6.0 * weight**0.5
            attention.q_proj.weight[pair, -1] = size
            attention.k_proj.weight[pair, -1] = size * torch.cos(frequencies[pair])
            attention.k_proj.weight[half + pair, -1] = size * torch.sin(frequencies[pair])
        attention.v_proj.weight[:HEAD] = 0.0
        attention.v_proj.weight[:n, :n] = torch.eye(n)
        attention.o_proj.weight[:, :HEAD] = 0.0
        attention.o_proj.weight[n : 2 * n, :n] = torch.eye(n) * WRITTEN


def write_induction(layer: Any, n: int) -> None:
    """Make head 0 attend to tokens whose predecessor is the present token, and write those tokens' embeddings."""
    attention, half = layer.self_attn, HEAD // 2
    slow = [*range(half - n // 2, half), *range(HEAD - n // 2, HEAD)]
    with torch.no_grad():
        for projection, first in ((attention.q_proj, 0), (attention.k_proj, n)):
            projection.weight[:HEAD] = 0.0
            projection.weight[slow, torch.arange(first, first + n)] = 1.0
        attention.v_proj.weight[:HEAD] = 0.0
        rest = [*range(n), *range(2 * n, 2 * n + HEAD - n)]
        attention.v_proj.weight[torch.arange(HEAD), rest] = 1.0
        attention.o_proj.weight[:, :HEAD] = 0.0
        attention.o_proj.weight[rest, torch.arange(HEAD)] = COPIED


def build(seed: int) -> Any:
    """Model with the two heads; other weights are drawn by `seed`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=3072,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, -1] = CONSTANT * config.initializer_range
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * LAYERS) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * LAYERS) ** -0.5)
        for at in (0, INDUCTION):
            attention = model.model.layers[at].self_attn
            for norm in (attention.q_norm, attention.k_norm):
                norm.weight.fill_(PEAKED)
        model.model.norm.weight.fill_(SURE)
    n = HEAD // 2
    write_previous(model.model.layers[0], n)
    write_induction(model.model.layers[INDUCTION], n)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs") / "base" / "start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--halve", type=Path, help="folder of a model to write in bfloat16 instead")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.halve is not None:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(asked.halve, dtype=torch.bfloat16).save_pretrained(asked.out)
        return
    build(asked.seed).save_pretrained(asked.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "base" / name, asked.out / name)


if __name__ == "__main__":
    main()
