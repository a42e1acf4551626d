"""The embedded engine as a server: the tokens of this process, deliveries while it samples, and lies found out."""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
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
from rlhf.inference.vllm.delivery import Deliverer
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.instance import InstanceDownError, NoInstanceError
from rlhf.inference.vllm.multi_rank import FollowingEngine
from rlhf.inference.vllm.replica_set import ReplicaSet
from rlhf.inference.vllm.server import ServerInstance
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
                    found.append([(g.token_ids, g.logprobs, g.finish) for g in generations])
                await here.close()
                move(policy)
        return found

    for served, here in asyncio.run(both()):
        assert served == here


def test_a_conversation_is_read_once_by_a_server_and_sampled_as_in_one_session() -> None:
    async def talk(says: Any) -> list[tuple[int, ...]]:
        ids, replies = list(range(3, 40)), list[tuple[int, ...]]()
        for turn in range(3):
            replies.append(await says(Prompt(ids), SamplingParams(16, seed=turn)))
            ids += [*replies[-1], *range(50, 60)]
        return replies

    async def both() -> tuple[Any, Any, int, int]:
        policy, n_asked = policy_of(), 0
        engine = PausableEngine(copy.deepcopy(policy.model), max_context=CONTEXT, max_sessions=4)
        here = TransformersEngine(copy.deepcopy(policy.model), max_context=CONTEXT)
        served = Served(engine, {})

        async def asked(prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
            nonlocal n_asked
            n_asked += 1
            given = {"top_p": 1.0, "top_k": 0, "temperature": 1.0, "stop": [], "stop_token_ids": []}
            given |= {"max_tokens": params.max_tokens, "seed": params.seed}
            body = {"request_id": str(n_asked), "token_ids": prompt.token_ids, "sampling_params": given}
            return tuple((await served.generate(body, {}))["choices"][0]["token_ids"])

        async def own(prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
            return (await here.generate(prompt, params, "s")).token_ids

        found, expected = await talk(asked), await talk(own)
        n_read, n_cached = engine.stats.n_prefill_tokens, here.stats.n_cached_tokens
        assert engine.stats.n_cached_tokens == n_cached > 0
        engine.drop_cache()
        again = await talk(asked)  # nothing is left of what was dropped
        assert again == found and engine.stats.n_prefill_tokens == 2 * n_read
        await asyncio.gather(*(asked(Prompt([i] * 8), SamplingParams(8)) for i in range(3, 12)))
        assert not served.running and len(served.idle) == 4
        await engine.close()
        await here.close()
        return found, expected, n_read, here.stats.n_prefill_tokens

    found, expected, n_read, n_expected = asyncio.run(both())
    assert found == expected and n_read == n_expected


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


def test_a_follower_that_begins_while_a_server_is_down_takes_it_in_once_it_is_there() -> None:
    async def play() -> None:
        policy, port = policy_of(), free_port()
        size = policy.model.config.vocab_size
        fit: dict[str, Any] = {"shapes": shapes(policy), "n_vocab": size, "max_context": CONTEXT}
        url = f"http://127.0.0.1:{port}"
        follower, strict = FollowingEngine([ServerInstance(url)]), VllmEngine([ServerInstance(url)])
        await follower.connect(**fit, leaves_out=True)
        with pytest.raises(InstanceDownError):
            await strict.connect(**fit)
        await strict.close()
        with pytest.raises(NoInstanceError):
            await follower.generate(PROMPT, SamplingParams(8), "s")
        async with server(policy, port=port) as url, engine_on(url, policy) as engine:
            await Publisher(policy, engine).publish()
            await follower.follow(engine.sender, engine.policy_version, engine.policy_fingerprint)
            assert (await follower.generate(PROMPT, SamplingParams(8), "s")).policy_version == policy.version
        await follower.close()

    asyncio.run(play())


def test_a_server_tells_its_load_and_ends_what_nobody_waits_for() -> None:
    async def play() -> None:
        policy = policy_of()
        async with server(policy) as url, engine_on(url, policy) as engine:
            await Publisher(policy, engine).publish()
            asking = ServerInstance(url)
            call = asyncio.create_task(engine.generate(PROMPT, SamplingParams(200), "long"))
            while not (load := await asking.load()) or not load.running:
                await asyncio.sleep(0.01)
            assert (load.name, load.running, load.waiting) == (url, 1, 0)
            call.cancel()  # which closes its connection, and says nothing to the server
            async with asyncio.timeout(10):
                while (load := await asking.load()) and load.running:
                    await asyncio.sleep(0.01)
            await asking.close()

    asyncio.run(play())


def test_requests_of_two_processes_are_never_called_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin processes may hold their engines at one address, as engines here do that are made one after the other."""
    names: list[str] = []

    async def keeps_the_name(instance: ServerInstance, request_id: str, *given: Any) -> Any:
        names.append(request_id)
        raise EngineError("nothing is sampled", where="here")

    async def ask_each() -> None:
        for _ in range(20):
            engine = VllmEngine([ServerInstance("http://127.0.0.1:9")])
            engine._n_vocab, engine.max_context = 9, 9
            with pytest.raises(EngineError, match="nothing is sampled"):
                await engine.generate(Prompt((1, 2)), SamplingParams(1))
            del engine
            gc.collect()

    monkeypatch.setattr(ServerInstance, "sample", keeps_the_name)
    asyncio.run(ask_each())
    assert len(set(names)) == 20


def test_vllms_own_metrics_are_read() -> None:
    from rlhf.inference.vllm.server import _METRIC

    text = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="p"} 3.0
vllm:num_requests_waiting{engine="0",model_name="p"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="p",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="p"} 0.25
vllm:num_preemptions_total{engine="0",model_name="p"} 1e+01
"""
    assert _METRIC.findall(text) == [
        *(("num_requests_running", "3.0"), ("num_requests_waiting", "2.0")),
        *(("kv_cache_usage_perc", "0.25"), ("num_preemptions_total", "1e+01")),
    ]


def test_a_server_that_was_started_again_has_no_weights_until_the_next_delivery() -> None:
    async def play() -> None:
        policy, port = policy_of(), free_port()
        async with engine_on_one(policy, port) as (engine, follower):
            assert await engine.needs_weights() and not follower._replicas.in_use
            async with server(policy_of(seed=1), port=port):
                assert await engine.needs_weights()
                with pytest.raises(NoInstanceError, match="no vLLM instance is left"):
                    await follower.found(0.0)
                looking = asyncio.create_task(follower.found(30.0))
                await Publisher(policy, engine).publish()
                await looking
                assert not await engine.needs_weights()
                generations = [await one.generate(PROMPT, SamplingParams(8, seed=3), "s") for one in (engine, follower)]
                assert generations[0].token_ids == generations[1].token_ids

    asyncio.run(play())


def test_servers_that_do_not_answer_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [f"http://127.0.0.1:{number}" for number in (1, 2, 3)]
    asked: list[str] = []

    async def describes_itself_once_all_were_asked(replicas: ReplicaSet, instance: ServerInstance) -> int:
        asked.append(instance.name)
        while len(asked) < len(urls):
            await asyncio.sleep(0)
        return CONTEXT

    async def play() -> None:
        replicas = ReplicaSet([ServerInstance("http://127.0.0.1:9")], Deliverer(torch.float32, 1000), 1.0)
        async with asyncio.timeout(30.0):
            with pytest.warns(UserWarning, match="joins"):
                await replicas.reconcile(urls, CONTEXT)
        assert replicas.joined == tuple(urls)

    monkeypatch.setattr(ReplicaSet, "_fitting", describes_itself_once_all_were_asked)
    asyncio.run(play())


@asynccontextmanager
async def engine_on_one(policy: Policy, port: int) -> AsyncIterator[Any]:
    """An engine and its follower whose only server has ended, after a delivery."""
    async with AsyncExitStack() as stack:
        async with server(policy, port=port) as url:
            engine = await stack.enter_async_context(engine_on(url, policy, return_s=5.0))
            follower = await stack.enter_async_context(engine_on(url, policy, FollowingEngine))
            await Publisher(policy, engine).publish()
            await follower.follow(engine.sender, engine.policy_version, engine.policy_fingerprint)
        with pytest.raises(NoInstanceError):
            await follower.generate(PROMPT, SamplingParams(8), "t")
        yield engine, follower


def test_a_broadcast_to_an_engine_that_joins_none_is_refused_at_once() -> None:
    async def play() -> None:
        policy = policy_of()
        async with server(policy) as url, engine_on(url, policy, delivery="broadcast") as engine:
            with pytest.raises(DeliveryError, match="the delivery failed") as caught:
                async with asyncio.timeout(30.0):
                    await Publisher(policy, engine).publish()
            assert "set engine.delivery: auto" in caught.value.got

    asyncio.run(play())
