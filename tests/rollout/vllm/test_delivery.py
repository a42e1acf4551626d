"""Weights that arrive while generations run: every token is of the version that its generation names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf.data import Finish, Generation, PolicyWeights, SamplingParams
from rlhf.errors import EngineError
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.instance import InstanceDownError
from rlhf.training.policy.model import Policy
from tests.rollout.vllm.real_vllm import (
    Around,
    engine_over,
    full_weights,
    gaps,
    lora_policy,
    policy_like,
    prompt_of,
    weights,
)
from tests.tiers import tiered

MODES = ["drain", "keep", "abort_and_resume"]
N_CALLS = 16

#: Long enough that it is still running when weights arrive, and beyond.
LONG = SamplingParams(max_tokens=1500, temperature=0.9, seed=4)


def by_version(generation: Generation) -> list[int]:
    """The version `[T]` that sampled each token."""
    spans = generation.version_spans or ((generation.policy_version, len(generation.token_ids)),)
    return [version for version, n in spans for _ in range(n)]


def largest_gap(generation: Generation, policies: Sequence[Policy], params: SamplingParams = LONG) -> float:
    """Nats between each token's log-prob and that of the policy whose version sampled it; version 1 is the first."""
    every = torch.stack([gaps(policy, generation, params) for policy in policies])  # [versions, T]
    versions = torch.tensor(by_version(generation))
    return float(every.gather(0, versions[None] - 1).max())


async def sample(engine: VllmEngine, n: int = N_CALLS, params: SamplingParams = LONG) -> list[Generation]:
    """Prompts that share a prefix of some blocks of the cache."""
    prompts = [prompt_of(70 + i % 4) for i in range(n)]
    return await asyncio.gather(*(engine.generate(p, params, f"s{i}") for i, p in enumerate(prompts)))


async def sample_until(engine: VllmEngine, event: asyncio.Event) -> list[Generation]:
    """`sample`, again and again until the event, so that calls are running when it comes, however late."""
    found = await sample(engine)
    while not event.is_set():
        found += await sample(engine)
    return found


class Noticed(Around):
    """Says when weights begin to arrive."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.arriving = asyncio.Event()

    async def start_update(self) -> None:
        self.arriving.set()
        await self.inner.start_update()

    async def add_adapter(self, adapter: Any) -> None:
        self.arriving.set()
        await self.inner.add_adapter(adapter)


async def across_deliveries(
    inner: Any, policies: Sequence[Policy], **settings: Any
) -> tuple[list[Generation], list[Generation], list[Generation]]:
    """Calls begun before the second policy is delivered, those begun while it and more are, and those after it.

    Every token has the log-prob that the policy of its version gives it.
    """
    instance = Noticed(inner)
    engine = await engine_over(instance, policy=policies[0], **settings)
    try:
        await engine.load(weights_as(engine, policies[0], 1))
        instance.arriving = asyncio.Event()
        is_drained = settings.get("at_update") == "drain"  # nothing runs when weights arrive
        running = [asyncio.create_task(sample(engine) if is_drained else sample_until(engine, instance.arriving))]
        for version, policy in enumerate(policies[1:], start=2):
            await sample(engine, 1, replace(LONG, max_tokens=40))  # those before it have sampled as much by then
            delivery = asyncio.create_task(engine.load(weights_as(engine, policy, version)))
            await instance.arriving.wait()
            instance.arriving = asyncio.Event()
            running.append(asyncio.create_task(sample(engine, 4)))  # these begin while weights arrive
            await delivery
            assert engine.policy_version == version
        async with asyncio.timeout(60):
            first, *others = await asyncio.gather(*running)
            after = await sample(engine, 4, SamplingParams(max_tokens=20))
    finally:
        await engine.close()
    later = [g for group in others for g in group]
    assert max(largest_gap(g, policies) for g in first + later) < 1e-3
    # Nothing that older weights computed is used again, though the prompts are the same.
    assert {g.versions for g in after} == {(len(policies),)}
    assert max(largest_gap(g, policies, SamplingParams()) for g in after) < 1e-3
    return first, later, after


def weights_as(engine: VllmEngine, policy: Policy, version: int) -> PolicyWeights:
    return weights(policy, version) if engine.weights_form == "adapter" else full_weights(policy, version)


@pytest.mark.parametrize("at_update", tiered(MODES, "keep"))
def test_full_weights_arrive_while_generations_run(runner, full, at_update):
    policies = [policy_like(seed) for seed in (1, 2, 3)]
    first, later, _ = runner.run(across_deliveries(full, policies, at_update=at_update))
    found = first + later
    assert all(g.finish is Finish.LENGTH and len(g.token_ids) == LONG.max_tokens for g in found)
    assert [{g.policy_version for g in part} for part in (first, later)] == [{1}, {2, 3}]
    if at_update == "drain":
        assert not any(g.version_spans for g in found)
    else:  # the versions of a call are those it saw, in order, and the spans matter: other policies say otherwise
        assert any(g.versions[:2] == (1, 2) for g in first)
        assert all(list(g.versions) == sorted(set(g.versions)) for g in found)
        assert all(float(gaps(policies[0], g, LONG).max()) > 0.5 for g in first if len(g.versions) > 1)


@pytest.mark.parametrize("at_update", tiered(MODES, "abort_and_resume"))
def test_adapters_arrive_while_generations_run(runner, adapted, at_update):
    policies = [lora_policy(seed) for seed in (1, 2, 3)]
    first, later, _ = runner.run(across_deliveries(adapted, policies, at_update=at_update))
    assert all(len(g.token_ids) == LONG.max_tokens for g in first + later)
    assert {g.policy_version for g in first} == {1}
    if at_update == "abort_and_resume":
        assert any(g.versions[:2] == (1, 2) for g in first)
    else:  # they finish with the adapter they began with
        assert not any(g.version_spans for g in first + later)
        assert all(float(gaps(policies[1], g, LONG).max()) > 0.5 for g in first)


def test_a_merged_adapter_is_delivered_as_full_weights(runner, full):
    policies = [lora_policy(seed) for seed in (1, 2)]
    *_, after = runner.run(across_deliveries(full, policies, form="full"))
    assert min(float(gaps(policies[0], g, SamplingParams()).max()) for g in after) > 0.1


@pytest.mark.parametrize("kind", ["full", "adapted"])
def test_a_long_call_outlives_many_updates(runner, request, kind):
    policy = policy_like(1) if kind == "full" else lora_policy(1)

    instance = request.getfixturevalue(kind)

    async def go():
        engine = await engine_over(instance, policy=policy, at_update="abort_and_resume")
        try:
            await engine.load(weights(policy, 1))
            running = asyncio.create_task(sample(engine, 16))
            for version in range(2, 9):
                await asyncio.sleep(0.05)
                await engine.load(weights(policy, version))
            return await running
        finally:
            await engine.close()

    found = runner.run(go())
    assert max(len(g.versions) for g in found) > 5
    assert max(float(gaps(policy, g, LONG).max()) for g in found) < 1e-3  # the weights were the same all along


def test_a_model_larger_than_the_buffer_arrives_in_pieces(runner, full):
    policy = policy_like(6)

    async def go():
        # The embeddings alone take 58 kB, the whole model some 240 kB.
        engine = await engine_over(full, policy=policy, buffer_bytes=20_000)
        try:
            await engine.load(full_weights(policy, 1))
            return await sample(engine, 4)
        finally:
            await engine.close()

    assert max(float(gaps(policy, g, LONG).max()) for g in runner.run(go())) < 1e-3


def test_the_same_version_may_come_again_and_an_older_one_not(runner, full):
    policies = [policy_like(seed) for seed in (1, 2)]

    async def go():
        engine = await engine_over(full, policy=policies[0])
        try:
            await engine.load(full_weights(policies[0], 5))
            await engine.load(full_weights(policies[1], 5))
            found = await sample(engine, 2)
            with pytest.raises(EngineError, match="older than those in use"):
                await engine.load(full_weights(policies[0], 4))
            return [*found, *await sample(engine, 2)]
        finally:
            await engine.close()

    found = runner.run(go())
    assert {g.versions for g in found} == {(5,)}
    assert max(float(gaps(policies[1], g, LONG).max()) for g in found) < 1e-3


class BreaksOff(Around):
    """Takes every piece that is sent to it, and says the first times that its connection broke."""

    def __init__(self, inner: Any, n_breaks: int) -> None:
        super().__init__(inner)
        self.n_breaks = n_breaks

    async def put(self, place: int, data: bytes) -> None:
        await self.inner.put(place, data)
        self._break_off()

    async def call(self, method: str, *args: Any) -> list[Any]:
        found: list[Any] = await self.inner.call(method, *args)
        if method == "rlhf_write_adapter":
            self._break_off()
        return found

    def _break_off(self) -> None:
        self.n_breaks -= 1
        if self.n_breaks >= 0:
            raise InstanceDownError("the server does not answer", where=self.name, got="reset by peer")


@pytest.mark.parametrize("kind", ["full", "adapted"])
def test_a_piece_whose_connection_breaks_is_sent_again_a_few_times(runner, request, kind):
    policy = policy_like(1) if kind == "full" else lora_policy(1)
    instance = request.getfixturevalue(kind)

    async def go():
        engine = await engine_over(BreaksOff(instance, 4), policy=policy, delivery="http")
        await engine.load(weights(policy, 1))
        found = await sample(engine, 2)
        await engine.close()
        engine = await engine_over(BreaksOff(instance, 5), policy=policy, delivery="http")
        with pytest.raises(EngineError, match="the delivery failed") as told:
            await engine.load(weights(policy, 2))
        await engine.close()
        return found, told.value.got

    found, told = runner.run(go())
    assert max(float(gaps(policy, g, LONG).max()) for g in found) < 1e-3
    assert "reset by peer" in told
