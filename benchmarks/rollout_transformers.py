"""Speed and exactness of the embedded rollout engine against `model.generate`, which encodes every context anew.

    OMP_NUM_THREADS=1 python benchmarks/rollout_transformers.py [--json] [--repeats 3] [--turns 6 20]

One run plays 64 episodes: 32 tokens of first prompt, then in every turn 24 sampled tokens and 16 observation tokens,
with a random Qwen3 model of 2.4 million parameters. `generate` gets the whole left-padded context in every turn and
samples with its own key-value cache, without log-probs. The two take turns within each repeat, so that a busy
neighbour slows both; medians over the repeats are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhf.data import Generation, Prompt, SamplingParams
from rlhf.inference.embedded.engine import TransformersEngine

N_EPISODES, N_PROMPT, N_OBSERVATION, N_NEW, N_VOCAB = 64, 32, 16, 24, 512


@dataclass
class Result:
    """Medians of one number of turns."""

    turns: int
    engine_tokens_per_s: float
    generate_tokens_per_s: float
    ratio: float
    ratio_cpu: float
    outside_forward: float
    max_logprob_difference: float


def make_model(attention: str) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=N_VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config).eval()


def observations(turns: int) -> Any:
    """Return what the environment says: `[episodes, turns + 1, tokens]`, the first entry is the prompt."""
    random = np.random.default_rng(0)
    sizes = [N_PROMPT] + [N_OBSERVATION] * (turns - 1)
    return [[random.integers(1, N_VOCAB, size).tolist() for size in sizes] for _ in range(N_EPISODES)]


async def play(engine: TransformersEngine, said: Any) -> list[Generation]:
    """All episodes at once; the last generation of each, whose ids are the whole episode."""

    async def episode(number: int) -> Generation:
        ids: tuple[int, ...] = ()
        generation = None
        for turn, observation in enumerate(said[number]):
            ids = (*ids, *observation)
            params = SamplingParams(max_tokens=N_NEW, seed=1000 * number + turn)
            generation = await engine.generate(Prompt(ids), params, session=str(number))
            ids = generation.full_ids
        await engine.release(str(number))
        assert generation is not None
        return generation

    return await asyncio.gather(*(episode(i) for i in range(N_EPISODES)))


@torch.inference_mode()
def generate(model: Any, said: Any) -> None:
    """Play all episodes turn by turn with `model.generate` on the whole left-padded context."""
    contexts: list[list[int]] = [[] for _ in said]
    for turn in range(len(said[0])):
        for context, episode in zip(contexts, said, strict=True):
            context.extend(episode[turn])
        width = max(map(len, contexts))
        ids = torch.tensor([[0] * (width - len(c)) + c for c in contexts], device=model.device)
        mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts], device=model.device)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=N_NEW, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0
        )
        for context, row in zip(contexts, out[:, width:].tolist(), strict=True):
            context.extend(row)


@torch.inference_mode()
def logprob_difference(model: Any, generations: list[Generation]) -> float:
    """Largest difference between the engine's log-probs and those of one plain pass over each finished episode."""
    worst = 0.0
    for generation in generations[:16]:
        ids = torch.tensor([generation.full_ids])
        begin = len(generation.prompt.token_ids)
        logp = model(ids, use_cache=False).logits[0, begin - 1 : -1].log_softmax(-1)
        plain = logp.gather(1, ids[0, begin:, None])[:, 0]
        worst = max(worst, float((plain - torch.tensor(generation.logprobs)).abs().max()))
    return worst


def timed(function: Any) -> tuple[float, float, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    value = function()
    return time.perf_counter() - wall, time.process_time() - cpu, value


def measure(turns: int, repeats: int) -> Result:
    said = observations(turns)
    plain, packed = make_model("sdpa"), make_model("sdpa")
    rows, worst = [], 0.0
    asyncio.run(play(TransformersEngine(packed, max_context=2048), observations(1)))  # both warm up
    generate(plain, observations(1))
    for _ in range(repeats):
        engine = TransformersEngine(packed, max_context=2048, max_sessions=N_EPISODES)
        wall, cpu, generations = timed(lambda e=engine: asyncio.run(play(e, said)))
        wall_plain, cpu_plain, _ = timed(lambda: generate(plain, said))
        outside = 1 - engine.stats.forward_s / wall
        rows.append((1 / wall, 1 / wall_plain, wall_plain / wall, cpu_plain / cpu, outside))
        worst = max(worst, logprob_difference(plain, generations))
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    n_tokens = N_EPISODES * N_NEW * turns
    return Result(turns, medians[0] * n_tokens, medians[1] * n_tokens, *medians[2:], worst)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, nargs="+", default=[6, 20])
    args = parser.parse_args()
    n_parameters = sum(p.numel() for p in make_model("sdpa").parameters())
    results = [measure(turns, args.repeats) for turns in args.turns]
    if args.json:
        about = {
            "n_parameters": n_parameters,
            "n_threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
        print(json.dumps({**about, "results": [vars(r) for r in results]}))
        return
    print(f"{n_parameters / 1e6:.2f} M parameters, {N_EPISODES} episodes, {torch.get_num_threads()} thread(s)")
    for r in results:
        print(
            f"{r.turns:3d} turns: engine {r.engine_tokens_per_s:6.0f} tokens/s, "
            f"generate {r.generate_tokens_per_s:6.0f}, ratio {r.ratio:.2f} (CPU time {r.ratio_cpu:.2f}), "
            f"outside the model {r.outside_forward:.1%}, "
            f"max |Δlogp| {r.max_logprob_difference:.1e}"
        )


if __name__ == "__main__":
    main()
