"""A short digest of parameters, to prove that the engine holds what the trainer published."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

#: Words of 32 bits that are summed at a time, each times a random number of its place; what fits into a core's cache.
_ROW = 8192

#: Levels of sums of sums; enough for any tensor.
_LEVELS = 6

#: Rows that a GPU multiplies at a time, which bounds the memory that it takes meanwhile to 33 MB.
_ROWS_AT_ONCE = 512


class Digest:
    """Digest of names, shapes and values of tensors, added one at a time.

    The bits of every tensor, as words of 32, are multiplied by 64-bit random numbers that belong to their places and
    summed modulo 2^64, row by row; the sums of the rows go the same way until one is left. Integers make it the same on
    every device and in any order of summation; one that is changed, moved or swapped, or several that are changed so
    that their plain sum stays, leave it as it is with a chance of about 2^-32. Costs one pass over the tensors.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._sums: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor in, as it is now."""
        self._digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        words, level = _words(tensor), 0
        while len(words) > _ROW:
            words, level = _row_sums(words, level).view(torch.int32), level + 1
        self._sums.append(_row_sums(words, level))

    def hexdigest(self) -> str:
        """16 hex digits of all that was added so far."""
        digest = self._digest.copy()
        if self._sums:
            on_one = len({s.device for s in self._sums}) == 1
            # One transfer for all tensors of a GPU.
            sums = torch.cat(self._sums if on_one else [s.cpu() for s in self._sums])
            digest.update(sums.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


def fingerprint(model: nn.Module) -> str:
    """Digest of a module's parameters; 16 hex digits."""
    digest = Digest()
    for name, parameter in model.named_parameters():
        digest.add(name, parameter)
    return digest.hexdigest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as words of 32 bits `[W]`, zeros after the last."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    missing = -flat.nbytes % 4
    if missing or flat.storage_offset() * flat.element_size() % 4:
        flat = torch.cat([flat.view(torch.uint8), flat.new_zeros(missing, dtype=torch.uint8)])
    return flat.view(torch.int32)


def _row_sums(words: torch.Tensor, level: int) -> torch.Tensor:
    """Position-weighted sums `[R]` of rows of words `[W]`; the last row may be shorter."""
    if words.device.type == "cpu":
        return torch.from_numpy(_row_sums_on_cpu(words.numpy(), _factors()[level]))
    factors, found = _factors_on(words.device)[level], []
    whole = len(words) // _ROW * _ROW
    for begin in range(0, whole, _ROWS_AT_ONCE * _ROW):
        part = words[begin : min(whole, begin + _ROWS_AT_ONCE * _ROW)]
        found.append((part.view(-1, _ROW) * factors).sum(1))
    if len(words) > whole or not whole:
        found.append((words[whole:] * factors[: len(words) - whole]).sum(0, keepdim=True))
    return found[0] if len(found) == 1 else torch.cat(found)


def _row_sums_on_cpu(words: Any, factors: Any) -> Any:
    """Row sums in numpy, several times as fast on a CPU, as rows stay in cache."""
    found, row = np.zeros(max(1, -(-len(words) // _ROW)), np.int64), np.empty(_ROW, np.int64)
    for number in range(len(found)):
        part = words[number * _ROW : (number + 1) * _ROW]
        row[: len(part)] = part
        found[number] = np.dot(row[: len(part)], factors[: len(part)])
    return found


@cache
def _factors() -> Any:
    """A random number for every place of a row, `[_LEVELS, _ROW]`: the same on every machine (splitmix64)."""
    mixed = np.arange(1, _LEVELS * _ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64).reshape(_LEVELS, _ROW)


_ON_DEVICES: dict[torch.device, torch.Tensor] = {}


def _factors_on(device: torch.device) -> torch.Tensor:
    """The same numbers in a device's memory."""
    if device not in _ON_DEVICES:
        _ON_DEVICES[device] = torch.from_numpy(_factors()).to(device)
    return _ON_DEVICES[device]
