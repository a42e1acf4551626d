"""A short digest of parameters, to prove that the engine holds what the trainer published."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

#: Elements of each tensor that are hashed as they are, evenly spread.
_N_SAMPLED = 256

_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digest:
    """Digest of names, shapes and values of tensors, added one at a time.

    The bits of every tensor are summed as integers, which any order of summation and any number of threads gives alike
    and which any change of a value changes; an evenly spread sample of the elements goes in as it is, so that swapped
    values show too. Costs one pass over the tensors.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._sums: list[torch.Tensor] = []
        self._samples: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor in, as it is now."""
        self._digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        bits = tensor.detach().reshape(-1).view(_AS_INTEGER[tensor.element_size()])
        self._sums.append(bits.sum(dtype=torch.int64))
        self._samples.append(bits[:: max(1, len(bits) // _N_SAMPLED)].to(torch.int64))

    def hexdigest(self) -> str:
        """16 hex digits of all that was added so far."""
        digest = self._digest.copy()
        if self._sums:  # one transfer for all tensors
            digest.update(torch.cat([torch.stack(self._sums), *self._samples]).cpu().numpy().tobytes())
        return digest.hexdigest()[:16]


def fingerprint(model: nn.Module) -> str:
    """Digest of a module's parameters; 16 hex digits."""
    digest = Digest()
    for name, parameter in model.named_parameters():
        digest.add(name, parameter)
    return digest.hexdigest()
