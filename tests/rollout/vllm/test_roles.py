"""Adapters of roles in vLLM: each call is read by the adapter of its role, at every version, and each is proven."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.data import Generation, PolicyWeights, SamplingParams
from rlhf.errors import DeliveryError, EngineError
from rlhf.evaluation.store import read_trajectories
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.local import LocalInstance
from rlhf.training.policy.lora import Lora
from rlhf.training.policy.model import Policy
from rlhf.training.publisher import Publisher, adapter_config, adapter_parameters, token_logprobs
from tests.rollout.vllm.real_vllm import Around, engine_over, move, policy_like, prompt_of, start_instance
from tests.training import runs

ROLES = ("", "memory", "plan")
SHORT = SamplingParams(max_tokens=24, seed=3)


def policy_of_roles(seed: int) -> Policy:
    """The policy of seed 0 under three adapters that `seed` draws."""
    made = policy_like(0, lora=Lora(rank=4, roles=ROLES[1:]))
    move(made, seed)
    return made


def weights_of(policy: Policy, version: int, **others: Policy) -> PolicyWeights:
    """All adapters of a policy; of some roles those of another."""
    walks = {r: lambda r=r: adapter_parameters(others.get(r, policy).model, r) for r in ROLES}  # type: ignore[misc]
    return PolicyWeights(version, "", walks.pop(""), adapter_config(policy.model), walks)


@pytest.fixture(scope="module")
def instance(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalInstance]:
    folder = tmp_path_factory.mktemp("roles")

    async def start() -> LocalInstance:
        return start_instance(policy_of_roles(0), folder / "model", folder / "engine.log", n_adapters=len(ROLES))

    found = runner.run(start())
    yield found
    runner.run(found.close())


async def sample(engine: VllmEngine) -> list[Generation]:
    """The same prompts in every role, all at once."""
    prompts = [replace(prompt_of(30 + i), adapter=role) for i in range(4) for role in ROLES]
    return await asyncio.gather(*(engine.generate(p, SHORT, f"s{i // 3}") for i, p in enumerate(prompts)))


def gap(policy: Policy, generation: Generation, role: str | None = None) -> float:
    """Nats between what was sampled and what the adapter of its role, or of another, says of it."""
    prompt = generation.prompt
    adapter = prompt.adapter if role is None else role
    scored = token_logprobs(policy.model, prompt.token_ids, generation.token_ids, adapter)
    return float(np.abs(scored - np.array(generation.logprobs)).max())


def test_every_role_is_read_by_its_own_adapter_at_every_version(
    runner: asyncio.Runner, instance: LocalInstance
) -> None:
    policies = [policy_of_roles(seed) for seed in (1, 2, 3)]

    async def go() -> None:
        engine = await engine_over(instance, policy=policies[0])
        for version, policy in enumerate(policies, start=1):
            await engine.load(weights_of(policy, version))
            found = await sample(engine)
            assert {g.policy_version for g in found} == {version}
            assert max(gap(policy, g) for g in found) < 1e-3
            others = [gap(policy, g, role) for g in found for role in ROLES if role != g.prompt.adapter]
            assert min(others) > 0.1
        with pytest.raises(EngineError, match="no adapter of this role was delivered") as told:
            await engine.generate(replace(prompt_of(8), adapter="plam"), SHORT)
        assert told.value.expected == "'', 'memory', 'plan'"
        await engine.close()

    runner.run(go())


def test_adapters_arrive_while_roles_are_asked(runner: asyncio.Runner, instance: LocalInstance) -> None:
    policies = [policy_of_roles(seed) for seed in (4, 5)]

    async def go() -> list[Generation]:
        engine = await engine_over(instance, policy=policies[0], at_update="keep")
        await engine.load(weights_of(policies[0], 1))
        running = asyncio.create_task(sample(engine))
        await asyncio.sleep(0.05)
        await engine.load(weights_of(policies[1], 2))
        found = [*await running, *await sample(engine)]
        await engine.close()
        return found

    found = runner.run(go())
    assert max(gap(policies[g.policy_version - 1], g) for g in found) < 1e-3
    assert {g.policy_version for g in found[12:]} == {2}


class Swaps(Around):
    """Loads for one role what the other should have had."""

    async def add_adapter(self, adapter: Any) -> None:
        self.first = getattr(self, "first", adapter)
        await self.inner.add_adapter(replace(adapter, path=self.first.path))


def test_an_adapter_in_the_place_of_another_is_noticed(runner: asyncio.Runner, instance: LocalInstance) -> None:
    policy = policy_of_roles(6)

    async def go(inner: Any, weights: Policy, trainer: Policy) -> str:
        engine = await engine_over(inner, policy=policy)
        publisher = Publisher(trainer, engine)
        publisher._weights = lambda: weights_of(policy, 1, plan=weights)  # type: ignore[method-assign]
        trainer.version = 1
        try:
            with pytest.raises(DeliveryError) as told:
                await publisher.publish()
        finally:
            await engine.close()
        return told.value.where

    # What was sent for `plan` is another's, and what is loaded for all roles is the shared one.
    assert "canary of the adapter plan" in runner.run(go(instance, policy_of_roles(7), policy))
    assert "canary of the adapter memory" in runner.run(go(Swaps(instance), policy, policy))


@pytest.mark.extended
def test_a_planner_with_an_adapter_of_its_own_trains_with_vllm(tmp_path: Path) -> None:
    gradient = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 4, "group_size": 4}
    recipe = runs.write(
        tmp_path,
        [{**gradient, "advantage": {"kind": "two_level"}, "optimizer": {"lr": 5.0e-2}}],
        policy={**runs.BASE["policy"], "head_dim": 32, "max_context": 512, "lora": {"rank": 4, "roles": ["plan"]}},
        agent={"kind": "planner", "plan_system": "", "executor": {"system": ""}},
        rewards={**runs.BASE["rewards"], "short": {"kind": "overlong", "max_tokens": 14, "buffer": 13}},
        engine={"kind": "vllm"},
        evaluation={"n_tasks": 8},
    )
    done = runs.run(recipe, tmp_path / "run")
    assert max(runs.curve(done.folder, "delivery/canary_gap")) < 1e-3
    assert max(runs.curve(done.folder, "loss/sampler_logprob_diff_max")) < 1e-3
    assert min(runs.curve(done.folder, "delivery/canary_moved")[-2:]) > 0
    found = [r.trajectory for r in read_trajectories(done.folder / "trajectories", phase="train")]
    assert {(g.role, g.prompt.adapter) for t in found for g in t.generations} == {("", ""), ("plan", "plan")}
