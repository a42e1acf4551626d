"""Weight transfer to engines on other GPUs, by broadcasts within a process group of sender and receivers.

The group is vLLM's own: its NCCL communicator between GPUs, its stateless gloo group where there are none. It has
nothing to do with the groups that trainers make among themselves. The sender, of rank 0, packs parameters into a buffer
and broadcasts it; the receivers load from their copy of it before the sender fills the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from rlhf.inference.transfer import BucketedSender, Slice, view

#: Most seconds that a process waits for the others of a gloo group; NCCL waits until its group is destroyed.
_PATIENCE_S = 300.0


class Group(Protocol):
    """Process group as vLLM's communicators have it."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> Any:
        """Copy the tensor of rank `src` into everyone else's; on a GPU in the order of the current stream."""

    def destroy(self) -> None:
        """Leave, and end what waits for others."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Rendezvous of a group of `n` processes; the sender listens at the address."""

    address: str
    port: int
    n: int


def join(rendezvous: Rendezvous, rank: int, device: torch.device) -> Group:
    """Join the group; returns when all have.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: the others did not come, or a GPU belongs to two of them.
    """
    where = (rendezvous.address, rendezvous.port, rank, rendezvous.n)
    if device.type == "cuda":
        from vllm.distributed.weight_transfer import nccl_common

        with torch.cuda.device(device):
            found: Group = nccl_common.stateless_init_process_group(*where, device)
        return found
    from vllm.distributed.utils import stateless_init_torch_distributed_process_group

    return _Gloo(stateless_init_torch_distributed_process_group(*where, "gloo", timeout=timedelta(seconds=_PATIENCE_S)))


class _Gloo:
    """A group of torch's, in the form of vLLM's communicators."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Broadcast, and wait for it."""
        self._group.broadcast(tensor, src).wait()

    def destroy(self) -> None:
        """Leave."""
        self._group.abort()


class GroupSender(BucketedSender):
    """The sender's end.

    Args:
        max_bytes: of one buffer; a tensor that is larger gets a buffer of its own size.
        device: of the buffer.
    """

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        super().__init__(max_bytes)
        self._device = device
        self._memory: torch.Tensor | None = None
        self._group: Group | None = None

    def join(self, rendezvous: Rendezvous) -> None:
        """Wait for the receivers; see `join`."""
        self._group = join(rendezvous, 0, self._device)

    def broadcast(self, slices: Sequence[Slice]) -> None:
        """Send the slices just written; returns when every receiver has them.

        Raises:
            RuntimeError: there is no group, or a receiver has left it.
        """
        if self._group is None or self._memory is None:
            raise RuntimeError("no receiver has joined the group")
        self._group.broadcast(self._memory[: _end(slices)], src=0)
        _wait(self._device)

    def close(self) -> None:
        """Free the memory and leave the group."""
        group, self._group, self._memory = self._group, None, None
        if group is not None:
            group.destroy()

    def _make_room(self, n_bytes: int) -> None:
        if self._memory is None or n_bytes > len(self._memory):  # and then nothing lies in it yet
            self._memory = torch.empty(max(n_bytes, self._max_bytes), dtype=torch.uint8, device=self._device)

    def _settle(self) -> None:
        _wait(self._device)  # a broadcast is made in another thread, whose stream is another


class GroupReceiver:
    """The receiver's end.

    Args:
        group: that it has joined.
        device: of its copy of the buffer.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def read(self, slices: Iterable[Slice]) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive a buffer; name of each tensor, and the tensor in memory that the next buffer overwrites."""
        rows = list(slices)
        if (end := _end(rows)) > len(self._memory):
            self._memory = torch.empty(end, dtype=torch.uint8, device=self._device)
        self._group.broadcast(self._memory[:end], src=0)
        for found in rows:
            yield found.name, view(self._memory, found)

    def close(self) -> None:
        """Free the memory and leave the group."""
        self._group.destroy()
        self._memory = self._memory[:0].clone()


def _end(slices: Iterable[Slice]) -> int:
    return max((s.offset + s.n_bytes for s in slices), default=0)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
