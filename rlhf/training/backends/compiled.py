"""torch.compile of a model's layers while a trainer uses them; eager for everyone else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

#: Programs that one layer may have: with and without gradient, dropout and recomputation.
_MOST_PROGRAMS = 32


class CompiledLayers:
    """Compiled decoder layers of a transformers model, one program for all, dynamic lengths.

    Args:
        model: the policy's module, adapters and all.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = decoder_layers(model)
        self._calls: list[Any] = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the layers are called as compiled; also where activations are computed again."""
        # Factors such as an adapter's scale are constants of the program, not inputs computed with on the CPU. Dynamo
        # keeps what is set by thread, and an update may run in another one than what came before.
        torch._dynamo.config.specialize_float = True
        if not self._calls:
            for layer in self._layers:
                layer.compile(dynamic=True, recompile_limit=_MOST_PROGRAMS)
                self._calls.append(layer._compiled_call_impl)
        self._set(self._calls)
        try:
            yield
        finally:
            self._set([None] * len(self._layers))

    def _set(self, calls: list[Any]) -> None:
        for layer, call in zip(self._layers, calls, strict=True):
            layer._compiled_call_impl = call


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformers model, in order: those that can be recomputed one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recomputed_layers(n: int, share: float) -> list[bool]:
    """Mask of the layers that recompute activations, spread evenly over n: half of 5 is the second and the fourth."""
    return [math.floor((i + 1) * share) > math.floor(i * share) for i in range(n)]
