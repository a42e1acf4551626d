"""Models whose parameters DeepSpeed has laid out in its own way: views of one buffer, or pieces in several processes.

A process that asks for a parameter that lies in pieces must do so when the others do.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def is_sharded(model: Any) -> bool:
    """Whether ZeRO-3 has spread the parameters over the processes."""
    return any(hasattr(p, "ds_id") for p in model.parameters())


def is_laid_out(model: Any) -> bool:
    """Whether DeepSpeed holds the parameters in any way of its own."""
    return any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in model.parameters())


def device_of(model: Any) -> torch.device:
    """Where the model computes; parameters in pieces may wait elsewhere."""
    first: torch.nn.Parameter = next(model.parameters())
    if hasattr(first, "ds_id"):
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().current_device_name())
    return first.device


def gathered(parameters: Iterable[Any]) -> AbstractContextManager[Any]:
    """Inside, those of `parameters` that lie in pieces are whole; changes made inside are lost."""
    pieces = [p for p in parameters if hasattr(p, "ds_id")]
    if not pieces:
        return nullcontext()
    import deepspeed

    whole: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(pieces)
    return whole


@torch.no_grad()
def whole_state(model: Any, *, trained_only: bool = False, keep: bool = True) -> dict[str, torch.Tensor]:
    """Return the state dict of a model, gathered one parameter at a time, in memory of its own on the CPU.

    Tensors that the model has under two names are one tensor here too.

    Args:
        model: the policy's module.
        trained_only: leave out what is frozen.
        keep: whether this process wants it; the others walk along and get nothing.
    """
    copies: dict[int, torch.Tensor] = {}
    found = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if trained_only and not p.requires_grad:
            continue
        if id(p) not in copies:
            with gathered([p]):
                copies[id(p)] = p.detach().to("cpu", copy=True) if keep else torch.empty(0)
        found[name] = copies[id(p)]
    if not keep:
        return {}
    known = set(model.state_dict().keys())
    buffers = {} if trained_only else dict(model.named_buffers())
    return found | {name: b.detach().to("cpu", copy=True) for name, b in buffers.items() if name in known}


@torch.no_grad()
def unshard(model: Any) -> None:
    """Make a model that ZeRO-3 has taken to pieces an ordinary one again, in place: new parameters of the same values.

    Its hooks must be gone.
    """
    whole: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        own = dict(module._parameters)
        for p in own.values():
            if p is not None and id(p) not in whole:
                with gathered([p]):
                    value = p.detach().clone()
                whole[id(p)] = torch.nn.Parameter(value, requires_grad=p.requires_grad)
        module._parameters = {name: None if p is None else whole[id(p)] for name, p in own.items()}
