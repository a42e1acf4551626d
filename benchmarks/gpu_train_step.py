"""Speed, memory and MFU of a training step on a GPU, against bare PyTorch on the same packed rows.

    python benchmarks/gpu_train_step.py [--model 0.6b] [--rows 1500] [--groups 8] [--budget 32768] [--recompute]
        [--arms rlhf eager lora compiled bare] [--profile FILE] [--json]

A random model of Qwen3's shape in bfloat16; made-up multi-turn rows in groups of 8 that share a prompt, `--rows` tokens
long on average and 8,192 at most. A step is everything from rows with advantages to new weights, all tokens counted:

- `rlhf`: `TorchTrainer` as a recipe has it: layers compiled, float32 masters, the clipped loss; `eager`: not compiled;
- `lora`: adapters of rank 16 on all linear layers, compiled;
- `compiled`: a plain loop: varlen flash attention, cross-entropy in chunks, fused AdamW in bfloat16, no masters, each
  layer compiled; `bare`: not compiled.

MFU is that of `rlhf.training.throughput`: 6 FLOPs a weight and token, 4 where the weight is frozen, causal attention
and the output layer on policy tokens, not what is computed twice, over the GPU's peak in bfloat16. Medians of
`--repeats` steps after warm-up with other lengths.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, make_model

GROUP, MAX_LENGTH = 8, 8192
ARMS = ("rlhf", "eager", "lora", "compiled", "bare")


def make_rows(n_groups: int, mean: int) -> list[dict[str, Any]]:
    """Rows of ids with the tokens that were sampled; a prompt for each group, then 3 to 24 turns."""
    rng, rows = np.random.default_rng(0), []
    median = max((mean - 277) / (2 * 8.6 * 1.2), 4)
    for group in range(n_groups):
        prompt = rng.integers(10, 30_000, int(max(32, rng.lognormal(np.log(256), 0.4)))).tolist()
        for attempt in range(GROUP):
            ids, mask = list(prompt), [False] * len(prompt)
            for _ in range(int(min(2 + rng.geometric(0.15), 24))):
                reply, seen = (int(max(4, rng.lognormal(np.log(median), 0.6))) for _ in range(2))
                ids += rng.integers(10, 30_000, reply + seen).tolist()
                mask += [True] * reply + [False] * seen
            last = 1 + max(i for i, sampled in enumerate(mask[:MAX_LENGTH]) if sampled)
            reward = float(rng.random() < 0.4) + 0.01 * attempt
            rows.append({"ids": ids[:last], "mask": mask[:last], "reward": reward, "group": group})
    return rows


def flops(model: Any, rows: list[dict[str, Any]]) -> float:
    from rlhf.training.throughput import ModelFlops

    found = ModelFlops.of(model)
    assert found is not None
    return found((len(row["ids"]) for row in rows), sum(sum(row["mask"]) for row in rows))


# --- the arms: each returns a step, a function of the tokens of a micro-batch that returns the gradient's norm ---

Step = Callable[[int], float]


def ours(arm: str, args: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[Step, Any]:
    from train_step import samples_of, scored

    from rlhf.batching.pack import pack_minibatches
    from rlhf.losses.ppo_clip import PPOClip
    from rlhf.losses.reduction import Reduction
    from rlhf.training.backends.optimizer import AdamW
    from rlhf.training.backends.torch import TorchTrainer
    from rlhf.training.policy.lora import Lora
    from rlhf.training.policy.model import FromScratch, Policy

    tokenizer = FromScratch(vocab_size=300).build(0, ["a few words"]).tokenizer
    policy = Policy.of(make_model(args.model, args.device), tokenizer, Lora(rank=16) if arm == "lora" else None)
    trainer = TorchTrainer(policy, AdamW(lr=1e-6, max_grad_norm=1e3), 100, args.recompute, arm != "eager")
    samples = scored(trainer, samples_of(rows), args.budget)

    def step(budget: int) -> float:
        [batches] = pack_minibatches(samples, 1, Reduction(), budget)
        return trainer.update(batches, PPOClip())["optimizer/grad_norm"]

    return step, policy.model


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies over n, with its gradients found in the forward pass, 4,096 tokens at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, targets: Any, n: int) -> Any:
        loss = hidden.new_zeros((), dtype=torch.float32)
        by_hidden, by_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for begin in range(0, len(hidden), 4096):
            piece, at = slice(begin, begin + 4096), targets[begin : begin + 4096, None]
            logits = (hidden[piece] @ weight.T).float()
            total = logits.logsumexp(-1)
            loss += (total - logits.gather(-1, at)[:, 0]).sum()
            by_logits = (logits - total[:, None]).exp_()
            by_logits.scatter_add_(-1, at, -torch.ones_like(at, dtype=torch.float32))
            short = (by_logits / n).to(weight.dtype)
            by_hidden[piece] = short @ weight
            exact = hidden.is_cuda
            by_weight += torch.mm(short.T, hidden[piece], out_dtype=torch.float32) if exact else short.T @ hidden[piece]
        ctx.save_for_backward(by_hidden, by_weight.to(weight.dtype))
        return loss / n

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * grads[0], by_weight * grads[0], None, None


SPANS: dict[str, Any] = {}


def span_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    cu, most = SPANS["cu"], SPANS["most"]
    return varlen_attn(q, k, v, cu, cu, most, most, scale=scaling, window_size=(-1, 0), enable_gqa=True)[None], None


def plain(arm: str, args: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[Step, Any]:
    from train_step import samples_of
    from transformers import AttentionInterface

    from rlhf.batching.pack import collate, pack

    AttentionInterface.register("spans", span_attention)
    model = make_model(args.model, args.device).train()
    model.config._attn_implementation = "spans"
    if args.recompute:
        model.gradient_checkpointing_enable()
    for layer in model.model.layers if arm == "compiled" else ():
        layer.compile(dynamic=True)
    optimizer, samples = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True), samples_of(rows)
    n_sampled = sum(s.n_policy_tokens for s in samples)

    def step(budget: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        for members in pack(samples, budget):
            batch = collate([samples[i] for i in members], np.ones(len(members)))
            lengths = batch.lengths.numpy()
            ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            SPANS.update(cu=ends.to(args.device), most=int(lengths.max()))
            places = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(args.device)
            mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=args.device)
            ids = batch.token_ids.to(args.device)[None]
            out = model.model(input_ids=ids, position_ids=places[None], attention_mask=mask, use_cache=False)
            hidden = out.last_hidden_state[0, batch.select.to(args.device)]
            weight, targets = model.get_output_embeddings().weight, batch.targets.to(args.device)
            ChunkedCrossEntropy.apply(hidden, weight, targets, n_sampled).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        optimizer.step()
        return float(norm)

    return step, model


def measure(arm: str, args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    from rlhf.training.throughput import peak_flops

    begin = time.perf_counter()
    step, model = (plain if arm in ("compiled", "bare") else ours)(arm, args, rows)
    work, peak = flops(model, rows), peak_flops(torch.cuda.get_device_name())
    for share in (1.0, 0.9, 0.95):
        step(int(args.budget * share))
    warm_s, seconds = time.perf_counter() - begin, []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(args.repeats):
        begin = time.perf_counter()
        step(args.budget)  # its result is a number, so all is done
        seconds.append(time.perf_counter() - begin)
    middle, n_tokens = statistics.median(seconds), sum(len(row["ids"]) for row in rows)
    if args.profile and arm == args.arms[0]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            step(args.budget)
        Path(args.profile).write_text(found.key_averages().table(sort_by="cuda_time_total", row_limit=40))
    return {
        "arm": arm, "s": middle, "quartiles_s": np.quantile(seconds, [0.25, 0.75]).tolist(), "warm_up_s": warm_s,
        "tokens_per_s": n_tokens / middle, "mfu": work / middle / peak if peak else None,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--rows", type=int, default=1500, help="mean tokens of a row")
    parser.add_argument("--groups", type=int, default=8, help=f"of {GROUP} rows each")
    parser.add_argument("--budget", type=int, default=32_768, help="tokens of a micro-batch")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["rlhf", "lora", "compiled"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recompute", action="store_true", help="activations, in the backward pass")
    parser.add_argument("--profile", help="file for a table of where the time of the first arm goes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU; benchmarks/train_step.py measures a step on a CPU")
        return
    sys.path.insert(0, str(Path(__file__).parent))
    args.device, rows, found = "cuda", make_rows(args.groups, args.rows), []
    sizes = [len(row["ids"]) for row in rows]
    name = torch.cuda.get_device_name()
    if not args.json:
        print(
            f"{name}, {args.model}, {len(rows)} rows of {np.mean(sizes):.0f} tokens, {sum(sizes):,} in all", flush=True
        )
        print(f"{'':<10}{'tokens/s':>10}{'MFU':>8}{'peak GB':>9}{'step s':>9}{'quartiles':>16}{'warm-up s':>11}")
    for arm in args.arms:
        try:
            found.append(measure(arm, args, rows))
        except torch.OutOfMemoryError as error:
            print(f"{arm:<10} out of memory: {str(error)[:100]}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        one = found[-1]
        if not args.json:
            mfu = "" if one["mfu"] is None else f"{one['mfu']:.1%}"
            low, high = one["quartiles_s"]
            print(
                f"{arm:<10}{one['tokens_per_s']:>10,.0f}{mfu:>8}{one['peak_gb']:>9.1f}{one['s']:>9.3f}"
                f"{low:>8.3f}{high:>8.3f}{one['warm_up_s']:>11.1f}",
                flush=True,
            )
    rates = {one["arm"]: one["tokens_per_s"] for one in found}
    ratios = {arm: rates["rlhf"] / rate for arm, rate in rates.items()} if "rlhf" in rates else {}
    if args.json:
        print(json.dumps({"device": name, "model": args.model, "arms": found, "rlhf_against": ratios}))
    else:
        print("rlhf against:", ", ".join(f"{arm} {ratio:.2f}x" for arm, ratio in ratios.items()))


if __name__ == "__main__":
    main()
