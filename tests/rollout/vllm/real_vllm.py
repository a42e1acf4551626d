"""Tiny policies that vLLM can run, engines over them, and instances that go wrong to order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.build.engine import SHAPES, save_merged
from rlhf.data import Generation, PolicyWeights, Prompt, SamplingParams
from rlhf.errors import EngineError
from rlhf.inference.embedded.sampling import SamplingRows, distributions
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.local import LocalInstance
from rlhf.inference.vllm.start import StartOptions
from rlhf.training.policy.model import FromScratch, Lora, Policy
from rlhf.training.publisher import adapter_config, adapter_parameters, parameters

MAX_CONTEXT = 4096

#: Makes every tiny policy know the same words.
TEXTS = ("alpha beta gamma", "the poison waits", "omega") * 10


def policy_like(seed: int = 0, **settings: Any) -> Policy:
    """A policy of some 50 thousand parameters whose next-token distributions are far from uniform."""
    shape: dict[str, Any] = {
        "hidden_size": 48,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "max_context": MAX_CONTEXT,
        "vocab_size": 300,
        "initializer_range": 0.2,
    }
    return FromScratch(**{**shape, **settings}).build(seed, TEXTS)


def lora_policy(seed: int = 0, **settings: Any) -> Policy:
    """The policy of seed 0 under an adapter that `seed` draws, and that matters."""
    policy = policy_like(0, lora=Lora(rank=4), **settings)
    move(policy, seed)
    return policy


@torch.no_grad()
def move(policy: Policy, seed: int, by: float = 0.1) -> None:
    """An optimiser's step, so to speak: changes all that is trained, in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * by)


def start_instance(policy: Policy, folder: Path, log: Path | None = None, **options: Any) -> LocalInstance:
    """vLLM in a process of its own, with the policy's weights, adapters left out."""
    return LocalInstance.start(start_options(policy, folder, **options), log)


def start_options(policy: Policy, folder: Path, **options: Any) -> StartOptions:
    """How to start it; writes the policy into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_merged(policy, folder)
    settings: dict[str, Any] = {
        "max_context": MAX_CONTEXT,
        "dtype": "float32",
        "max_sequences": 64,
        "max_batch_tokens": 128,  # prompts are computed in pieces
        "kv_cache_bytes": 32 * 2**20,
        "lora_rank": 4 if policy.is_lora else 0,
    }
    return StartOptions(model=str(folder), **{**settings, **options})


class Around:
    """An instance that hands everything on to another, which it leaves running; subclasses go wrong."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.name = inner, "vllm"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def close(self) -> None:
        """Whoever started it stops it."""


async def engine_over(*instances: Any, policy: Policy, max_context: int = MAX_CONTEXT, **settings: Any) -> VllmEngine:
    """An engine over instances that belong to someone else."""
    settings = {"form": "adapter" if policy.is_lora else "full", "version": policy.version, **settings}
    engine = VllmEngine([i if isinstance(i, Around) else Around(i) for i in instances], **settings)
    config = policy.model.config
    try:
        await engine.connect(
            shapes={name: getattr(config, name) for name in SHAPES},
            n_vocab=config.vocab_size,
            max_context=max_context,
            lora_rank=4 if engine.weights_form == "adapter" else 0,
        )
    except EngineError:
        await engine.close()
        raise
    return engine


def full_weights(policy: Policy, version: int) -> PolicyWeights:
    """The policy in full, adapters merged."""
    return PolicyWeights(version, "", lambda: parameters(policy.model))


def adapter_weights(policy: Policy, version: int) -> PolicyWeights:
    """The policy's adapter."""
    model = policy.model
    return PolicyWeights(version, "", lambda: adapter_parameters(model), adapter_config(model))


def weights(policy: Policy, version: int) -> PolicyWeights:
    """The policy as an engine of its own form takes it."""
    return adapter_weights(policy, version) if policy.is_lora else full_weights(policy, version)


@torch.no_grad()
def plain_logprobs(policy: Policy, generation: Generation, params: SamplingParams) -> torch.Tensor:
    """Log-probs `[T]` of the sampled tokens in the distribution sampled from, by one plain pass of the policy."""
    begin, n = len(generation.prompt.token_ids), len(generation.token_ids)
    ids = torch.tensor([generation.full_ids])
    logits = policy.model(ids, use_cache=False).logits[0, begin - 1 : -1].float()
    rows = SamplingRows(
        temperature=np.full(n, params.temperature),
        top_p=np.full(n, params.top_p),
        top_k=np.full(n, params.top_k),
        uniform=np.zeros(n),
    )
    return distributions(logits, rows).gather(1, ids[0, begin:, None])[:, 0]


def gaps(policy: Policy, generation: Generation, params: SamplingParams) -> torch.Tensor:
    """Nats `[T]` between what the engine says of every sampled token and what a plain pass says."""
    return (plain_logprobs(policy, generation, params) - torch.tensor(generation.logprobs)).abs()


def prompt_of(n: int, seed: int = 0, stop_ids: Sequence[int] = ()) -> Prompt:
    """A random prompt of `n` tokens."""
    ids = np.random.default_rng(seed).integers(0, 256, n)
    return Prompt(tuple(ids.tolist()), tuple(stop_ids))


async def until(done: Any, limit_s: float = 30.0) -> None:
    """Wait until `done()` holds."""
    async with asyncio.timeout(limit_s):
        while not done():
            await asyncio.sleep(0.005)
