"""vLLM's replicas and calls without a server: who is out of use, and what an interrupted call keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.data import Finish, Generation, Prompt, SamplingParams
from rlhf.errors import EngineError
from rlhf.inference.vllm.call import GenerationRequest
from rlhf.inference.vllm.engine import VllmEngine
from rlhf.inference.vllm.instance import Sampled
from rlhf.inference.vllm.replica_set import ReplicaSet


def serving(version: str) -> Any:
    async def is_up() -> bool:
        return True

    async def held() -> str:
        return version

    return SimpleNamespace(name=version, is_up=is_up, version=held)


def test_a_server_that_missed_a_delivery_is_out_of_use() -> None:
    def version_of(name: str) -> int | None:
        sender, _, version = name.rpartition(".")
        return int(version) if sender == "s" else None

    instances = [serving(name) for name in ("s.5", "s.6", "s.7", "other.9")]
    deliverer: Any = SimpleNamespace(version_of=version_of, token="t")
    replicas = ReplicaSet(instances, deliverer, 1.0)
    found = asyncio.run(replicas.check_health(is_delivered=True, limit_s=1.0, least=6))
    assert [fits for _, fits in found] == [False, True, True, False]
    assert [r.fault for r in replicas.all] == ["it missed a delivery", "", "", "it was started again"]


def test_all_servers_are_asked_at_once() -> None:
    waiting: list[str] = []

    def gone(name: str) -> Any:
        async def is_up() -> bool:
            waiting.append(name)
            while len(waiting) < 3:
                await asyncio.sleep(0)
            return False

        return SimpleNamespace(name=name, is_up=is_up)

    deliverer: Any = SimpleNamespace(version_of=lambda _: 0, token="t")
    replicas = ReplicaSet([gone(name) for name in "abc"], deliverer, 1.0)
    assert asyncio.run(replicas.check_health(is_delivered=False, limit_s=5.0)) == []
    assert [r.fault for r in replicas.all] == ["it does not answer"] * 3


@pytest.mark.parametrize(
    ("strings", "kept", "spans"),
    [((), 6, [(0, 4), (1, 2)]), (("ab",), 5, [(0, 4), (1, 1)]), (("a", "wxyz"), 3, [(0, 3)]), (("x" * 20,), 0, [])],
)
def test_an_interrupted_call_samples_anew_what_a_stop_string_may_have_begun_in(
    strings: tuple[str, ...], kept: int, spans: list[tuple[int, int]]
) -> None:
    call = GenerationRequest(Prompt((1,)), SamplingParams(max_tokens=9, stop_strings=strings), "s")
    call.take(Sampled((1, 2, 3, 4), (0.0, -1.0, -2.0, -3.0), Finish.ABORT, ()), [(0, 4)])
    call.take(Sampled((5, 6), (-4.0, -5.0), Finish.ABORT, ()), [(1, 2)])
    call.rewind()
    assert call.token_ids == (1, 2, 3, 4, 5, 6)[:kept] and call.logprobs == (0.0, -1.0, -2.0, -3.0, -4.0, -5.0)[:kept]
    assert call.spans == spans and call.rest().max_tokens == 9 - kept


class Stuck:
    """An instance that never answers, and fails to abort."""

    name = "stuck"

    def __init__(self, error: BaseException) -> None:
        self.error, self.begun = error, asyncio.Event()

    async def call(self, *_: Any) -> list[Any]:
        found = {"n_vocab": 9, "max_context": 64, "shapes": {}, "lora_rank": 0, "logprobs_mode": "processed_logprobs"}
        return [found | {"token": "", "gpu": ""}]

    async def sample(self, *_: Any) -> Sampled:
        self.begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def abort(self, names: Sequence[str]) -> None:
        if names:
            raise self.error

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [EngineError("status 500", where="abort"), asyncio.CancelledError()])
def test_calls_of_a_released_session_end_also_where_the_server_does_not_abort_them(error: BaseException) -> None:
    async def release() -> Generation:
        instance: Any = Stuck(error)
        engine = VllmEngine([instance])
        await engine.connect(shapes={}, n_vocab=9, max_context=64)
        running = asyncio.create_task(engine.generate(Prompt((1,)), SamplingParams(max_tokens=9), "s"))
        await instance.begun.wait()
        with pytest.raises(type(error)):
            await engine.release("s")
        async with asyncio.timeout(10):
            found = await running
        await engine.close()
        return found

    assert asyncio.run(release()).finish is Finish.ABORT
