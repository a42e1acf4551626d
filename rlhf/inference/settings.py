"""Engine settings of a recipe. Torch-free: an engine is built only by `rlhf.build.engine`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.capabilities import Capability, CapabilityView
from rlhf.checking import CheckContext, Problem, no_effect, no_model
from rlhf.inference.model_config import ModelConfig
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TransformersSettings:
    """The embedded engine: in process, sharing the policy's parameters with the trainer."""

    shares_policy: ClassVar[bool] = True

    max_sessions: Annotated[int, Field(ge=1)] = 128
    """Episodes whose KV cache is kept at a time."""
    max_batch_tokens: Annotated[int, Field(ge=1)] = 4096
    """Maximum tokens of one forward pass; longer prompts are prefilled in chunks."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GuidedSettings(TransformersSettings):
    """The embedded engine, whose logits two smaller models correct: ℓ + λ (ℓ_tuned − ℓ_base).

    What training has changed in a small model is added to a larger one of the same tokenizer that was not trained.
    Log-probs of attempts are those of the sum, which is what was sampled from.

    Source: RAST, arXiv 2506.15710.
    """

    shares_policy: ClassVar[bool] = False

    tuned: str
    """Folder or hub name of the small model after training; its tokenizer must be the policy's."""
    base: str
    """Folder or hub name of that model before training."""
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """λ, the weight of the difference."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse folders without a model, and rollouts by copies of the policy or by adapters of roles."""
        for key in ("tuned", "base"):
            yield from no_model(getattr(self, key), context.at(key), "name the folder that a run keeps its policy in")
        if context.recipe.sharded or context.recipe.asynchrony.is_on:
            yield Problem(
                "this engine uses the trainer's own module, unsharded and between updates",
                where=context.at("kind"),
                got="guided, with a sharded policy or asynchronous rollouts",
                expected="trainer: {kind: torch} and no asynchrony",
                do="use engine: {kind: transformers}",
            )


class EngineCapabilities(CapabilityView):
    """Optional attributes of an engine's settings."""

    shares_policy = Capability(False, bool)
    """True if it samples with the trainer's own weights."""
    lora = Capability("merged", str)
    """Form in which it takes an adapter; full weights where it does not say."""
    tensor_parallel = Capability(1, int)
    """GPUs of one copy of the model."""


def shares_policy(engine: object) -> bool:
    """True if an engine of these settings samples with the trainer's own weights."""
    return EngineCapabilities(engine).shares_policy


#: Others vLLM refuses, or replaces by the least one.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0

#: Keys that say how to start a vLLM; servers that run already were started with options of their own.
OF_START = (
    *("max_sessions", "max_batch_tokens", "kv_cache_gb", "gpu_memory_utilization", "tensor_parallel"),
    *("eager", "compile", "sleep", "kv_cache_dtype", "quantization"),
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VllmSettings:
    """vLLM: one engine in a process of its own, or servers that run already. Has a copy of the policy's weights."""

    shares_policy: ClassVar[bool] = False

    servers: tuple[str, ...] = ()
    """Addresses of running servers, such as http://127.0.0.1:8000, see `rlhf serve`; empty starts an engine."""
    delivery: Literal["auto", "cuda_ipc", "broadcast", "shared_memory", "http"] = "auto"
    """Transport of full weights: CUDA IPC on one GPU, NCCL to other GPUs (gloo without GPUs), shared memory of this
    machine, or HTTP; auto takes the first possible, broadcast on this machine only."""
    at_update: Literal["drain", "keep", "abort_and_resume"] = "drain"
    """Generations in progress when weights arrive: finish them first, continue with the new weights, or abort and
    resume them."""
    lora: Literal["auto", "adapter", "merged"] = "auto"
    """Delivery of an adapter: separate from the base, or merged into full weights, which samples faster; auto merges on
    a GPU of this machine, unless roles have adapters."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the engine's copy; auto is the policy's."""
    max_sessions: Annotated[int, Field(ge=1)] = 128
    """Maximum concurrent requests; more wait."""
    max_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Maximum tokens of one forward pass; longer prompts are prefilled in chunks."""
    kv_cache_gb: Annotated[float, Field(gt=0)] | None = None
    """KV cache in 1e9 bytes; null is what `max_sessions` contexts need, or what is available."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Share of a GPU's memory for the engine, weights included; the trainer needs the rest."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel size: GPUs per copy of the model."""
    eager: Literal["auto"] | bool = "auto"
    """Run without CUDA graphs: faster start, slower sampling; auto uses graphs on a GPU."""
    compile: bool = False
    """Compile the model in addition to CUDA graphs: a minute or more at the first start, less with a warm cache."""
    sleep: bool = False
    """Release GPU memory while the policy is updated: weights move to host memory, the KV cache is dropped."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV cache; fp8 holds twice as many tokens and increases the mismatch of log-probs with the
    trainer, measured at every step by `loss/sampler_logprob_diff_mean` and `loss/sampler_kl_k3`. From Ada and Hopper
    on."""
    quantization: Literal["fp8"] | None = None
    """Quantise the weights of linear layers to 8 bits on arrival; increases the mismatch further. From Ada and Hopper
    on."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Timeout of one generation, in seconds."""
    delivery_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Timeout of one weight delivery, in seconds."""
    buffer_mb: Annotated[int, Field(ge=1)] = 256
    """Transfer buffer for full weights, in 2^20 bytes."""
    canary_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Maximum log-prob difference of engine and trainer after a delivery, in nats; null measures it, at least 1e-3 in
    float32."""

    def __post_init__(self) -> None:
        if self.compile and self.eager is True:
            raise ValueError("compile has no effect with eager: true, which runs the model uncompiled")
        if not self.servers:
            if self.delivery == "http":
                raise ValueError("delivery: http needs servers: an engine that the run starts shares this memory")
            return
        defaults = {f.name: f.default for f in fields(self)}
        for name in OF_START:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} has no effect with servers: set it where the servers are started")
        if not all(server.startswith(("http://", "https://")) for server in self.servers):
            raise ValueError("servers takes addresses that begin with http:// or https://")
        if len({server.rstrip("/") for server in self.servers}) < len(self.servers):
            raise ValueError("servers names an address twice")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse to say how adapters are delivered where there are none, and temperatures that vLLM does not take."""
        recipe = context.recipe
        sampling = [(f"stages[{i}]", stage) for i, stage in enumerate(recipe.stages)]
        sampling += [
            (f"{at}.{key}", getattr(s, key, None)) for at, s in sampling for key in ("rejection_sampling", "pairs")
        ]
        for path, part in (*sampling, ("evaluation", recipe.evaluation)):
            value = getattr(part, "temperature", 1.0)
            if value > _MAX_TEMPERATURE or 0 < value < _MIN_TEMPERATURE:
                yield Problem(
                    "vLLM does not sample at this temperature",
                    where=f"{path}.temperature",
                    got=str(value),
                    expected=f"{_MIN_TEMPERATURE} to {_MAX_TEMPERATURE}, or 0 for greedy evaluations",
                    do="change it, or use engine: {kind: transformers}",
                )
        if self.lora != type(self)().lora and context.recipe.policy.lora is None:
            yield no_effect(context.at("lora"), self.lora, "the policy has no adapter, see policy.lora")

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse adapters on servers of several processes: only the delivering process knows their names."""
        if self.servers and context.recipe.policy.lora is not None and self.lora != "merged":
            yield Problem(
                "an unmerged adapter on servers needs a single process",
                where=context.at("lora"),
                got=f"{self.lora}, with {len(self.servers)} servers, and {n} processes were started",
                expected="merged",
                do="set engine.lora: merged, which delivers full weights, or start one process",
            )


def kv_bytes_per_token(config: Any, n_bytes: int) -> int:
    """Bytes of keys and values of one token, in all layers.

    Args:
        config: of the text model, Hugging Face's.
        n_bytes: of one number.
    """
    own = ModelConfig(config)
    return 2 * int(config.num_hidden_layers) * own.n_key_value_heads * own.head_width * n_bytes
