"""Agents of other programs, through the gateway, with vLLM behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.build.engine import SHAPES
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.training.policy.model import Policy
from tests.gateway.talks import World, model, tokenizer
from tests.gateway.test_exact import check_exact
from tests.rollout.vllm.real_vllm import start_instance

pytest.importorskip("openai")
MAX_CONTEXT = 4096


def test_conversations_over_vllm_keep_every_sampled_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.of(model(head_dim=32), tokenizer(), None)

    async def start() -> VllmEngine:
        instance = start_instance(policy, tmp_path / "model", tmp_path / "engine.log", max_context=MAX_CONTEXT)
        engine = VllmEngine([instance], form="full", version=policy.version)
        shapes = {name: getattr(policy.model.config, name) for name in SHAPES}
        await engine.connect(shapes=shapes, n_vocab=policy.model.config.vocab_size, max_context=MAX_CONTEXT)
        return engine

    world = World(model=policy.model, starts=start)
    n_generations, n_forks, n_results = check_exact("chat", 6, monkeypatch, world, gap=1e-3)
    assert n_generations - 6 - n_forks > 5 and n_results > 0
