"""The guided engine: logits by definition, log-probs of what was sampled, delivery, and what is refused."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.build.engine import make_publisher, start_engine
from rlhf.data import Generation, Prompt, SamplingParams
from rlhf.errors import ModelError, RecipeError
from rlhf.inference.embedded.guided import GuidedEngine
from rlhf.recipe import load
from rlhf.training.policy.model import FromScratch
from tests.rollout.tiny_models import N_VOCAB, make_engine, prompt_of, tiny_model
from tests.training.tiny import SAID


def guided(weight: float, **settings: Any) -> GuidedEngine:
    """A model corrected by two of another family, one with fewer tokens than the other two."""
    guides = (tiny_model("qwen2-mha", seed=1), tiny_model("llama-mqa-tied", seed=2))
    return GuidedEngine(tiny_model(), guides=guides, weight=weight, max_context=400, **settings)


@torch.no_grad()
def by_definition(generation: Generation, weight: float) -> torch.Tensor:
    """Log-probs of sampled tokens by plain passes of the three models."""
    ids = torch.tensor([generation.full_ids])
    own, tuned, base = (
        tiny_model(*named).eval()(ids).logits[0]
        for named in (("qwen3-gqa-tied",), ("qwen2-mha", "eager", 1), ("llama-mqa-tied", "eager", 2))
    )
    logp = (own + weight * (tuned - base)).log_softmax(-1)[-generation.n_tokens - 1 : -1]
    return logp.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]


async def turns(engine: GuidedEngine, number: int) -> list[Generation]:
    """A conversation that grows, beside others: prefixes are shared, pieces of prompts computed, slots change hands."""
    rng, found = random.Random(number), []
    ids = [5] * 20 + [rng.randrange(N_VOCAB) for _ in range(rng.randint(1, 40))]
    for turn in range(3):
        params = SamplingParams(max_tokens=rng.randint(2, 12), seed=10 * number + turn)
        found.append(await engine.generate(Prompt(tuple(ids)), params, session=f"s{number}"))
        ids = [*found[-1].full_ids, *(rng.randrange(N_VOCAB) for _ in range(9))]
    return found


@pytest.mark.parametrize("limits", [{}, {"max_sessions": 3, "max_batch_tokens": 30}], ids=["roomy", "narrow"])
def test_log_probs_are_those_of_the_sum(limits: dict[str, int]) -> None:
    engine = guided(0.7, **limits)

    async def play() -> list[list[Generation]]:
        return await asyncio.gather(*(turns(engine, i) for i in range(6)))

    for generation in (g for found in asyncio.run(play()) for g in found):
        expected = by_definition(generation, 0.7)
        assert torch.tensor(generation.logprobs).sub(expected).abs().max() < 5e-5
    assert engine.stats.n_cached_tokens > 100 and not engine.shares_policy
    assert engine.cache_bytes > 2 * engine._cache.n_bytes
    asyncio.run(engine.sleep())
    assert engine.cache_bytes == 0


def test_worked_example_and_no_weight() -> None:
    # Logits (1, 0), tuned (0, 2), base (0, 1) and λ = .5: (1, .5).
    own, tuned, base = (torch.tensor(x) for x in ([1.0, 0.0], [0.0, 2.0], [0.0, 1.0]))
    assert (own + 0.5 * (tuned - base)).tolist() == [1.0, 0.5]
    params = SamplingParams(max_tokens=20, seed=4)
    plain, other = (asyncio.run(e.generate(prompt_of(30), params)) for e in (make_engine(), guided(0.0)))
    assert plain.token_ids == other.token_ids and plain.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert asyncio.run(guided(1.0).generate(prompt_of(30), params)).token_ids != plain.token_ids


RECIPE = """
policy: {kind: from_scratch, hidden_size: 16, n_layers: 1, n_heads: 1, max_context: 256}
environment: {kind: countdown}
rewards: {solved: {kind: outcome}}
engine: {kind: guided, tuned: TUNED, base: BASE, weight: 2.0}
stages: [{kind: policy_gradient, steps: 1}]
"""


def test_a_recipe_builds_it_and_delivery_is_proven_without_guides(tmp_path: Path) -> None:
    made = [
        FromScratch(hidden_size=size, n_layers=1, n_heads=1, max_context=256).build(size, SAID) for size in (16, 8, 8)
    ]
    for policy, name in zip(made[1:], ("tuned", "base"), strict=True):
        policy.save(tmp_path / name)
    path = tmp_path / "guided.yaml"
    path.write_text(RECIPE.replace("TUNED", str(tmp_path / "tuned")).replace("BASE", str(tmp_path / "base")))
    recipe = load(path)

    async def delivered() -> tuple[int, int]:
        engine = await start_engine(recipe, made[0])
        assert isinstance(engine, GuidedEngine)
        await make_publisher(recipe, made[0], engine).publish()
        generation = await engine.generate(Prompt((3, 4, 5)), SamplingParams(max_tokens=4))
        return engine.policy_version, generation.n_tokens

    assert asyncio.run(delivered()) == (made[0].version, 4)
    other = FromScratch(hidden_size=8, n_layers=1, n_heads=1, max_context=256).build(0, ["other words"])
    other.save(tmp_path / "base2")
    path.write_text(RECIPE.replace("TUNED", str(tmp_path / "tuned")).replace("BASE", str(tmp_path / "base2")))
    with pytest.raises(ModelError, match="would misread"):
        asyncio.run(start_engine(load(path), made[0]))


def test_folders_without_models_and_rollouts_ahead_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "guided.yaml"
    path.write_text(RECIPE.replace("TUNED", "./nothing").replace("BASE", "./nothing"))
    with pytest.raises(RecipeError, match="no model in this folder"):
        load(path)
