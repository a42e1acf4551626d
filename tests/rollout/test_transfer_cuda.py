"""Weights through a buffer of the GPU: what is packed is what is read, and a handle lasts as long as its buffer."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.errors import EngineError
from rlhf.inference import transfer_cuda
from rlhf.inference.fingerprint import Digest
from rlhf.inference.transfer_cuda import DeviceReceiver, DeviceSender, gpu_of
from rlhf.inference.vllm.routes import Placement, route

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

#: Buffers by their handles, for a GPU that is not there.
EXPORTED: dict[int, torch.Tensor] = {}


@contextmanager
def memory_of_a_cpu() -> Iterator[None]:
    """A GPU's part is played by this process's memory, as no process may open a handle of its own."""

    def export(memory: torch.Tensor) -> dict[str, Any]:
        EXPORTED[len(EXPORTED)] = memory
        return {"handle": len(EXPORTED) - 1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_cuda, "_DEVICE", "cpu")
        patch.setattr(transfer_cuda, "_exported", export)
        patch.setattr(transfer_cuda, "_imported", lambda address, device: EXPORTED[address["handle"]])
        patch.setattr(torch.cuda, "ipc_collect", lambda: None)
        patch.setattr(DeviceSender, "_settle", lambda self: None)
        yield


def sent(
    sender: DeviceSender, receiver: DeviceReceiver, tensors: Any, dtype: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """What a receiver reads, copied, whose digest is that of what was sent."""
    there, here, found = Digest(), Digest(), []
    for slices in sender.fill(tensors, there, dtype):
        receiver.open(sender.address())
        for name, tensor in receiver.read(slices):
            here.add(name, tensor)
            found.append((name, tensor.clone()))
    assert there.hexdigest() == here.hexdigest()
    return found


@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
                          st.lists(st.integers(0, 7), max_size=3)), max_size=10), st.integers(1, 2000))  # fmt: skip
@settings(max_examples=60)
@memory_of_a_cpu()
def test_what_is_sent_is_what_is_read(kinds: Any, max_bytes: int) -> None:
    tensors = [(f"p{i}", (torch.randn(shape) * 9).to(dtype)) for i, (dtype, shape) in enumerate(kinds)]
    found = sent(DeviceSender(max_bytes), DeviceReceiver(torch.device(transfer_cuda._DEVICE)), tensors)
    assert [name for name, _ in found] == [name for name, _ in tensors]
    assert all(a.dtype == b.dtype and torch.equal(a.cpu(), b) for (_, a), (_, b) in zip(found, tensors, strict=True))


@memory_of_a_cpu()
def test_the_handle_stays_until_a_tensor_needs_more_room() -> None:
    sender, receiver = DeviceSender(1000), DeviceReceiver(torch.device(transfer_cuda._DEVICE))
    addresses = []
    for n in (10, 200, 3, 1000, 10, 1000):  # floats; 1,000 of them are more than a buffer
        tensors = [("w", torch.arange(float(n)))]
        assert torch.equal(sent(sender, receiver, tensors)[0][1].cpu(), tensors[0][1])
        addresses.append(dict(sender.address()))
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3]
    assert addresses[3] == addresses[4] == addresses[5]
    receiver.close()
    with pytest.raises(RuntimeError, match="no buffer"):
        list(receiver.read([]))
    sender.close()
    assert sender.address() == {}


@memory_of_a_cpu()
def test_floats_arrive_in_the_engines_number_format() -> None:
    value = torch.randn(5, 7)
    found = sent(DeviceSender(10), DeviceReceiver(torch.device(transfer_cuda._DEVICE)), [("w", value)], torch.bfloat16)
    assert torch.equal(found[0][1].cpu(), value.bfloat16())


@pytest.mark.parametrize(
    ("way", "sees_memory", "gpus", "here", "expected"),
    [
        ("auto", True, ("GPU-1",), "GPU-1", "cuda_ipc"),
        ("auto", False, ("GPU-1",), "GPU-1", "cuda_ipc"),
        ("auto", True, ("GPU-2",), "GPU-1", "broadcast"),
        ("auto", True, ("GPU-2", "GPU-3"), "GPU-1", "broadcast"),
        ("auto", False, ("GPU-2",), "GPU-1", "http"),
        ("auto", True, ("GPU-1", "GPU-2"), "GPU-1", "shared_memory"),  # NCCL takes no GPU twice
        ("auto", True, ("",), "GPU-1", "shared_memory"),
        ("auto", True, ("",), "", "shared_memory"),
        ("auto", False, ("",), "", "http"),
        ("broadcast", False, ("GPU-2",), "GPU-1", "broadcast"),
        ("broadcast", True, ("",), "", "broadcast"),
        ("shared_memory", True, ("GPU-1",), "GPU-1", "shared_memory"),
        ("http", True, ("GPU-1",), "GPU-1", "http"),
    ],
)
def test_weights_take_the_first_way_that_there_is(
    way: Any, sees_memory: bool, gpus: tuple[str, ...], here: str, expected: str
) -> None:
    assert route(way, Placement("vllm", sees_memory, gpus, here)) == expected


@pytest.mark.parametrize(
    ("way", "gpus", "here", "got", "wanted"),
    [
        ("cuda_ipc", ("GPU-2",), "GPU-1", "GPU-2", "GPU-1"),
        ("cuda_ipc", ("",), "", "a CPU", "a process with a GPU"),
        ("broadcast", ("GPU-1",), "GPU-1", "the engine on GPU-1, this process on GPU-1", "GPUs that differ"),
        ("broadcast", ("GPU-2", "GPU-1"), "GPU-1", "the engine on GPU-2, GPU-1", "GPUs that differ"),
        ("broadcast", ("GPU-2",), "", "this process on a CPU", "no GPU on either side"),
        ("shared_memory", ("",), "", "nothing to be read at /dev/shm/x", "a server of the same user"),
    ],
)
def test_a_way_that_there_is_not_is_refused(way: Any, gpus: tuple[str, ...], here: str, got: str, wanted: str) -> None:
    with pytest.raises(EngineError) as told:
        route(way, Placement("http://a:1", False, gpus, here, "/dev/shm/x"))
    assert told.value.where == f"engine.delivery {way}, http://a:1"
    assert got in told.value.got and wanted in told.value.expected and "auto" in told.value.hint


def test_a_cpu_is_no_gpu() -> None:
    assert gpu_of(torch.device("cpu")) == ""
    assert bool(gpu_of()) is torch.cuda.is_available()


def receive(pipe: Any) -> None:
    receiver = DeviceReceiver(torch.device("cuda", 0))
    while (message := pipe.recv()) is not None:
        address, slices = message
        receiver.open(address)
        digest = Digest()
        for name, tensor in receiver.read(slices):
            digest.add(name, tensor)
        pipe.send((digest.hexdigest(), gpu_of(torch.device("cuda", 0))))
    receiver.close()


@needs_cuda
def test_another_process_reads_the_same_memory() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(there,))
    process.start()
    sender = DeviceSender(2**20)
    for n in (1000, 300_000, 500_000, 7):
        digest = Digest()
        (slices,) = sender.fill([("w", torch.randn(n, device="cuda").bfloat16())], digest)
        here.send((sender.address(), slices))
        assert here.recv() == (digest.hexdigest(), gpu_of())
    here.send(None)
    process.join(30)
    sender.close()
    assert process.exitcode == 0


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 3, 8193, 10_000_003])
def test_a_gpu_and_a_cpu_find_the_same_digest(size: int, dtype: torch.dtype) -> None:
    tensor = (torch.randn(size) * 50).to(dtype)
    here, there = Digest(), Digest()
    here.add("w", tensor)
    there.add("w", tensor.cuda())
    assert here.hexdigest() == there.hexdigest()
