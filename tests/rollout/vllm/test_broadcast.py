"""Weights that reach a real engine by broadcasts over gloo, where GPUs would use NCCL."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from rlhf.data import SamplingParams
from rlhf.errors import DeliveryError
from rlhf.inference.fingerprint import Digest
from rlhf.inference.transfer_group import GroupReceiver, GroupSender, Rendezvous, join
from rlhf.inference.vllm.delivery import Deliverer
from rlhf.processes import free_port
from tests.rollout.vllm.real_vllm import Around, engine_over, full_weights, gaps, policy_like, prompt_of

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5)


def test_two_receive_what_a_third_broadcasts_over_gloo() -> None:
    rendezvous, found = Rendezvous("127.0.0.1", free_port(), 3), dict[int, str]()
    digest, sender = Digest(), GroupSender(2**16, CPU)
    (slices,) = sender.fill([("w", torch.randn(30_000).bfloat16()), ("v", torch.arange(7))], digest)

    def receive(rank: int) -> None:
        receiver, mine = GroupReceiver(join(rendezvous, rank, CPU), CPU), Digest()
        for name, tensor in receiver.read(slices):
            mine.add(name, tensor)
        found[rank] = mine.hexdigest()

    threads = [threading.Thread(target=receive, args=(rank,), daemon=True) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    sender.join(rendezvous)
    sender.broadcast(slices)
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys((1, 2), digest.hexdigest())
    sender.close()


def test_on_a_gpu_the_group_is_vllms_nccl_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_common

    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))  # some context manager
    monkeypatch.setattr(nccl_common, "stateless_init_process_group", lambda *given: asked.append(given) or "a group")
    device = torch.device("cuda", 1)
    assert join(Rendezvous("10.0.0.1", 5, 3), 2, device) == "a group"
    assert asked == [("10.0.0.1", 5, 2, 3, device)]


def test_a_model_arrives_by_broadcast_buffer_after_buffer(runner, full):
    policies = [policy_like(seed) for seed in range(3)]

    async def play() -> None:
        engine = await engine_over(full, policy=policies[0], delivery="broadcast", buffer_bytes=20_000)
        try:
            for version, policy in enumerate(policies, start=1):
                await engine.load(full_weights(policy, version))
                generation = await engine.generate(prompt_of(40), PARAMS)
                assert generation.policy_version == version
                assert float(gaps(policy, generation, PARAMS).max()) < 1e-3
        finally:
            await engine.close()

    runner.run(play())


def test_a_broadcast_that_fails_leaves_an_engine_that_takes_the_next(runner, full, monkeypatch):
    policy = policy_like(1)

    class Refusing(Around):
        refuses = False

        async def update(self, slices: Any, address: Any) -> None:
            if self.refuses:
                raise RuntimeError("the connection broke")
            await super().__getattr__("update")(slices, address)

    async def play() -> None:
        instance = Refusing(full)
        engine = await engine_over(instance, policy=policy, delivery="broadcast")
        try:
            await engine.load(full_weights(policy, 1))
            instance.refuses = True
            with pytest.raises(DeliveryError, match="the delivery failed"):
                await engine.load(full_weights(policy_like(2), 2))
            instance.refuses = False
            await engine.load(full_weights(policy, 3))
            generation = await engine.generate(prompt_of(40), PARAMS)
            assert generation.policy_version == 3
            assert float(gaps(policy, generation, PARAMS).max()) < 1e-3
        finally:
            await engine.close()

    runner.run(play())


def test_an_engine_on_a_cpu_is_in_no_group_with_a_gpu(monkeypatch):
    monkeypatch.setattr("rlhf.inference.vllm.delivery.gpu_of", lambda: "GPU-1")
    deliverer, instance = Deliverer(torch.float32, 1000, "auto"), Around(None)
    deliverer.register_instance(instance, deliverer._token)
    assert deliverer._routes == {instance: "shared_memory"}
    deliverer.register_instance(instance, deliverer._token, ("GPU-2", "GPU-3"))
    assert deliverer._routes == {instance: "broadcast"}
    deliverer.close()
