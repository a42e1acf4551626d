"""Weights by broadcasts in a process group, as far as no group is needed; `vllm/test_broadcast.py` has real ones."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.errors import EngineError
from rlhf.inference import transfer_group
from rlhf.inference.fingerprint import Digest
from rlhf.inference.transfer_group import GroupReceiver, GroupSender
from rlhf.inference.vllm import broadcast
from rlhf.inference.vllm.broadcast import own_address
from rlhf.inference.vllm.instance import InstanceDownError
from rlhf.inference.vllm.receivers import Receivers

CPU = torch.device("cpu")


class Line:
    """A group of two within this process: what the sender broadcasts is what the receiver gets next."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.is_left = False

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.sent.append(tensor.clone())

    def destroy(self) -> None:
        self.is_left = True


class Other(Line):
    """The receiver's side of a line."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self.line.sent.pop(0))


@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
                          st.lists(st.integers(0, 7), max_size=3)), max_size=10), st.integers(1, 2000))  # fmt: skip
@settings(max_examples=60)
def test_what_is_sent_is_what_is_read(kinds: Any, max_bytes: int) -> None:
    tensors = [(f"p{i}", (torch.randn(shape) * 9).to(dtype)) for i, (dtype, shape) in enumerate(kinds)]
    sender, line, there, here, found = GroupSender(max_bytes, CPU), Line(), Digest(), Digest(), []
    sender._group = line
    receiver = GroupReceiver(Other(line), CPU)
    for slices in sender.fill(tensors, there):
        sender.broadcast(slices)
        for name, tensor in receiver.read(slices):
            here.add(name, tensor)
            found.append((name, tensor.clone()))
    assert there.hexdigest() == here.hexdigest() and not line.sent
    assert [name for name, _ in found] == [name for name, _ in tensors]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(found, tensors, strict=True))
    sender.close()
    assert line.is_left
    with pytest.raises(RuntimeError, match="no receiver"):
        sender.broadcast([])


class Waiting:
    """An instance that joins a group, and then does with an update what it is told to."""

    def __init__(self, name: str, update: Any = None) -> None:
        self.name, self._update = name, update
        self.info: dict[str, Any] = {}

    async def connect_transfer(self, info: Any) -> None:
        self.info = dict(info)

    async def update(self, slices: Any, address: Any) -> None:
        await self._update()

    async def is_up(self) -> bool:
        return False


def test_every_worker_of_every_instance_has_a_rank_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []
    monkeypatch.setattr(
        transfer_group, "join", lambda rendezvous, rank, device: met.append((rendezvous, rank)) or Line()
    )
    instances: Any = [Waiting("vllm"), Waiting("http://127.0.0.1:8000"), Waiting("http://127.0.0.1:8001")]
    n_workers = dict(zip(instances, (1, 4, 2), strict=True))
    asyncio.run(broadcast.formed(Receivers(instances, lambda *_: None), n_workers, 1000))
    ((rendezvous, rank),) = met
    assert (rank, rendezvous.n, rendezvous.address) == (0, 8, "127.0.0.1")
    groups = [i.info["group"] for i in instances]
    assert [g["first_rank"] for g in groups] == [1, 2, 6]
    assert all((g["address"], g["port"], g["n"]) == ("127.0.0.1", rendezvous.port, 8) for g in groups)


def test_an_instance_that_refuses_is_heard_while_the_broadcast_waits_for_it() -> None:
    waits = threading.Event()

    class Deaf(Line):
        def broadcast(self, tensor: torch.Tensor, src: int) -> None:
            waits.wait()

    async def refuse() -> None:
        raise RuntimeError("no room")

    instance: Any = Waiting("vllm", refuse)
    sender = GroupSender(1000, CPU)
    sender._group = Deaf()
    (slices,) = sender.fill([("w", torch.ones(3))], Digest())
    with pytest.raises(RuntimeError, match="no room"):
        asyncio.run(broadcast.send(sender, Receivers([instance], lambda *_: None), slices))
    waits.set()


def test_a_server_that_dies_ends_a_broadcast_that_the_others_wait_in() -> None:
    is_left = threading.Event()

    class Deaf(Line):
        def broadcast(self, tensor: torch.Tensor, src: int) -> None:
            is_left.wait()

    async def die() -> None:
        raise InstanceDownError("the server does not answer", where="http://a:1", got="connection reset")

    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    async def send() -> None:
        async with asyncio.timeout(60):
            await broadcast.send(sender, Receivers(instances, lambda *_: None), slices)

    instances: Any = [Waiting("http://b:1", wait), Waiting("http://a:1", die)]
    sender = GroupSender(1000, CPU)
    sender._group = Deaf()
    (slices,) = sender.fill([("w", torch.ones(3))], Digest())
    with pytest.raises(InstanceDownError, match="http://a:1"):
        asyncio.run(send())
    is_left.set()


def test_the_error_of_a_server_is_raised_before_that_of_the_broadcast_it_broke() -> None:
    class Broken(Line):
        def broadcast(self, tensor: torch.Tensor, src: int) -> None:
            raise RuntimeError("connection closed by peer")

    async def refuse() -> None:
        await asyncio.sleep(0.05)  # the sender notices first
        raise EngineError("out of memory", where="vllm")

    instance: Any = Waiting("vllm", refuse)
    sender = GroupSender(1000, CPU)
    sender._group = Broken()
    (slices,) = sender.fill([("w", torch.ones(3))], Digest())
    with pytest.raises(EngineError, match="out of memory"):
        asyncio.run(broadcast.send(sender, Receivers([instance], lambda *_: None), slices))


def test_a_server_elsewhere_is_told_an_address_that_it_can_reach() -> None:
    assert own_address(["vllm", "http://127.0.0.1:1"]) == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # an address of nobody, by the way that leads out of this machine
        except OSError:
            pytest.skip("no way leads out of this machine")
        assert own_address(["vllm", "http://192.0.2.1:8000"]) == probe.getsockname()[0]
