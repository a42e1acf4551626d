"""Compiled layers: the same update, and nobody else's calls are compiled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.training.backends.compiled import CompiledLayers, decoder_layers
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.lora import Lora
from rlhf.training.policy.model import FromScratch


def samples_of(n: int) -> list[Sample]:
    rng, found = np.random.default_rng(0), []
    for number in range(n):
        length = int(rng.integers(20, 60))
        mask = np.arange(length) >= 18
        ids = np.concatenate([np.arange(10, 28), rng.integers(0, 250, length - 18)])
        advantages = np.where(mask, rng.normal(), 0).astype(np.float32)
        found.append(Sample(ids.astype(np.int64), mask, np.zeros(length, np.float32), advantages, number, number // 4))
    return found


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.extended)])
@pytest.mark.parametrize("lora", [None, pytest.param(Lora(rank=4), marks=pytest.mark.extended)], ids=["full", "lora"])
def test_compiled_layers_make_the_same_update(
    lora: Lora | None, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three updates with different lengths, of one program; scores too, with recomputation once.

    What a layer is traced to is the same for every backend; the one that a GPU has takes minutes to compile for a CPU.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **keys: original(self, backend=backend, **keys))
    settings = FromScratch(hidden_size=32, n_layers=2, n_heads=2, head_dim=16, vocab_size=300, lora=lora)
    norms = {}
    for compiles in (False, True):
        policy = settings.build(0, ["a few words"])
        trainer = TorchTrainer(policy, AdamW(lr=1e-3), 10, recomputes=lora is not None, compiles=compiles)
        norms[compiles] = []
        for n in (8, 12, 9):
            samples = samples_of(n)
            [batches] = pack_minibatches(samples, 1, Reduction(), 300)
            norms[compiles].append(trainer.update(batches, PPOClip())["optimizer/grad_norm"])
        norms[compiles] += [
            float(row.sum()) for row in trainer.compute_logprobs(samples, temperature=1.0, max_tokens=300)
        ]
        assert all(layer._compiled_call_impl is None for layer in decoder_layers(policy.model))
        trainer.close()
    assert norms[True] == pytest.approx(norms[False], rel=1e-4)


def test_what_dynamo_is_told_holds_in_every_thread_that_uses_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(self: torch.nn.Module, **keys: Any) -> None:
        asked.append(keys)
        self._compiled_call_impl = self._call_impl

    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    policy = FromScratch(hidden_size=32, n_layers=2, n_heads=2, head_dim=16, vocab_size=300).build(0, ["a few words"])
    layers = CompiledLayers(policy.model)

    def specializes() -> bool:
        with layers.in_use():
            return bool(torch._dynamo.config.specialize_float)

    with ThreadPoolExecutor(1) as other:
        assert specializes() and other.submit(specializes).result()
    assert len(asked) == 2 and all(keys["recompile_limit"] > 8 and keys["dynamic"] for keys in asked)
