"""Nothing waits for ever: time limits, release, cancellation, and an engine that is closed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from rlhf.data import Finish, SamplingParams
from rlhf.errors import DeliveryError, EngineError
from tests.rollout.vllm.real_vllm import (
    Around,
    engine_over,
    full_weights,
    gaps,
    lora_policy,
    policy_like,
    prompt_of,
    until,
    weights,
)

LONG = SamplingParams(max_tokens=4000, seed=3)
SHORT = SamplingParams(max_tokens=5)


class Slow(Around):
    """Does one thing for ever, once it is asked to."""

    def __init__(self, inner: Any, name: str) -> None:
        super().__init__(inner)
        self.slow, self.reached = name, asyncio.Event()
        self.is_slow = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("inner", "slow", "reached", "is_slow", "name", "close", "_hang"):
            return super().__getattribute__(name)
        return self._hang if self.is_slow and name == self.slow else getattr(self.inner, name)

    async def _hang(self, *args: Any) -> None:
        self.reached.set()
        await asyncio.sleep(1000)


async def is_idle(instance: Any) -> None:
    """vLLM has nothing left to do: what was given up is not computed on."""
    await until(lambda: not instance._engine.output_processor.has_unfinished_requests())
    async with asyncio.timeout(30):
        await instance.pause("wait")
        await instance.resume()


@pytest.mark.parametrize(
    ("what", "at_update"),
    [
        *((what, "keep") for what in ("pause", "start_update", "update", "finish_update", "call", "version", "resume")),
        ("update", "abort_and_resume"),
    ],
)
def test_a_delivery_that_hangs_ends_in_time_and_takes_running_calls_with_it(runner, full, what, at_update):
    policy = policy_like(1)

    async def go():
        instance = Slow(full, what)
        engine = await engine_over(instance, policy=policy, at_update=at_update)
        await engine.load(full_weights(policy, 1))
        running = [asyncio.create_task(engine.generate(prompt_of(20 + i), LONG)) for i in range(4)]
        await asyncio.sleep(0.1)
        instance.is_slow, engine._delivery_timeout_s = True, 0.5
        begin = time.monotonic()
        with pytest.raises(DeliveryError, match="the delivery took too long") as told:
            await engine.load(full_weights(policy, 2))
        # The instance has 2 s to leave the update, in which it hangs for 1000.
        assert time.monotonic() - begin < 60 and "engine.delivery_timeout_s" in told.value.hint
        ended = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60)
        assert all(isinstance(e, EngineError) and "the delivery of version 2 failed" in str(e) for e in ended)
        instance.is_slow, engine._delivery_timeout_s = False, 60.0
        await engine.load(full_weights(policy, 3))
        found = await engine.generate(prompt_of(10), SHORT)
        await is_idle(full)
        await engine.close()
        return found

    found = runner.run(go())
    assert found.policy_version == 3 and float(gaps(policy, found, SHORT).max()) < 1e-3


def test_draining_for_longer_than_a_delivery_may_take_ends_it(runner, adapted):
    policy = lora_policy(1)

    async def go():
        engine = await engine_over(adapted, policy=policy, at_update="drain")
        await engine.load(weights(policy, 1))
        engine._delivery_timeout_s = 0.3
        running = asyncio.create_task(engine.generate(prompt_of(20), LONG))
        await asyncio.sleep(0.05)
        with pytest.raises(DeliveryError, match="took too long"):
            await engine.load(weights(policy, 2))
        with pytest.raises(EngineError, match="the delivery of version 2 failed"):
            await asyncio.wait_for(running, 2)
        await engine.close()

    runner.run(go())


def test_a_request_that_takes_too_long_ends_and_is_computed_no_more(runner, full):
    policy = policy_like(1)

    async def go():
        engine = await engine_over(full, policy=policy, request_timeout_s=0.2)
        await engine.load(full_weights(policy, 1))
        begin = time.monotonic()
        ended = await asyncio.gather(
            *(engine.generate(prompt_of(20 + i), LONG) for i in range(8)), return_exceptions=True
        )
        assert time.monotonic() - begin < 60
        assert all(isinstance(e, EngineError) and "did not answer in time" in str(e) for e in ended)
        assert "engine.request_timeout_s" in str(ended[0])
        await is_idle(full)
        await engine.close()

    runner.run(go())


def test_release_ends_what_a_session_runs_and_nothing_else(runner, full):
    policy = policy_like(1)

    async def go():
        engine = await engine_over(full, policy=policy)
        await engine.load(full_weights(policy, 1))
        calls = [asyncio.create_task(engine.generate(prompt_of(20 + i), LONG, "a")) for i in range(3)]
        other = asyncio.create_task(engine.generate(prompt_of(30), replace(LONG, max_tokens=100), "b"))
        await asyncio.sleep(0.3)
        begin = time.monotonic()
        await engine.release("a")
        await engine.release("a")
        await engine.release("never heard of")
        ended = await asyncio.gather(*calls)
        took = time.monotonic() - begin
        # A call that was made in this very moment, and is on its way to vLLM, ends too.
        unborn = []
        for n_steps in range(1, 12):
            fresh = asyncio.create_task(engine.generate(prompt_of(20), LONG, "c"))
            for _ in range(n_steps):
                await asyncio.sleep(0)
            await engine.release("c")
            unborn.append(await asyncio.wait_for(fresh, 60))
        untouched = await other
        await is_idle(full)
        await engine.close()
        return ended, took, unborn, untouched

    ended, took, unborn, untouched = runner.run(go())
    assert took < 60 and {g.finish for g in ended} == {Finish.ABORT}
    assert all(0 < len(g.token_ids) < LONG.max_tokens for g in ended)
    assert max(float(gaps(policy, g, LONG).max()) for g in ended) < 1e-3
    assert {g.finish for g in unborn} == {Finish.ABORT}
    assert (untouched.finish, len(untouched.token_ids)) == (Finish.LENGTH, 100)


def test_release_ends_what_waits_for_a_delivery(runner, full):
    policy = policy_like(1)

    async def go():
        instance = Slow(full, "update")
        engine = await engine_over(instance, policy=policy, at_update="keep")
        await engine.load(full_weights(policy, 1))
        frozen = asyncio.create_task(engine.generate(prompt_of(20), LONG, "frozen"))
        await asyncio.sleep(0.2)
        instance.is_slow = True
        engine._delivery_timeout_s = 3.0
        delivery = asyncio.create_task(engine.load(full_weights(policy, 2)))
        await instance.reached.wait()
        waiting = asyncio.create_task(engine.generate(prompt_of(20), LONG, "waiting"))
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        await engine.release("waiting")
        await engine.release("frozen")
        found = await waiting, await frozen
        took = time.monotonic() - begin
        await asyncio.gather(delivery, return_exceptions=True)
        await engine.close()
        return found, took

    (waiting, frozen), took = runner.run(go())
    assert took < 60 and (waiting.finish, frozen.finish) == (Finish.ABORT, Finish.ABORT)
    assert waiting.token_ids == () and 0 < len(frozen.token_ids) < LONG.max_tokens


def test_a_cancelled_call_is_aborted_in_vllm(runner, full):
    policy = policy_like(1)

    async def go():
        engine = await engine_over(full, policy=policy)
        await engine.load(full_weights(policy, 1))
        for wait_s in (0.2, 0.0):  # in the middle, and before vLLM has heard of it
            calls = [asyncio.create_task(engine.generate(prompt_of(20 + i), LONG, f"s{i}")) for i in range(8)]
            await asyncio.sleep(wait_s)
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(e, asyncio.CancelledError) for e in ended)
            await is_idle(full)
        found = await engine.generate(prompt_of(20), SHORT, "s0")
        await engine.close()
        return found

    assert float(gaps(policy, runner.run(go()), SHORT).max()) < 1e-3


def test_closing_ends_what_runs(runner, full):
    policy = policy_like(1)

    async def go():
        engine = await engine_over(full, policy=policy)
        await engine.load(full_weights(policy, 1))
        running = [asyncio.create_task(engine.generate(prompt_of(20 + i), LONG)) for i in range(4)]
        await asyncio.sleep(0.1)
        await engine.close()
        ended = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60)
        assert all(isinstance(e, EngineError) and "the engine is closed" in str(e) for e in ended)
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.generate(prompt_of(5), SHORT)
        await is_idle(full)

    runner.run(go())
