"""Parameters written over where they are, as on a GPU: through vLLM's own loader, over a small module without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf.inference.fingerprint import Digest
from rlhf.inference.transfer import SharedMemorySender


class Head(nn.Embedding):
    """An output layer, which vLLM makes of its class of embeddings too."""


class Small(nn.Module):
    """Embeddings, a layer and an output layer, tied or not, that load as vLLM's models do."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed_tokens, self.proj, self.lm_head = nn.Embedding(40, 8), nn.Linear(8, 8), Head(40, 8)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.models.utils import AutoWeightsLoader

        found: set[str] = AutoWeightsLoader(self).load_weights(weights)
        return found


def transfer_to(model: nn.Module, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.model_executor.models import utils

    from rlhf.inference.vllm import worker

    monkeypatch.setattr(utils, "VocabParallelEmbedding", nn.Embedding)
    monkeypatch.setattr(worker, "is_plain", lambda model, device: True)
    found = worker.MemoryTransfer.__new__(worker.MemoryTransfer)
    found.model, found.device, found.model_config = model, torch.device("cpu"), None
    found.init_transfer_engine(worker.MemoryInit(str(path)))
    return found


def deliver(transfer: Any, sender: SharedMemorySender, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Send through a buffer, and compare digests; how many buffers it took."""
    from rlhf.inference.vllm.instance import update_rows
    from rlhf.inference.vllm.worker import MemoryUpdate

    digest, n_buffers = Digest(), 0
    transfer.start_weight_update()
    for slices in sender.fill(tensors, digest):
        transfer.receive_weights(MemoryUpdate(**update_rows(slices, sender.address())))
        n_buffers += 1
    transfer.finish_weight_update()
    assert transfer.digest.hexdigest() == digest.hexdigest()
    return n_buffers


@pytest.mark.parametrize("max_bytes", [100, 2000, 10**6])
@pytest.mark.parametrize("tied", [True, False])
def test_every_name_of_a_tied_parameter_may_come_with_another_buffer(tied, max_bytes, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, sender = Small(tied=tied), SharedMemorySender(tmp_path / "weights", max_bytes)
    transfer, places = transfer_to(model, tmp_path / "weights", monkeypatch), [p.data_ptr() for p in model.parameters()]
    for _ in range(3):  # one delivery after the other
        sent = {name: value.clone() for name, value in Small(tied=tied).state_dict().items()}
        n_buffers = deliver(transfer, sender, sent.items())
        assert n_buffers == {100: 4, 2000: 2, 10**6: 1}[max_bytes]
        assert all(torch.equal(value, sent[name]) for name, value in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == places
    sender.close()


@pytest.mark.parametrize("max_bytes", [100, 10**6])
def test_other_values_for_a_name_that_is_tied_are_refused(max_bytes, tmp_path, monkeypatch):
    model, sender = Small(tied=True), SharedMemorySender(tmp_path / "weights", max_bytes)
    transfer = transfer_to(model, tmp_path / "weights", monkeypatch)
    with pytest.raises(RuntimeError, match=r"lm_head\.weight is embed_tokens\.weight in this engine"):
        deliver(transfer, sender, Small(tied=False).state_dict().items())
    sender.close()
