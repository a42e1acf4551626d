"""Start of a vLLM engine process: options, environment, and errors of a failed start."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf.errors import EngineError, MissingPackageError, ModelError
from rlhf.extras import missing

#: The worker methods of `rlhf.inference.vllm.worker`, by the name vLLM takes them under.
WORKER = "rlhf.inference.vllm.worker.Worker"

#: The way weights travel, registered by that module.
MEMORY = "rlhf_memory"

#: Tokens per block of the key/value cache. vLLM's default on a CPU, 128, finds few prefixes again.
BLOCK_SIZE = 32

#: Tokens of the largest batch that a CUDA graph is captured of; in larger ones its launch is the smaller part.
_LARGEST_GRAPH = 512

#: Most bytes of an engine's log that are looked through.
_MOST_SAID = 2**26

#: Ranks that vLLM has room for; a smaller adapter uses the next one.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options to start an instance; see `rlhf.inference.settings.VllmSettings` for most.

    Attributes:
        model: folder in Hugging Face format.
        max_context: most tokens of prompt and generation.
        dtype: number format, such as float32.
        max_sequences: most requests that run at a time; more wait.
        lora_rank: rank of the adapters that will come; 0 for none.
        n_adapters: how many belong to one version of the policy.
        kv_cache_bytes: memory for keys and values; None leaves it to `gpu_memory_utilization`.
        eager: whether the model runs without CUDA graphs; None is without them on a CPU and with them on a GPU.
        compile: whether the model is compiled too, where it is not eager.
        kv_cache_dtype: number format of keys and values; auto is `dtype`.
        quantization: of weights, as vLLM names it; None for none.
        sleep: whether it can give the GPU's memory back for a while.
        texts: whether stop strings may be asked for, which takes the tokenizer; ids do without it, and start sooner.
    """

    model: str
    max_context: int
    dtype: str
    max_sequences: int
    max_batch_tokens: int
    lora_rank: int = 0
    n_adapters: int = 1
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.4
    tensor_parallel: int = 1
    eager: bool | None = None
    compile: bool = False
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    sleep: bool = False
    texts: bool = True
    transfer: str = MEMORY

    @property
    def is_eager(self) -> bool:
        """True if the model runs without CUDA graphs."""
        return self.eager if self.eager is not None else not torch.cuda.is_available()

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's engine."""
        found: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.max_context,
            "max_num_seqs": self.max_sequences,
            "max_num_batched_tokens": max(self.max_batch_tokens, self.max_sequences),
            "enforce_eager": self.is_eager,
            "block_size": BLOCK_SIZE,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER,
            "weight_transfer_config": {"backend": self.transfer},
            "tensor_parallel_size": self.tensor_parallel,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "generation_config": "vllm",
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
        }
        if self.kv_cache_dtype != "auto":
            found["kv_cache_dtype"] = self.kv_cache_dtype
        if self.quantization is not None:
            found["quantization"] = self.quantization
        if self.sleep:
            found["enable_sleep_mode"] = True
        if not self.texts:
            found["skip_tokenizer_init"] = True
        if not self.is_eager:
            found["compilation_config"] = self._graphs()
        if self.kv_cache_bytes is not None:
            found["kv_cache_memory_bytes"] = self.kv_cache_bytes
        if self.lora_rank:
            rank = next((r for r in _LORA_RANKS if r >= self.lora_rank), self.lora_rank)
            # Two at a time: the one in use, and the next.
            n_loras = 2 * self.n_adapters  # those in use, and those that arrive
            found |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": n_loras, "max_cpu_loras": 2 * n_loras}
        return found

    def _graphs(self) -> dict[str, Any]:
        """Batch sizes of the captured CUDA graphs: all that the concurrent requests can make, and few more."""
        largest = min(2 * self.max_sequences, _LARGEST_GRAPH, max(self.max_batch_tokens, self.max_sequences))
        sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, _LARGEST_GRAPH + 1, 32)]
        found = {"cudagraph_capture_sizes": sorted({size for size in sizes if size < largest} | {largest})}
        # Without a compiler vLLM cuts the graphs of batches with prompts at the attention while it captures them.
        return found if self.compile else {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE", **found}


def server_arguments(options: StartOptions, *, host: str, port: int, name: str) -> list[str]:
    """The command line of vLLM's own server, with the routes that `ServerInstance` needs."""
    found = options.arguments()
    del found["disable_log_stats"]  # whoever samples from it asks for its load
    for key in found.keys() & {"weight_transfer_config", "compilation_config"}:
        found[key] = json.dumps(found[key])
    arguments = ["--host", host, "--port", str(port), "--served-model-name", name, "--enable-scale-out"]
    for key, value in found.items():
        flag = "--" + key.replace("_", "-")
        if key == "use_tqdm_on_load":
            arguments.append("--no-use-tqdm-on-load")
        elif value is True:
            arguments.append(flag)
        elif value is not False:
            arguments += [flag, str(value)]
    return arguments


def server_environment(*, compile: bool = False) -> dict[str, str]:
    """Variables that a server wants: those of an engine, and leave to be given weights and adapters."""
    leave = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    return engine_environment(compile=compile) | leave


def engine_environment(*, compile: bool = False) -> dict[str, str]:
    """Variables that an engine process wants: on a CPU one process with few threads, and no compiler.

    Args:
        compile: whether the model is compiled, see `StartOptions`.
    """
    # Its lines go to a file and are the progress of the start; importing TRL sets the variable to ERROR.
    level = "DEBUG" if os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG" else "INFO"
    found = {"VLLM_LOGGING_LEVEL": level, "PYTHONWARNINGS": "ignore"}
    if torch.cuda.is_available():
        found["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "0" if compile else "1"
        # A process that is forked from one that has looked for a GPU cannot use it.
        found["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    else:
        # Without a compiler a step costs the same at these sizes, and the start takes seconds instead of a minute.
        found |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
        found |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return found


def missing_vllm(error: ImportError) -> MissingPackageError:
    """Error of a missing vLLM, with the package to install."""
    what = "vLLM is not installed" if error.name == "vllm" else "vLLM cannot be imported"
    return missing("vllm", what, "engine.kind vllm", error)


def start_error(text: str, options: StartOptions, log: Path | None) -> EngineError | ModelError:
    """Error of a failed start, with the reason found in vLLM's output."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line and "EngineCore failed" not in line]
    causes = [line for line in lines if "Engine core initialization failed" not in line] or lines
    # Without a line that names an error it is pydantic's: what is wrong, then all arguments.
    got = causes[-1][-300:] if causes else " ".join(text.partition("[type=")[0].split())[:300]
    where = f"engine.kind vllm, model {options.model}"
    see = f"; everything vLLM said is in {log}" if log else ""
    if "KV cache" in got or "cache blocks" in got:
        key = "engine.gpu_memory_utilization" if torch.cuda.is_available() else "engine.kv_cache_gb"
        return EngineError(
            "there is too little memory for the KV cache", where=where, got=got, hint=f"raise {key}{see}"
        )
    if "head_dim" in got or "head size" in got.lower():
        return ModelError(
            "vLLM has no attention kernel for heads this wide",
            where=where,
            got=got,
            expected="on a CPU 32, 64, 80, 96, 112, 128, 160, 192, 224 or 256",
            hint=f"set policy.head_dim, or use engine.kind transformers{see}",
        )
    return ModelError(
        "vLLM cannot run the model", where=where, got=got, hint=f"use engine.kind transformers, or another model{see}"
    )


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started inside; afterwards all are as before.

    vLLM sets some more for itself, such as LOCAL_WORLD_SIZE and LD_PRELOAD, that mean something to other programs.
    """
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def output_into(log: Path | None) -> Iterator[Any]:
    """Send what this process and those started inside write to the terminal into a file instead.

    Yields a function that returns the text so far. Processes started inside keep writing to the file.
    """
    with open(log, "ab+") if log else tempfile.TemporaryFile() as file:
        begin = file.seek(0, os.SEEK_END)
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

        def said() -> str:  # at its own place, as the file's is where the next line is written
            return os.pread(file.fileno(), _MOST_SAID, begin).decode(errors="replace")

        try:
            yield said
        finally:
            with suppress(ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            for number, copy in enumerate(kept, start=1):
                os.dup2(copy, number)
                os.close(copy)
