"""Weights on their way from the trainer to an engine in another process of the machine: through one piece of memory.

The sender writes parameters one after the other into a memory-mapped file, a buffer at a time, and tells the receivers
what lies where; they load what they find before the next buffer is written. No process ever holds the model twice.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf.rollout.fingerprint import Digest

#: Tensors begin at multiples of this many bytes.
_ALIGNMENT = 64

#: Where files lie in memory.
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one tensor lies in the buffer: `n_bytes` from `offset`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def memory_folder() -> Path:
    """A new folder that lies in memory where the system has such a place, else among the temporary files."""
    return Path(tempfile.mkdtemp(prefix="rlhf-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))


class Outbox:
    """The sender's end.

    Args:
        path: file to create; readable by this user only.
        max_bytes: of one buffer; a tensor that is larger gets a buffer of its own size.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._memory: mmap.mmap | None = None

    def fill(
        self, tensors: Iterable[tuple[str, torch.Tensor]], digest: Digest, dtype: torch.dtype | None = None
    ) -> Iterator[list[Slice]]:
        """Write buffer after buffer; the next is written when the generator is resumed.

        Args:
            tensors: name and value; a value may be freed or changed once the next is drawn.
            digest: every tensor is added to it, as it is sent.
            dtype: floating-point tensors are sent as this.

        Raises:
            OSError: there is no room.
        """
        slices: list[Slice] = []
        end = 0
        for name, value in tensors:
            tensor = value.detach()
            tensor = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            n_bytes = tensor.numel() * tensor.element_size()
            if slices and end + n_bytes > self._max_bytes:
                yield slices
                slices, end = [], 0
            self._make_room(max(1, end + n_bytes))  # a file without a byte cannot be mapped
            found = Slice(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, n_bytes)
            view(self._memory, found).copy_(tensor)
            digest.add(name, tensor)
            slices.append(found)
            end += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        if slices:
            yield slices

    def close(self) -> None:
        """Free the memory and remove the file."""
        if self._memory is not None:
            _unmap(self._memory)
            self._memory = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self.path.unlink(missing_ok=True)

    def _make_room(self, n_bytes: int) -> None:
        size = 0 if self._memory is None else len(self._memory)
        if n_bytes <= size:
            return
        wanted = max(n_bytes, min(self._max_bytes, 2 * size), mmap.PAGESIZE)
        # A hole in a file in memory would be a fatal signal when it is written and there is no room left.
        os.posix_fallocate(self._file, 0, wanted)
        memory = mmap.mmap(self._file, wanted)
        if self._memory is not None:
            _unmap(self._memory)
        self._memory = memory


class Inbox:
    """The receiver's end: reads the sender's file, which lies on the same machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None

    def read(self, slices: Iterable[Slice]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and a copy of each tensor."""
        size = self._path.stat().st_size
        if self._memory is None or len(self._memory) != size:
            self.close()
            with self._path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        for found in slices:
            yield found.name, view(self._memory, found).clone()

    def close(self) -> None:
        """Let go of the file."""
        if self._memory is not None:
            _unmap(self._memory)
            self._memory = None


def view(memory: mmap.mmap | None, found: Slice) -> torch.Tensor:
    """The tensor at a place of the buffer, sharing its memory."""
    dtype: torch.dtype = getattr(torch, found.dtype)
    if found.n_bytes == 0 or memory is None:
        return torch.empty(found.shape, dtype=dtype)
    count = found.n_bytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=found.offset).view(found.shape)


def _unmap(memory: mmap.mmap) -> None:
    """Close a mapping; a tensor that still looks into it keeps it alive until that is gone."""
    try:
        memory.close()
    except BufferError:
        return
