"""What vLLM samples, and what it says about it."""

from __future__ import annotations

import asyncio

from rlhf.data import SamplingParams
from tests.rollout.vllm.real_vllm import engine_over, full_weights, gaps, policy_like, prompt_of


def test_smoke(runner, full):
    policy = policy_like(3)

    async def go():
        engine = await engine_over(full, policy=policy)
        await engine.load(full_weights(policy, 1))
        params = SamplingParams(max_tokens=40, seed=5)
        found = await asyncio.gather(*(engine.generate(prompt_of(30 + i, i), params) for i in range(10)))
        await engine.close()
        return max(float(gaps(policy, g, params).max()) for g in found), found[0]

    gap, g = runner.run(go())
    print(gap, g)
    assert gap < 1e-3
