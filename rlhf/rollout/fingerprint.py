"""A short digest of a model's parameters, to prove that the engine holds what the trainer published."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

#: Elements of each tensor that are hashed as they are, evenly spread.
_N_SAMPLED = 256

_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Digest of names, shapes and values of all parameters; 16 hex digits.

    The bits of every tensor are summed as integers, which any order of summation and any number of threads gives alike
    and which any change of a value changes; an evenly spread sample of the elements goes in as it is, so that swapped
    values show too. Costs one pass over the parameters.
    """
    digest = hashlib.sha256()
    sums, samples = [], []
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
        bits = parameter.detach().reshape(-1).view(_AS_INTEGER[parameter.element_size()])
        sums.append(bits.sum(dtype=torch.int64))
        samples.append(bits[:: max(1, len(bits) // _N_SAMPLED)].to(torch.int64))
    if sums:  # one transfer for all tensors
        digest.update(torch.cat([torch.stack(sums), *samples]).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
