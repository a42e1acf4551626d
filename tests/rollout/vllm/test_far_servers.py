"""A real server that does not see this machine's memory, as one elsewhere: weights are sent to it and proven as ever.

It runs with a /dev/shm and a /tmp of its own. Servers take long to start: the tests share two and stand in an order.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf.data import SamplingParams
from rlhf.errors import DeliveryError, EngineError
from rlhf.inference.vllm.instance import InstanceDownError
from rlhf.inference.vllm.server import ServerInstance
from rlhf.processes import free_port
from rlhf.training.publisher import Publisher
from tests.rollout.vllm.real_vllm import (
    adapter_weights,
    full_weights,
    gaps,
    lora_policy,
    policy_like,
    prompt_of,
    weights,
)
from tests.rollout.vllm.served import Served, engine_on, write_recipe

#: Runs a command where /dev/shm is another, which only root may make: the user is that in a namespace of its own.
APART = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
PARAMS_LONG = SamplingParams(max_tokens=300, seed=2)
TOLERANCE = 1e-3

#: Bytes of a piece that is sent; the model has some 240 kB.
PIECE = 20_000


def _can_be_apart() -> bool:
    try:
        return subprocess.run([*APART, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


# `make test` delivers over HTTP in test_servers.py.
pytestmark = [pytest.mark.extended, pytest.mark.skipif(not _can_be_apart(), reason="no mount namespaces here")]


class Told(ServerInstance):
    """A server's client that notes how weights were given to it, does something at one point, and can be cut off."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.path, self.pieces, self.added = "", list[int](), list[Path]()
        self.is_cut_off = False
        self.at: Any = None
        self.then: Any = None

    async def connect_transfer(self, info: Any) -> None:
        self.path = info["path"]
        await super().connect_transfer(info)

    async def put(self, place: int, data: bytes) -> None:
        self._fault_at("put")
        self.pieces.append(len(data))
        await super().put(place, data)

    async def call(self, method: str, *args: Any) -> list[Any]:
        self._fault_at(method)
        return await super().call(method, *args)

    async def add_adapter(self, adapter: Any) -> None:
        self.added.append(adapter.path)
        await super().add_adapter(adapter)

    async def _request(self, *args: Any, **settings: Any) -> Any:
        if self.is_cut_off:
            raise InstanceDownError("the server does not answer", where=self.name, got="cut off")
        return await super()._request(*args, **settings)

    def _fault_at(self, point: str) -> None:
        if point == self.at:
            self.at = None
            self.then()


@dataclass
class Two:
    """One server beside this process, and one that is as good as elsewhere."""

    recipe: Path
    near: Served
    far: Served

    def clients(self) -> list[Told]:
        return [Told(self.near.url), Told(self.far.url)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("far")
    recipe = write_recipe(folder, policy_like())
    near = Served(recipe, free_port(), folder / "near.txt")
    found = Two(recipe, near, Served(recipe, free_port(), folder / "far.txt", APART))
    try:
        found.near.wait_until_ready()
        found.far.wait_until_ready()
        yield found
    finally:
        found.near.stop()
        found.far.stop()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.inference.transfer.PIECE_BYTES", PIECE)
    monkeypatch.setattr("rlhf.inference.vllm.delivery.PIECE_BYTES", PIECE)


async def sampled(engine: Any, policy: Any, version: int) -> None:
    """Every server in use samples from the policy, under its version."""
    found = await asyncio.gather(*(engine.generate(prompt_of(20, n), PARAMS, f"{version}/{n}") for n in range(6)))
    assert {g.versions for g in found} == {(version,)}
    assert max(float(gaps(policy, g, PARAMS).max()) for g in found) < TOLERANCE


def sent_adapters(server: Served) -> list[Path]:
    """Folders of adapters that were sent to it and are there now."""
    return sorted(server.folder.glob("rlhf-sent-*"))


def test_each_server_gets_full_weights_the_way_it_needs(runner: asyncio.Runner, two: Two) -> None:
    async def go() -> None:
        policy = policy_like(3)
        near, far = clients = two.clients()
        async with engine_on(clients, policy, buffer_bytes=70_000) as engine:
            await engine.load(full_weights(policy, 7))
            assert near.path and not far.path  # found out when the engine connected
            assert not near.pieces and len(far.pieces) > 12
            assert max(far.pieces) <= -(-PIECE // 3) * 4  # in base64
            fingerprints = [await client.call("rlhf_fingerprint") for client in clients]
            assert fingerprints == [[engine.policy_fingerprint]] * 2
            await sampled(engine, policy, 7)
            publisher = Publisher(policy, engine)
            policy.version = 8
            await publisher.publish()
            assert publisher.figures["delivery/canary_gap"] < TOLERANCE

    runner.run(go())


def test_each_server_gets_adapters_the_way_it_needs(runner: asyncio.Runner, two: Two) -> None:
    async def go() -> None:
        base, policies = policy_like(), {version: lora_policy(version) for version in (1, 2, 3)}
        async with engine_on(two.clients(), base) as engine:
            await engine.load(full_weights(base, 0))
        near, far = clients = two.clients()
        async with engine_on(clients, policies[1], "adapter") as engine:
            for version, policy in policies.items():
                await engine.load(adapter_weights(policy, version))
                await sampled(engine, policy, version)
                assert not sent_adapters(two.near) and len(sent_adapters(two.far)) == 1  # older ones are gone
            assert all((path / "adapter_config.json").exists() for path in near.added[-1:])
            assert not any(path.exists() for path in far.added)  # they are where the server is
        assert not sent_adapters(two.far)

    runner.run(go())


def test_the_way_can_be_chosen_and_one_that_cannot_work_is_refused(runner: asyncio.Runner, two: Two) -> None:
    async def go() -> None:
        policy = policy_like(4)
        near, far = clients = two.clients()
        async with engine_on(clients, policy, delivery="http") as engine:
            await engine.load(full_weights(policy, 1))
            assert near.pieces == far.pieces and near.pieces and not near.path
            await sampled(engine, policy, 1)
        near = Told(two.near.url)
        async with engine_on([near], policy, delivery="shared_memory") as engine:
            await engine.load(full_weights(policy, 2))
            assert near.path and not near.pieces
        with pytest.raises(EngineError, match="does not see this machine's memory") as raised:
            async with engine_on(two.clients(), policy, delivery="shared_memory"):
                pass
        assert two.far.url in raised.value.where and "engine.delivery: auto" in raised.value.hint

    runner.run(go())


def test_a_server_that_is_cut_off_in_a_delivery_is_taken_back_in_the_middle_of_it(
    runner: asyncio.Runner, two: Two
) -> None:
    policies = {version: policy_like(version) for version in (1, 2, 3)}

    async def go() -> None:
        _, far = clients = two.clients()
        async with engine_on(clients, policies[1]) as engine:
            await engine.load(full_weights(policies[1], 1))
            far.at, far.then = "put", lambda: setattr(far, "is_cut_off", True)
            with pytest.warns(UserWarning, match=f"{two.far.url} was lost during a delivery of weights"):
                await engine.load(full_weights(policies[2], 2))
            assert len(engine._replicas.in_use) == 1
            await sampled(engine, policies[2], 2)
            far.is_cut_off = False  # the server itself is paused, with half an update
            await engine.load(full_weights(policies[3], 3))
            assert len(engine._replicas.in_use) == 2
            await sampled(engine, policies[3], 3)

    runner.run(go())


@pytest.mark.parametrize("point", ["put", "rlhf_write_adapter"])
def test_a_server_that_vanishes_in_a_delivery_is_left_out_and_taken_back(
    runner: asyncio.Runner, two: Two, tmp_path: Path, point: str
) -> None:
    form = "adapter" if "adapter" in point else "full"
    policies = {version: (lora_policy if form == "adapter" else policy_like)(version) for version in (1, 2, 3)}

    async def go() -> None:
        base = policy_like()
        async with engine_on(two.clients(), base) as engine:
            await engine.load(full_weights(base, 0))
        _, far = clients = two.clients()
        async with engine_on(clients, policies[1], form, at_update="keep") as engine:
            await engine.load(weights(policies[1], 1))
            running = asyncio.gather(*(engine.generate(prompt_of(20, n), PARAMS_LONG, f"{n}") for n in range(4)))
            await asyncio.sleep(0.2)
            far.at, far.then = point, two.far.server.kill
            with pytest.warns(UserWarning, match=f"{two.far.url} was lost during a delivery of weights"):
                await engine.load(weights(policies[2], 2))
            assert len(engine._replicas.in_use) == 1
            await sampled(engine, policies[2], 2)
            assert {len(g.token_ids) for g in await running} == {PARAMS_LONG.max_tokens}  # none is lost
            two.far.ended()
            two.far = Served(two.recipe, two.far.port, tmp_path / "again.txt", APART)
            await asyncio.to_thread(two.far.wait_until_ready)
            await engine.load(weights(policies[3], 3))
            assert len(engine._replicas.in_use) == 2
            await sampled(engine, policies[3], 3)

    runner.run(go())


def test_the_last_server_that_vanishes_in_a_delivery_is_an_error(runner: asyncio.Runner, two: Two) -> None:
    policy = policy_like(4)

    async def go() -> None:
        far = Told(two.far.url)
        async with engine_on([far], policy, delivery_timeout_s=60.0) as engine:
            await engine.load(full_weights(policy, 3))
            far.at, far.then = "put", two.far.server.kill
            with pytest.raises(DeliveryError, match="the delivery failed") as raised:
                await engine.load(full_weights(policy, 4))
            assert two.far.url in raised.value.got and "does not answer" in raised.value.got
            with pytest.raises(EngineError, match="the delivery of version 4 failed"):
                await engine.generate(prompt_of(9), PARAMS)

    runner.run(go())
