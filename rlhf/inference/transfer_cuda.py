"""Weight transfer to an engine on the same GPU, through a buffer mapped by both processes.

Nothing leaves the GPU: the sender packs parameters into a buffer, a receiver opens the same memory by its CUDA IPC
handle and loads from there. The handle stays the same from delivery to delivery, until a tensor needs a larger buffer.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from rlhf.inference.transfer import BucketedSender, Slice, view

#: What torch hands from one process to another of a tensor on a GPU, behind what is known of a buffer of bytes.
_HANDLE = ("handle", "storage_bytes", "storage_offset", "requires_grad", "counter", "counter_offset", "event", "sync")

_DEVICE = "cuda"


def gpu_of(device: torch.device | None = None) -> str:
    """The identity of a GPU, the same in every process of the machine; empty without one."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return ""
    return str(torch.cuda.get_device_properties(device or torch.cuda.current_device()).uuid)


class DeviceSender(BucketedSender):
    """The sender's end.

    Args:
        max_bytes: of one buffer; a tensor that is larger gets a buffer of its own size.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._memory: torch.Tensor | None = None
        self._address: dict[str, Any] = {}

    def address(self) -> Mapping[str, Any]:
        """CUDA IPC handle of the buffer, as JSON has it."""
        return self._address

    def close(self) -> None:
        """Free the memory, once no receiver has it open."""
        self._memory, self._address = None, {}
        cuda: Any = torch.cuda
        cuda.ipc_collect()

    def _make_room(self, n_bytes: int) -> None:
        if self._memory is not None and n_bytes <= len(self._memory):
            return
        self.close()
        self._memory = torch.empty(max(n_bytes, self._max_bytes), dtype=torch.uint8, device=_DEVICE)
        self._address = _exported(self._memory)

    def _settle(self) -> None:
        torch.cuda.current_stream().synchronize()  # a receiver waits for no stream of this process


class DeviceReceiver:
    """The receiver's end.

    Args:
        device: the receiver's name for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._address: Mapping[str, Any] = {}
        self._memory: torch.Tensor | None = None

    def open(self, address: Mapping[str, Any]) -> None:
        """Map the sender's buffer, unless it is the one that is open."""
        if address != self._address:
            self.close()
            self._memory, self._address = _imported(address, self._device), address

    def read(self, slices: Iterable[Slice]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name of each tensor and the tensor in the sender's memory, which the next buffer overwrites."""
        if self._memory is None:
            raise RuntimeError("no buffer has been announced")
        for found in slices:
            yield found.name, view(self._memory, found)

    def close(self) -> None:
        """Release the memory."""
        self._memory, self._address = None, {}


def _exported(memory: torch.Tensor) -> dict[str, Any]:
    _, (_, (n_bytes,), _, offset, _, _, _, *rest) = _reductions().reduce_tensor(memory)
    values = [b64encode(v).decode() if isinstance(v, bytes) else v for v in rest]
    return {"n_bytes": n_bytes, "offset": offset, **dict(zip(_HANDLE, values, strict=True))}


def _imported(address: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    values = [b64decode(v) if isinstance(v := address[name], str) else v for name in _HANDLE]
    index = device.index if device.index is not None else torch.cuda.current_device()
    found: torch.Tensor = _reductions().rebuild_cuda_tensor(
        torch.Tensor, (address["n_bytes"],), (1,), address["offset"], torch.storage.TypedStorage, torch.uint8, index,
        *values,
    )  # fmt: skip
    return found


def _reductions() -> Any:
    """Torch's own module for handing tensors to other processes."""
    from torch.multiprocessing import reductions

    return reductions
