"""Deliveries that go wrong: each is caught, the message says who is stale, and the engine samples no more."""

from __future__ import annotations

import asyncio
import shutil
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.data import PolicyWeights, SamplingParams
from rlhf.errors import DeliveryError, EngineError
from rlhf.inference.fingerprint import Digest
from rlhf.inference.transfer import SharedMemoryReceiver
from rlhf.training.policy.model import Policy
from rlhf.training.publisher import Publisher, parameters
from tests.rollout.vllm.real_vllm import (
    Around,
    adapter_weights,
    engine_over,
    full_weights,
    gaps,
    lora_policy,
    move,
    policy_like,
    prompt_of,
    weights,
)
from tests.training.tiny import OldForward

SHORT = SamplingParams(max_tokens=5)

#: Bytes of a piece where weights are sent: the model, of some 240 kB, comes in several.
PIECE = 20_000


class Poison(Around):
    """Goes wrong once it `poisons`."""

    poisons = False


class FlipsABit(Poison):
    """Changes one bit of what lies in the buffer before the engine reads it."""

    async def connect_transfer(self, info: Any) -> None:
        self.path = Path(info["path"])
        await self.inner.connect_transfer(info)

    async def update(self, slices: Any, address: Any) -> None:
        if self.poisons:
            place = next(s for s in slices if s.name.endswith("o_proj.weight")).offset + 1
            with self.path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))
        await self.inner.update(slices, address)


class FlipsABitOnTheWay(Poison):
    """Changes one bit of what is sent to an engine that does not see the buffer."""

    async def put(self, place: int, data: bytes) -> None:
        found = bytearray(b64decode(data))
        found[len(found) // 2] ^= self.poisons
        await self.inner.put(place, b64encode(bytes(found)))


class LosesAPiece(Poison):
    """Never hands on the second piece of a buffer."""

    async def put(self, place: int, data: bytes) -> None:
        if not self.poisons or place != PIECE:
            await self.inner.put(place, data)


class KeepsAnOldPiece(Poison):
    """Hands on for every later piece what came with the first of its place."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.first: dict[int, bytes] = {}

    async def put(self, place: int, data: bytes) -> None:
        first = self.first.setdefault(place, data)
        await self.inner.put(place, first if self.poisons and len(first) == len(data) else data)


class KeepsTheOldName(Poison):
    """Takes weights and goes on calling them what it called them."""

    async def set_version(self, version: str) -> None:
        if not self.poisons:
            await self.inner.set_version(version)


class OnlySaysSo(Around):
    """Reads what it is sent, answers with its fingerprint, and loads nothing once it `sleeps`."""

    sleeps = False

    async def connect_transfer(self, info: Any) -> None:
        self.receiver = SharedMemoryReceiver(Path(info["path"]))
        await self.inner.connect_transfer(info)

    async def start_update(self) -> None:
        self.digest = Digest()
        await (asyncio.sleep(0) if self.sleeps else self.inner.start_update())

    async def update(self, slices: Any, address: Any) -> None:
        for name, tensor in self.receiver.read(slices):
            self.digest.add(name, tensor)
        await (asyncio.sleep(0) if self.sleeps else self.inner.update(slices, address))

    async def finish_update(self) -> None:
        await (asyncio.sleep(0) if self.sleeps else self.inner.finish_update())

    async def call(self, method: str, *args: Any) -> list[Any]:
        if method == "rlhf_fingerprint":
            return [self.digest.hexdigest()]
        return await self.inner.call(method, *args)


class LoadsAnother(Around):
    """Finds another adapter's files at the path."""

    puts_back = False

    async def add_adapter(self, adapter: Any) -> None:
        file = adapter.path / "adapter_model.safetensors"
        shutil.copy(file, adapter.path / "kept")
        save_file({name: 2 * value + 0.01 for name, value in load_file(file).items()}, file)
        await self.inner.add_adapter(adapter)
        if self.puts_back:
            shutil.move(adapter.path / "kept", file)


async def generate_until_it_fails(engine: Any) -> None:
    """Long calls, one after the other, so that one is running when a delivery fails, however late."""
    while True:
        await engine.generate(prompt_of(30), SamplingParams(max_tokens=4000))


async def refuses(engine: Any, version: int) -> None:
    """After a failed delivery nobody gets a token, and the error says why."""
    with pytest.raises(EngineError, match=f"the delivery of version {version} failed"):
        await engine.generate(prompt_of(10), SHORT)


OTHER = "the engine's parameters differ from the sent ones: the engine is stale"
OLDER = "the engine reports another version of its weights: the engine is stale"


@pytest.mark.parametrize(
    ("poison", "delivery", "told"),
    [
        (FlipsABit, "auto", OTHER),
        (FlipsABitOnTheWay, "http", OTHER),
        (KeepsAnOldPiece, "http", OTHER),
        (LosesAPiece, "http", "have not arrived"),
        (KeepsTheOldName, "auto", OLDER),
        (KeepsTheOldName, "http", OLDER),
    ],
)
def test_what_arrives_otherwise_than_sent_is_caught(runner, full, monkeypatch, poison, delivery, told):
    policies = [policy_like(seed) for seed in (1, 2)]
    monkeypatch.setattr("rlhf.inference.transfer.PIECE_BYTES", PIECE)

    async def go():
        # The instance is well first, so that the poison is in the second delivery.
        instance = poison(full)
        engine = await engine_over(instance, policy=policies[0], at_update="keep", delivery=delivery)
        await engine.load(full_weights(policies[0], 1))
        instance.poisons = True
        running = asyncio.create_task(generate_until_it_fails(engine))
        await asyncio.sleep(0.2)
        with pytest.raises(DeliveryError, match=told):
            await engine.load(full_weights(policies[1], 2))
        with pytest.raises(EngineError, match="the delivery of version 2 failed"):  # at once, and not when time is up
            await asyncio.wait_for(running, 5)
        await refuses(engine, 2)
        # The next delivery that is proven ends it.
        instance.poisons = False
        await engine.load(full_weights(policies[1], 3))
        found = await engine.generate(prompt_of(10), SHORT)
        await engine.close()
        return found

    found = runner.run(go())
    assert found.policy_version == 3 and float(gaps(policies[1], found, SHORT).max()) < 1e-3


@pytest.mark.parametrize("by", [0.1, 1e-3])
def test_an_engine_that_only_says_so_is_found_out_by_the_canary(runner, full, by):
    policy = policy_like(1)

    async def go():
        instance = OnlySaysSo(full)
        engine = await engine_over(instance, policy=policy)
        publisher = Publisher(policy, engine)
        await publisher.publish()
        assert publisher.figures["delivery/canary_gap"] < 1e-4
        instance.sleeps = True
        for version in (1, 2):
            move(policy, version, by)
            policy.version = version
            # A large step shows as a difference, a small one as figures that stand still.
            with pytest.raises(DeliveryError, match="the engine is stale, its figures have not moved"):
                await publisher.publish()
        instance.sleeps = False
        move(policy, 3, by)
        policy.version = 3
        await publisher.publish()
        await engine.close()
        return publisher.figures

    assert runner.run(go())["delivery/canary_gap"] < 1e-4


@pytest.mark.parametrize("by", [0.1, 5e-3])
def test_a_trainer_that_computes_with_old_weights_is_found_out_by_the_canary(runner, full, by):
    policy = policy_like(1)

    async def go():
        engine = await engine_over(full, policy=policy)
        stale = Policy(OldForward(policy.model), policy.tokenizer, {}, is_lora=False)
        publisher = Publisher(stale, engine)
        await publisher.publish()
        move(policy, 1, by)
        stale.version = 1
        with pytest.raises(DeliveryError, match="the trainer is stale, its figures have not moved"):
            await publisher.publish()
        await engine.close()

    runner.run(go())


@pytest.mark.parametrize("delivery", ["auto", "http"])
@pytest.mark.parametrize("puts_back", [False, True])
def test_another_adapter_is_caught(runner, adapted, puts_back, delivery):
    policy = lora_policy(1)

    async def go():
        instance = LoadsAnother(adapted)
        instance.puts_back = puts_back
        engine = await engine_over(instance, policy=policy, delivery=delivery)
        publisher = Publisher(policy, engine)
        with pytest.raises(DeliveryError) as told:
            await publisher.publish()
        await engine.close()
        return str(told.value)

    told = runner.run(go())
    # What lies in the file is compared; what was taken from it and is there no more shows in the canary.
    assert ("trainer and engine disagree" if puts_back else "the engine is stale") in told


def test_an_adapter_that_is_too_large_to_be_sent_is_refused(runner, adapted, monkeypatch):
    policy = lora_policy(1)

    async def go():
        engine = await engine_over(adapted, policy=policy, delivery="http")
        monkeypatch.setattr("rlhf.inference.vllm.delivery.MAX_BYTES", 1000)
        with pytest.raises(DeliveryError, match="too large to be sent") as told:
            await engine.load(adapter_weights(policy, 1))
        assert "at most 1000" in told.value.got and "engine.lora: merged" in told.value.got
        monkeypatch.undo()
        await engine.load(adapter_weights(policy, 2))
        await engine.close()

    runner.run(go())


def test_an_adapter_that_does_not_fit_the_base_is_refused(runner, adapted):
    policy = lora_policy(1)

    async def go():
        engine = await engine_over(adapted, policy=policy)
        await engine.load(adapter_weights(policy, 1))
        wrong = adapter_weights(policy, 2)
        rank_64 = {**(wrong.adapter or {}), "r": 64}
        with pytest.raises(DeliveryError):
            await engine.load(PolicyWeights(2, "", wrong.parameters, rank_64))
        await refuses(engine, 2)
        await engine.load(adapter_weights(policy, 3))
        found = await engine.generate(prompt_of(10), SHORT)
        await engine.close()
        return found

    assert float(gaps(policy, runner.run(go()), SHORT).max()) < 1e-3


@pytest.mark.parametrize("kind", ["full", "adapted"])
def test_the_wrong_form_is_refused_and_changes_nothing(runner, request, kind):
    instance = request.getfixturevalue(kind)
    mine, other = (policy_like(1), lora_policy(1)) if kind == "full" else (lora_policy(1), policy_like(1))

    async def go():
        engine = await engine_over(instance, policy=mine)
        await engine.load(weights(mine, 1))
        for wrong in (weights(other, 2), PolicyWeights(2, "some")):
            with pytest.raises(DeliveryError, match=r"this engine takes (full|adapter) weights"):
                await engine.load(wrong)
        found = await engine.generate(prompt_of(10), SHORT)
        await engine.close()
        return found

    found = runner.run(go())
    assert found.policy_version == 1 and float(gaps(mine, found, SHORT).max()) < 1e-3


def renamed(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in parameters(policy.model):
        yield name.replace("o_proj", "out_proj"), value


def cut(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in parameters(policy.model):
        yield name, value[:-1] if name.endswith("up_proj.weight") else value


def ending_early(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in parameters(policy.model):
        if name.startswith("model.layers.1"):
            raise RuntimeError("a process that holds a shard is gone")
        yield name, value


@pytest.mark.parametrize("walk", [renamed, cut, ending_early], ids=lambda walk: walk.__name__)
def test_parameters_that_cannot_be_loaded_are_refused_and_the_engine_recovers(runner, full, walk):
    policies = [policy_like(seed) for seed in (1, 2)]

    async def go():
        engine = await engine_over(full, policy=policies[0])
        await engine.load(full_weights(policies[0], 1))
        with pytest.raises(DeliveryError):
            await engine.load(PolicyWeights(2, "", lambda: walk(policies[1])))
        await refuses(engine, 2)
        await engine.load(full_weights(policies[1], 3))
        found = await engine.generate(prompt_of(10), SHORT)
        await engine.close()
        return found

    assert float(gaps(policies[1], runner.run(go()), SHORT).max()) < 1e-3


def test_an_update_that_another_sender_left_in_the_middle_is_ended_first(runner, full):
    policy = policy_like(1)

    async def go():
        left = await engine_over(full, policy=policy)
        await left.load(full_weights(policy, 1))
        await full.pause("keep")
        await full.start_update()  # and is gone
        engine = await engine_over(full, policy=policy)
        await engine.load(full_weights(policy, 1))
        found = await engine.generate(prompt_of(10), SHORT)
        await engine.close()
        await left.close()
        return found

    assert float(gaps(policy, runner.run(go()), SHORT).max()) < 1e-3


def test_parameters_that_are_missing_show_in_the_canary(runner, full, monkeypatch):
    policy = policy_like(1)

    def without_one(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value) for name, value in parameters(model) if not name.endswith("1.mlp.down_proj.weight"))

    async def go():
        engine = await engine_over(full, policy=policy)
        publisher = Publisher(policy, engine)
        await publisher.publish()
        move(policy, 1)
        policy.version = 1
        monkeypatch.setattr("rlhf.training.publisher.parameters", without_one)
        with pytest.raises(DeliveryError):
            await publisher.publish()
        monkeypatch.undo()
        await publisher.publish()
        await engine.close()

    runner.run(go())


def test_parameters_that_are_not_those_announced_are_refused(runner, full):
    policy = policy_like(1)

    async def go():
        engine = await engine_over(full, policy=policy)
        with pytest.raises(
            DeliveryError,
            match="differ from the announced ones: the trainer's copy is stale",
        ):
            await engine.load(PolicyWeights(1, "0123456789abcdef", lambda: parameters(policy.model)))
        await refuses(engine, 1)
        digest = Digest()
        for name, value in parameters(policy.model):
            digest.add(name, value)
        announced = digest.hexdigest()
        await engine.load(PolicyWeights(1, announced, lambda: parameters(policy.model)))
        assert engine.policy_fingerprint == announced
        await engine.close()

    runner.run(go())
