"""The embedded engine as a server: the tokens of this process, deliveries while it samples, and lies found out."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("aiohttp")

import uvicorn

from rlhf.build.engine import SHAPES
from rlhf.data import Prompt, SamplingParams
from rlhf.errors import DeliveryError, EngineError
from rlhf.inference.embedded.engine import TransformersEngine
from rlhf.inference.embedded.paused import PausableEngine
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.server import ServerInstance
from rlhf.inference.vllm.together import FollowingEngine
from rlhf.processes import free_port
from rlhf.serving.embedded import Served
from rlhf.training.policy.model import FromScratch, Policy
from rlhf.training.publisher import Publisher
from tests.training.tiny import SAID

pytestmark = pytest.mark.slow

CONTEXT = 256
PROMPT = Prompt(range(3, 40))


def policy_of(seed: int = 0) -> Policy:
    shape: dict[str, Any] = {"hidden_size": 32, "n_layers": 2, "n_heads": 2, "head_dim": 16, "vocab_size": 300}
    return FromScratch(**shape, max_context=CONTEXT, initializer_range=0.2).build(seed, SAID * 10)


def shapes(policy: Policy) -> dict[str, Any]:
    return {name: getattr(policy.model.config, name) for name in SHAPES}


@asynccontextmanager
async def server(policy: Policy, kind: type[PausableEngine] = PausableEngine, port: int = 0) -> AsyncIterator[str]:
    """The address of a server with a copy of a policy's weights."""
    engine = kind(copy.deepcopy(policy.model), max_context=CONTEXT)
    port = port or free_port()
    app = Served(engine, shapes(policy)).application()
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan="off"))
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.should_exit = running.force_exit = True
        await task


@asynccontextmanager
async def engine_on(url: str, policy: Policy, kind: type[VllmEngine] = VllmEngine, **how: Any) -> AsyncIterator[Any]:
    engine = kind([ServerInstance(url)], **how)
    await engine.connect(shapes=shapes(policy), n_vocab=policy.model.config.vocab_size, max_context=CONTEXT)
    try:
        yield engine
    finally:
        await engine.close()


@torch.no_grad()
def move(policy: Policy, by: float = 0.05) -> None:
    for parameter in policy.model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * by)
    policy.version += 1


@pytest.mark.parametrize("delivery", ["shared_memory", "http"])
def test_a_server_samples_what_the_engine_of_this_process_does(delivery: Any) -> None:
    async def both() -> list[Any]:
        policy = policy_of()
        found: list[Any] = []
        async with server(policy_of(seed=1)) as url, engine_on(url, policy, delivery=delivery) as engine:
            publisher = Publisher(policy, engine)
            for _ in range(2):
                await publisher.publish()
                here = TransformersEngine(copy.deepcopy(policy.model), max_context=CONTEXT)
                for seed in range(3):
                    params = SamplingParams(24, seed=seed)
                    generations = [await one.generate(PROMPT, params, f"s{seed}") for one in (engine, here)]
                    await here.release(f"s{seed}")  # as the server does: prefixes are computed anew
                    found.append([(g.token_ids, g.logprobs, g.finish) for g in generations])
                await here.close()
                move(policy)
        return found

    for served, here in asyncio.run(both()):
        assert served == here


@pytest.mark.parametrize("at_update", ["drain", "keep", "abort_and_resume"])
def test_weights_arrive_while_it_samples(at_update: Any) -> None:
    async def play() -> Any:
        policy = policy_of()
        async with server(policy) as url, engine_on(url, policy, at_update=at_update) as engine:
            publisher = Publisher(policy, engine)
            await publisher.publish()
            call = asyncio.create_task(engine.generate(PROMPT, SamplingParams(200), "long"))
            await asyncio.sleep(0.1)
            assert not call.done()
            move(policy)
            await publisher.publish()
            return await call

    found = asyncio.run(play())
    assert found.n_tokens == 200
    versions = dict(found.version_spans or ((found.policy_version, 200),))
    assert set(versions) == ({0} if at_update == "drain" else {0, 1}) and sum(versions.values()) == 200


class Deaf(PausableEngine):
    """Says that weights arrived, and keeps the old ones."""

    def put(self, tensors: Any) -> None:
        own, self._own = self._own, copy.deepcopy(self._own)
        super().put(tensors)
        self._own = own


def test_a_server_that_keeps_old_weights_is_caught_at_the_delivery() -> None:
    async def play() -> None:
        policy = policy_of()
        async with server(policy, Deaf) as url, engine_on(url, policy) as engine:
            publisher = Publisher(policy, engine)
            await publisher.publish()  # they are the same
            move(policy)
            await publisher.publish()

    with pytest.raises(DeliveryError, match="the engine is stale"):
        asyncio.run(play())


def test_a_follower_samples_what_another_delivered_and_nothing_else() -> None:
    async def play() -> None:
        policy, port = policy_of(), free_port()
        async with server(policy, port=port) as url, engine_on(url, policy, FollowingEngine) as follower:
            async with engine_on(url, policy) as engine:
                move(policy)
                await Publisher(policy, engine).publish()
                await follower.follow(engine.sender, engine.policy_version, engine.policy_fingerprint)
                params = SamplingParams(8, seed=3)
                one, other = [await by.generate(PROMPT, params, "s") for by in (engine, follower)]
                assert one.token_ids == other.token_ids and other.policy_version == policy.version
            async with engine_on(url, policy) as stranger:
                await Publisher(policy, stranger).publish()
                with pytest.raises(EngineError, match="no vLLM instance is left"):
                    await follower.generate(PROMPT, params, "t")
                await follower.follow(stranger.sender, stranger.policy_version, stranger.policy_fingerprint)
                assert (await follower.generate(PROMPT, params, "t")).token_ids == one.token_ids

    asyncio.run(play())
