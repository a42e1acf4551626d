"""Seconds to deliver weights to a running vLLM engine, against a plain copy of the same bytes in memory, in one run.

    OMP_NUM_THREADS=1 python benchmarks/delivery.py [--json] [--repeats 5] [--sizes 2 100]

For a random Qwen3 model of about 2 and of about 100 million parameters in float32: full weights (pause, send, load,
prove, drop caches, resume), and an adapter of rank 16 on all linear layers (write, load, prove, switch). Each goes
through shared memory to an engine of one's own, and over HTTP to a server that is treated as if it were on another
machine, over this machine's loopback. Every delivery has other values. Medians over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import shapes
import torch
from rollout import save_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhf.data import PolicyWeights
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.local import LocalInstance
from rlhf.inference.vllm.server import ServerInstance
from rlhf.inference.vllm.start import StartOptions, server_arguments, server_environment
from rlhf.training.publisher import adapter_config, adapter_parameters, parameters

#: Shapes by millions of parameters.
SHAPES = {
    2: {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6},
    100: {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12},
}
RANK, MAX_CONTEXT = 16, 512


def make_model(millions: int) -> Any:
    torch.manual_seed(0)
    shape = SHAPES[millions]
    config = Qwen3Config(
        **shape,
        vocab_size=512 if millions < 10 else 4096,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        num_key_value_heads=shape["num_attention_heads"] // 3,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def change(tensors: Iterable[torch.Tensor]) -> None:
    """Other values, as an optimiser would leave them."""
    for tensor in tensors:
        tensor.mul_(1.001)


def copy_s(tensors: list[torch.Tensor]) -> float:
    """Seconds to copy the tensors from memory to memory that has been touched before."""
    targets = [torch.zeros_like(t) for t in tensors]
    settle()
    begin = time.perf_counter()
    for target, tensor in zip(targets, tensors, strict=True):
        target.copy_(tensor)
    settle()
    return time.perf_counter() - begin


def settle() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def full(model: Any, folder: str, repeats: int, way: str) -> dict[str, float]:
    """Deliver every parameter `repeats` times."""

    def make(version: int) -> PolicyWeights:
        change(model.parameters())
        return PolicyWeights(version, "", lambda: parameters(model))

    seconds = deliver(folder, "full", make, repeats, way, model.dtype)
    return summary(seconds, [p.detach() for _, p in parameters(model)], repeats)


def adapter(model: Any, folder: str, repeats: int, way: str) -> dict[str, float]:
    """Deliver an adapter `repeats` times."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False))
    own = [p for n, p in wrapped.named_parameters() if ".lora_" in n]

    def make(version: int) -> PolicyWeights:
        change(own)
        return PolicyWeights(version, "", lambda: adapter_parameters(wrapped), adapter_config(wrapped))

    seconds = deliver(folder, "adapter", make, repeats, way, model.dtype)
    wrapped.unload()  # the model is as it was
    return summary(seconds, [p.detach() for p in own], repeats)


def deliver(folder: str, form: Any, make: Any, repeats: int, way: str, dtype: torch.dtype) -> list[float]:
    """Start an engine and load what `make` gives for version 1, 2, ...; the first is not counted."""
    name, rank = str(dtype).removeprefix("torch."), RANK if form == "adapter" else 0
    options = StartOptions(folder, MAX_CONTEXT, name, 16, 2048, kv_cache_bytes=2**28, lora_rank=rank)
    seconds = []
    with running(options, way) as (make_instance, delivery), asyncio.Runner() as runner:
        engine = VllmEngine([make_instance()], form=form, delivery=delivery, dtype=dtype)
        runner.run(engine.connect(shapes={}, n_vocab=16, max_context=MAX_CONTEXT))
        for version in range(repeats + 1):
            weights = make(version)
            settle()
            begin = time.perf_counter()
            runner.run(engine.load(weights))
            seconds.append(time.perf_counter() - begin)
        runner.run(engine.close())
    return seconds[1:]


@contextmanager
def running(options: StartOptions, way: str) -> Iterator[tuple[Callable[[], Any], Any]]:
    """An engine's client factory, and the way of delivery."""
    if way != "http":
        yield lambda: LocalInstance.start(options), "auto" if way == "memory" else way
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += server_arguments(options, host="127.0.0.1", port=port, name="model")
    root = str(Path(__file__).resolve().parents[1])
    variables = os.environ | server_environment() | {"PYTHONPATH": root}
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(answers(url, process))
        yield lambda: ServerInstance(url), "http"
    finally:
        process.terminate()
        process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def answers(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server is there."""
    client = ServerInstance(url)
    while not await client.is_up():
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        await asyncio.sleep(0.2)
    await client.close()


def summary(delivery: list[float], tensors: list[torch.Tensor], repeats: int) -> dict[str, float]:
    ours, plain = statistics.median(delivery), statistics.median([copy_s(tensors) for _ in range(repeats)])
    n_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return {"delivery_s": ours, "copy_s": plain, "ratio": ours / plain, "n_bytes": n_bytes}


FORMS = {"full": full, "adapter": adapter}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 100], choices=sorted(SHAPES))
    parser.add_argument("--model", nargs="+", default=[], choices=shapes.SHAPES, help="in the place of --sizes")
    parser.add_argument("--device", choices=shapes.DEVICES, default=shapes.here(), help="of --model")
    parser.add_argument("--ways", nargs="+", default=["memory", "http"], choices=["memory", "broadcast", "http"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for size in args.model or args.sizes:
        model = shapes.make_model(size, args.device).eval() if args.model else make_model(size)
        n = sum(p.numel() for p in model.parameters())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            save_tokenizer(Path(folder))
            for name, way in product(args.forms, args.ways):
                label = f"{size if args.model else f'{size}M'}_{name}_{way}"
                row = found[label] = FORMS[name](model, folder, args.repeats, way)
                if not args.json:
                    print(
                        f"{n / 1e6:6.1f} M parameters, {name:8s}{way:10s} {row['n_bytes'] / 1e6:6.1f} MB in "
                        f"{row['delivery_s'] * 1e3:7.1f} ms, a copy in memory {row['copy_s'] * 1e3:7.2f} ms: "
                        f"{row['ratio']:.1f} x",
                        flush=True,
                    )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
