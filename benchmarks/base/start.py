"""Initial weights of the base model: random, except for a previous-token head and an induction head.

    python benchmarks/base/start.py --out runs/base/start

The pair copies from the context (Olsson et al., arXiv 2209.11895): a head of the first layer writes each token's
predecessor beside it, and a head of the second attends to tokens whose predecessor is the present one. The base's
second edition formed no such pair in its whole training, so it is written into the weights, all of which are trained
afterwards; Trockman & Kolter (arXiv 2305.09828) initialise attention by its trained form too. Shape and tokenizer are
those of the base.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

BASE = Path(__file__).resolve().parent.parent.parent / "base"
#: Value of the residual's last dimension in every token, relative to the others: heads that look at positions read it.
CONSTANT = 4.0
#: Weights of the fastest rotary pairs in the previous-token head, and the size of its queries and keys.
PAIRS, SIZE = (0.4, 0.3, 0.2, 0.1), 6.0
#: Scale of what the previous-token head writes, and of the token that the induction head copies.
WRITTEN, COPIED = 0.06, 0.2
#: Weights of the query and key norms of both heads' layers, and of the last norm: how peaked attention and logits are.
PEAKED, SURE = 1.4, 3.0


def build() -> Any:
    """The model: head 0 of the first layer is the previous-token head, head 0 of the second the induction head."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(BASE, dtype=torch.float32)
    model = Qwen3ForCausalLM(config)
    n = config.head_dim // 2
    with torch.no_grad():
        model.model.embed_tokens.weight[:, -1] = CONSTANT * config.initializer_range
        for layer in model.model.layers:
            for written in (layer.self_attn.o_proj, layer.mlp.down_proj):
                written.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
        first, second = (layer.self_attn for layer in model.model.layers[:2])
        for norm in (first.q_norm, first.k_norm, second.q_norm, second.k_norm):
            norm.weight.fill_(PEAKED)
        model.model.norm.weight.fill_(SURE)
        match_previous(first)
        copy(first, range(n), range(n, 2 * n), WRITTEN)
        match_predecessor(second)
        embedded = [*range(n), *range(2 * n, 3 * n)]
        copy(second, embedded, embedded, COPIED)
    return model


def match_previous(attention: Any) -> None:
    """Make head 0 attend to the token before: its fastest rotary pairs agree at a distance of one."""
    width, theta = attention.head_dim, attention.config.rope_parameters["rope_theta"]
    half = width // 2
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[:width] *= 0.1
    for pair, weight in enumerate(PAIRS):
        size, angle = SIZE * weight**0.5, torch.tensor(theta ** (-pair / half))
        attention.q_proj.weight[pair, -1] = size
        attention.k_proj.weight[pair, -1] = size * torch.cos(angle)
        attention.k_proj.weight[half + pair, -1] = size * torch.sin(angle)


def match_predecessor(attention: Any) -> None:
    """Make head 0 attend to tokens whose predecessor is the present token, by its slow rotary pairs."""
    width = attention.head_dim
    n = width // 2
    slow = [*range(n // 2, n), *range(width - n // 2, width)]
    for projection, first in ((attention.q_proj, 0), (attention.k_proj, n)):
        projection.weight[:width] = 0.0
        projection.weight[slow, torch.arange(first, first + n)] = 1.0


def copy(attention: Any, read: Sequence[int], written: Sequence[int], scale: float) -> None:
    """Make head 0 add the dimensions `read` of the token attended to, times `scale`, to the dimensions `written`."""
    for projection in (attention.v_proj.weight, attention.o_proj.weight.T):
        projection[: attention.head_dim] = 0.0
    rows = torch.arange(len(read))
    attention.v_proj.weight[rows, list(read)] = 1.0
    attention.o_proj.weight[list(written), rows] = scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs") / "base" / "start")
    asked = parser.parse_args()
    shutil.copytree(BASE, asked.out, ignore=shutil.ignore_patterns("*.safetensors", "README.md"), dirs_exist_ok=True)
    build().save_pretrained(asked.out)


if __name__ == "__main__":
    main()
