"""Speed of the vLLM rollout engine on a GPU, beside vLLM's own `LLM.generate`, in one run.

    python benchmarks/gpu_rollout.py [--model 0.6b] [--episodes 256] [--turns 4] [--repeats 3]
        [--arms rlhf raw adapter compiled]

The episodes and the two loads of `benchmarks/rollout.py` with longer texts: 256 tokens of first prompt, then in every
turn 64 sampled tokens (varied load: 21 to 213, and 50 to 500 ms in the environment) and 64 observation tokens; a random
model of Qwen3's shape in bfloat16.

- `rlhf`: `engine: {kind: vllm}` as it is by default, with CUDA graphs; an adapter is merged into full weights there;
- `compiled`: the same with `compile: true`;
- `adapter`: the same with `lora: adapter` and an adapter of rank 16 on all linear layers, delivered before;
- `raw`: `LLM.generate` with vLLM's own defaults, compiled and with CUDA graphs, a batch for each turn.

Each arm is a process of its own; all start at once and stay, and take turns within each repeat. Medians over the
repeats, and quartiles of the ratios of the first arm to the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import shapes
import torch
from rollout import Load, Sizes, make_load, play, play_raw, save_tokenizer

from rlhf.inference.vllm.start import StartOptions, engine_environment

ARMS = ("rlhf", "raw", "adapter", "compiled")
RANK = 16


def options_of(arm: str, folder: str, dtype: str, given: argparse.Namespace, n_cached: int) -> StartOptions:
    """How an arm's vLLM is started: `n_cached` bytes for keys and values, so that nothing is evicted."""
    return StartOptions(
        folder, given.max_context, dtype, given.episodes, 8192, kv_cache_bytes=n_cached,
        compile=arm == "compiled", lora_rank=RANK if arm == "adapter" else 0,
    )  # fmt: skip


def serve_raw(pipe: Any, options: StartOptions) -> None:
    """Process of `raw`: plays a load whenever one arrives, and answers with the seconds."""
    if not torch.cuda.is_available():  # where vLLM's own defaults take every core
        os.environ.update(engine_environment())
    from vllm import LLM

    own = ("worker_extension_cls", "weight_transfer_config", "compilation_config", "block_size")
    arguments = {name: value for name, value in options.arguments().items() if name not in own}
    llm = LLM(**arguments)
    pipe.send(None)
    while (load := pipe.recv()) is not None:
        llm.reset_prefix_cache()
        pipe.send(play_raw(llm, load))


def serve(pipe: Any, options: StartOptions, model: str, device: str, n_vocab: int) -> None:
    """Process of an arm of ours."""
    from rlhf.data import PolicyWeights
    from rlhf.inference.vllm.engine import VllmEngine
    from rlhf.inference.vllm.local import LocalInstance
    from rlhf.training.publisher import adapter_config, adapter_parameters

    instance = LocalInstance.start(options)
    form: Any = "adapter" if options.lora_rank else "full"
    with asyncio.Runner() as runner:
        engine = VllmEngine([instance], form=form, dtype=getattr(torch, options.dtype))
        runner.run(
            engine.connect(shapes={}, n_vocab=n_vocab, max_context=options.max_context, lora_rank=options.lora_rank)
        )
        if options.lora_rank:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
            policy = get_peft_model(shapes.make_model(model, device), config)
            weights = PolicyWeights(1, "", lambda: adapter_parameters(policy), adapter_config(policy))
            runner.run(engine.load(weights))
            del policy
        pipe.send(None)
        while (load := pipe.recv()) is not None:
            runner.run(instance.drop_cache())
            begin = time.perf_counter()
            runner.run(play(engine, load))
            pipe.send(time.perf_counter() - begin)
        runner.run(engine.close())


def cache_bytes(config: Any, loads: dict[str, Load], itemsize: int) -> int:
    """Keys and values of all episodes at their ends, and a quarter more."""
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    n_tokens = max(load.n_tokens + sum(len(ids) for episode in load.said for ids in episode) for load in loads.values())
    return int(1.25 * a_token * n_tokens)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    sizes = Sizes(given.episodes, 256, 64, 64)
    loads = {name: make_load(given.turns, name == "varied", sizes) for name in ("equal", "varied")}
    context = multiprocessing.get_context("spawn")
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.make_model(given.model, given.device)
        dtype, config = str(model.dtype).removeprefix("torch."), model.config
        n_cached = cache_bytes(config, loads, model.dtype.itemsize)
        model.save_pretrained(folder)
        save_tokenizer(Path(folder))
        del model
        pipes, processes, begin = {}, [], time.perf_counter()
        for arm in given.arms:
            options = options_of(arm, folder, dtype, given, n_cached)
            pipes[arm], theirs = context.Pipe()
            if arm == "raw":
                process = context.Process(target=serve_raw, args=(theirs, options))
            else:
                process = context.Process(
                    target=serve, args=(theirs, options, given.model, given.device, config.vocab_size)
                )
            processes.append(process)
            process.start()
            theirs.close()  # so that a process that ends is heard as EOFError
        for arm, pipe in list(pipes.items()):
            try:
                pipe.recv()
                print(f"{arm} is ready after {time.perf_counter() - begin:.0f} s", flush=True)
            except EOFError:
                print(f"{arm} did not start", flush=True)
                del pipes[arm]
        for repeat in range(-1, given.repeats):  # the first warms up
            for name, load in loads.items():
                for arm, pipe in pipes.items():
                    pipe.send(load)
                    found = pipe.recv()
                    print(f"{repeat} {name} {arm} {load.n_tokens / found:,.0f} tokens/s", flush=True)
                    if repeat >= 0:
                        seconds.setdefault((name, arm), []).append(found)
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join(10)
            process.kill()
    return summary(seconds, loads, given.arms[0])


def summary(seconds: dict[tuple[str, str], list[float]], loads: dict[str, Load], first: str) -> dict[str, Any]:
    """Median rate of each arm under each load, and the quartiles of the first arm's over it."""
    rows: dict[str, Any] = {}
    for (name, arm), values in seconds.items():
        row = rows[f"{name} {arm}"] = {"tokens_per_s": loads[name].n_tokens / float(np.median(values))}
        if arm != first and (name, first) in seconds:
            ratios = np.array(values) / np.array(seconds[name, first])
            row["first_over_this"] = np.quantile(ratios, [0.25, 0.5, 0.75]).round(3).tolist()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=shapes.SHAPES, default="0.6b")
    parser.add_argument("--device", choices=shapes.DEVICES, default=shapes.here())
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="the first is compared to the rest")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"{os.cpu_count()} cores"
    print(f"{name}, {given.model}, {given.episodes} episodes of {given.turns} turns", flush=True)
    rows = measure(given)
    if given.json:
        print(json.dumps({"device": name, "model": given.model, "rows": rows}))
        return
    for key, row in rows.items():
        low, middle, high = row.get("first_over_this", (0.0, 0.0, 0.0))
        tail = f"   {given.arms[0]} is {middle:.2f} x this, quartiles {low:.2f} and {high:.2f}" if middle else ""
        print(f"{key:18s}{row['tokens_per_s']:10,.0f} tokens/s{tail}")


if __name__ == "__main__":
    main()
