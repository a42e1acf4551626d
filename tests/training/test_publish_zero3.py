"""The weights of a policy whose parameters ZeRO-3 spreads over two processes: walked whole, one at a time.

Both processes run every case once; what they saw comes back in a file each.
"""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from rlhf.inference.fingerprint import Digest
from rlhf.inference.transfer import RemoteReceiver, SharedMemoryReceiver, SharedMemorySender
from rlhf.training.publisher import adapter_parameters, parameters
from tests.rollout.tiny_models import N_VOCAB, lora_model, tiny_model

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

CASES = {
    "tied": lambda: tiny_model(),
    "untied": lambda: tiny_model("qwen2-mha"),
    "adapters": lambda: lora_model(),
}

#: A parameter of 48 to 80 columns is spread over the processes only if this, in numbers, is less than its size.
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the two processes saw, by case."""
    folder = tmp_path_factory.mktemp("zero3")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mp.spawn(_work, args=(port, folder), nprocs=2, join=True)
    return {case: [torch.load(folder / f"{case}-{rank}.pt") for rank in range(2)] for case in CASES}


def _work(rank: int, port: int, folder: Path) -> None:
    """One of the processes."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    import deepspeed

    # DeepSpeed would compile a faster all-reduce for processes of one machine, which takes minutes the first time.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case, make in CASES.items():
        model = make()
        trained = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=0.01), config=CONFIG)
        found = {"before": _all_at_once(engine.module)}
        ids = torch.arange(12)[None] % N_VOCAB
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        found |= {"after": _all_at_once(engine.module)}
        found |= {"walked": _walked(engine.module), "of_engine": {n: t.clone() for n, t in parameters(engine)}}
        found |= {"sent": _sent(engine.module, folder / f"{case}.bin", rank)}
        if case == "adapters":
            found["adapter"] = {name: value.detach().clone() for name, value in adapter_parameters(engine.module)}
        found["n_left"] = _n_available(engine.module)
        torch.save(found, folder / f"{case}-{rank}.pt")
    torch.distributed.destroy_process_group()


def _all_at_once(model: Any) -> dict[str, torch.Tensor]:
    """The state dict with everything gathered."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _n_available(model: Any) -> int:
    """Parameters that this process holds whole."""
    return sum(p.ds_status.name == "AVAILABLE" for p in model.parameters())


def _walked(model: Any) -> list[tuple[str, torch.Tensor, int, int]]:
    """Name, value, parameters held whole meanwhile, and how many numbers a partitioned one still shows."""
    return [
        (name, value.clone(), _n_available(model), min(p.numel() for p in model.parameters()))
        for name, value in parameters(model)
    ]


def _sent(model: Any, path: Path, rank: int) -> tuple[str, str, dict[str, torch.Tensor]] | None:
    """Both digests of a delivery by the first process, and what arrived; the other one walks along.

    It arrives through memory and in pieces, as at two engines of which one sees the memory.
    """
    if rank:
        for _ in parameters(model):
            pass
        return None
    sent, received, arrived = Digest(), Digest(), {}
    sender, receiver, copy = SharedMemorySender(path, 20_000), SharedMemoryReceiver(path), RemoteReceiver()
    for slices in sender.fill(parameters(model), sent):
        for place, piece in sender.pieces(slices):
            copy.write(place, piece)
        for (name, value), (_, same) in zip(receiver.read(slices), copy.read(slices), strict=True):
            assert torch.equal(value, same)
            received.add(name, value)
            arrived[name] = value
    receiver.close()
    sender.close()
    return sent.hexdigest(), received.hexdigest(), arrived


def _merged(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same policy as one ordinary model, by PEFT itself."""
    model = lora_model()
    model.load_state_dict(state)
    return dict(model.merge_and_unload().state_dict())


def _expected(case: str, found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return _merged(found["after"]) if case == "adapters" else found["after"]


@pytest.mark.parametrize("case", CASES)
def test_every_process_walks_the_whole_model(seen: dict[str, list[dict[str, Any]]], case: str) -> None:
    for found in seen[case]:
        expected = _expected(case, found)
        walked = {name: value for name, value, _, _ in found["walked"]}
        assert len(walked) == len(found["walked"]) and set(walked) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(walked[name], value, rtol=0, atol=1e-6)
            assert torch.equal(found["of_engine"][name], walked[name])


@pytest.mark.parametrize("case", CASES)
def test_the_optimizer_has_moved_what_is_walked(seen: dict[str, list[dict[str, Any]]], case: str) -> None:
    first, second = seen[case]
    moved = [name for name, value in first["after"].items() if not torch.equal(value, first["before"][name])]
    assert moved and all("lora_" in name for name in moved) == (case == "adapters")
    assert all(torch.equal(value, second["after"][name]) for name, value in first["after"].items())


@pytest.mark.parametrize("case", CASES)
def test_one_parameter_is_gathered_at_a_time(seen: dict[str, list[dict[str, Any]]], case: str) -> None:
    """An adapted layer comes with the two factors of its adapter."""
    for found in seen[case]:
        counts = {n for _, _, n, _ in found["walked"]}
        assert counts == ({1, 3} if case == "adapters" else {1})
        assert {smallest for *_, smallest in found["walked"]} == {0}
        assert found["n_left"] == 0


@pytest.mark.parametrize("case", CASES)
def test_what_the_first_process_sends_arrives(seen: dict[str, list[dict[str, Any]]], case: str) -> None:
    first, second = seen[case]
    sent, received, arrived = first["sent"]
    assert sent == received and second["sent"] is None
    expected = _expected(case, first)
    assert set(arrived) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(arrived[name], value, rtol=0, atol=1e-6)


def test_an_adapter_is_gathered(seen: dict[str, list[dict[str, Any]]]) -> None:
    for found in seen["adapters"]:
        factors = {name.replace(".default", ""): v for name, v in found["after"].items() if ".lora_" in name}
        assert set(found["adapter"]) == set(factors) and factors
        assert all(torch.equal(found["adapter"][name], value) for name, value in factors.items())
