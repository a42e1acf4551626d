"""Weight transfer to an engine in another process, through shared memory.

The sender writes parameters one after the other into a memory-mapped file, a buffer at a time, and tells the receivers
what lies where; they load what they find before the next buffer is written. No process ever holds the model twice. A
receiver on another machine gets the buffer's bytes piece by piece, and keeps a copy of the buffer to load from.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf.inference.fingerprint import Digest
from rlhf.lock_owner import Owner, started_at

#: Tensors begin at multiples of this many bytes.
_ALIGNMENT = 64

#: Most bytes of a piece that goes to a receiver on another machine.
PIECE_BYTES = 2 * 2**20

#: Size of a file by which a sender is known.
_TOKEN_BYTES = 32

#: Where files lie in memory.
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Slice:
    """Place of one tensor in the buffer: `n_bytes` from `offset`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def memory_folder() -> Path:
    """New folder in shared memory where the system has it, else a temporary one.

    Removes what processes that were killed have left in shared memory: the name tells whose a folder is.
    """
    if not os.access(_MEMORY, os.W_OK):
        return Path(tempfile.mkdtemp(prefix="rlhf-"))
    here = Owner.here("weights")
    prefix = f"rlhf-{here.namespace}-"
    for old in _MEMORY.glob(f"{prefix}*"):
        pid, started = map(int, old.name.removeprefix(prefix).split("-")[:2])
        if started_at(pid) != started:
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{here.pid}-{here.started}-", dir=_MEMORY))


def write_token(path: Path) -> str:
    """Write a small secret file; its digest, which only a process that sees the file can know."""
    path.write_text(secrets.token_hex(16))
    return token_digest(path)


def token_digest(path: Path) -> str:
    """Digest of a file of `write_token`; empty where this process does not see one."""
    try:
        with path.open("rb") as file:
            return hashlib.sha256(file.read(_TOKEN_BYTES)).hexdigest()
    except OSError:
        return ""


class BucketedSender(ABC):
    """Writes tensors into a buffer one after the other; subclasses say where the buffer is.

    Args:
        max_bytes: of one buffer; a tensor that is larger gets a buffer of its own size.
    """

    _memory: mmap.mmap | torch.Tensor | None = None

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

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
                self._settle()
                yield slices
                slices, end = [], 0
            self._make_room(max(1, end + n_bytes))  # a file without a byte cannot be mapped
            found = Slice(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, n_bytes)
            view(self._memory, found).copy_(tensor)
            digest.add(name, tensor)
            slices.append(found)
            end += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        if slices:
            self._settle()
            yield slices

    def address(self) -> Mapping[str, Any]:
        """Handle by which a receiver opens the buffer; empty where it knows it."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""

    @abstractmethod
    def _make_room(self, n_bytes: int) -> None:
        """Make the buffer that large; what was written since the last was sent stays."""

    def _settle(self) -> None:  # noqa: B027  most buffers have nothing to wait for
        """Return when all that was written can be read."""


class SharedMemorySender(BucketedSender):
    """The sender's end: a file in shared memory.

    Args:
        path: file to create; readable by this user only.
        max_bytes: see `BucketedSender`.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._memory: mmap.mmap | None = None

    def pieces(self, slices: Sequence[Slice]) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of pieces that cover the slices just written."""
        end = max((s.offset + s.n_bytes for s in slices), default=0)
        for place in range(0, end, PIECE_BYTES):
            yield place, b"" if self._memory is None else self._memory[place : min(end, place + PIECE_BYTES)]

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


class SharedMemoryReceiver:
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
        """Close the file."""
        if self._memory is not None:
            _unmap(self._memory)
            self._memory = None


class RemoteReceiver:
    """The receiver's end on another machine: a copy of the sender's buffer, put together from its pieces."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def write(self, place: int, data: bytes) -> None:
        """Take a piece in. Raises ValueError if one before it is missing."""
        if not 0 <= place <= len(self._memory):
            raise ValueError(f"bytes {len(self._memory)} to {place} of the buffer have not arrived")
        self._memory[place : place + len(data)] = data

    def read(self, slices: Iterable[Slice]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and a copy of each tensor. Raises ValueError if it has not arrived as a whole."""
        for found in slices:
            if found.offset + found.n_bytes > len(self._memory):
                raise ValueError(f"{found.name} has not arrived")
            yield found.name, view(self._memory, found).clone()

    def close(self) -> None:
        """Free the memory."""
        self._memory = bytearray()


def view(memory: mmap.mmap | bytearray | torch.Tensor | None, found: Slice) -> torch.Tensor:
    """Zero-copy tensor on a slice of the buffer (a byte tensor or other memory)."""
    dtype: torch.dtype = getattr(torch, found.dtype)
    if isinstance(memory, torch.Tensor):
        return memory[found.offset : found.offset + found.n_bytes].view(dtype).view(found.shape)
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
