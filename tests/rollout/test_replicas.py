"""vLLM's replicas and calls without a server: who is out of use, and what an interrupted call keeps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.data import Finish, Prompt, SamplingParams
from rlhf.inference.vllm.call import GenerationRequest
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
