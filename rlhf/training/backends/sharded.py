"""Sharded parameters: views of one buffer, or shards in several processes.

Shards are DeepSpeed's, whose parameters have a `ds_id`, or DTensors, as FSDP has them.

Gathering a sharded parameter is a collective call: every process asks for it, in the same order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlhf.capabilities import Capability, CapabilityView
from rlhf.processes import current


class ShardInfo(CapabilityView):
    """Attributes that trainers set on a parameter that they shard; None where one is absent."""

    ds_id = Capability[int | None](None)
    ds_tensor = Capability[Any](None)
    ds_shape = Capability[Any](None)
    ds_numel = Capability[int | None](None)
    """Of DeepSpeed's ZeRO 3."""
    _hp_mapping = Capability[Any](None)
    """Of its ZeRO 1 and 2: where the float32 weights are."""
    computed_in = Capability[torch.dtype | None](None)
    """Of FSDP: the number format that shards are rounded to when they are gathered."""

    @property
    def is_zero(self) -> bool:
        """True if ZeRO 3 has sharded it."""
        return self.ds_id is not None


def is_sharded(model: Any) -> bool:
    """True if ZeRO 3 has sharded the parameters over the processes."""
    return any(ShardInfo(p).is_zero for p in model.parameters())


def is_laid_out(model: Any) -> bool:
    """True if a trainer holds the parameters in any layout of its own."""
    return any(
        ShardInfo(p).is_zero or ShardInfo(p)._hp_mapping is not None or is_dtensor(p) for p in model.parameters()
    )


def is_dtensor(tensor: object) -> bool:
    """True if a tensor is a DTensor: this process holds one shard of it."""
    return isinstance(tensor, DTensor)


def is_hollow(parameter: torch.Tensor) -> bool:
    """True if all numbers of a parameter share one memory location: it is still to be read."""
    return parameter.numel() > 1 and not any(parameter.stride())


def empty_copy(model: Any) -> Any:
    """Return a copy of a model whose parameters have shapes and no values."""
    bare = {id(p): torch.nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, bare)


def full_tensor_of(tensor: Any) -> torch.Tensor:
    """Return the full tensor, as it is stored; of a sharded one, a collective call."""
    if not is_dtensor(tensor):
        found: torch.Tensor = tensor
        return found
    with current().comm_errors("sharded tensors"):
        found = tensor.full_tensor()
    return found


def full_parameter(parameter: Any) -> torch.Tensor:
    """Return the full parameter, in the number format that the model computes with."""
    return full_tensor_of(parameter.detach()).to(format_of(parameter))


def format_of(parameter: Any) -> torch.dtype:
    """Number format that the model computes with; shards in float32 may be rounded when they are gathered."""
    return ShardInfo(parameter).computed_in or parameter.dtype


def shard_of(parameter: Any) -> tuple[torch.Tensor, int]:
    """Flat local shard of a parameter, and the offset of its first number; padding may follow.

    Five rows of two numbers in two processes: DTensors have 6 and 4 numbers, at places 0 and 6.
    """
    if ShardInfo(parameter).ds_tensor is not None:
        own: torch.Tensor = parameter.ds_tensor.detach().flatten()
        return own, current().rank * own.numel()
    if is_dtensor(parameter):
        own = parameter.detach().to_local()
        n_rows = -(-parameter.shape[0] // parameter.device_mesh.size())
        return own.flatten(), parameter.device_mesh.get_local_rank() * n_rows * math.prod(parameter.shape[1:])
    return parameter.detach().flatten(), 0


@torch.no_grad()
def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Give parameters another number format, and their gradients with them.

    Buffers keep theirs: 16 bits are too few for the angles of positions.
    """
    for p in model.parameters():
        p.grad = None
        p.data = p.data.to(dtype)
        p.grad_dtype = p.dtype  # a stage before this one may have added up in another format


def device_of(model: Any) -> torch.device:
    """Device that the model computes on; shards may be stored elsewhere."""
    first: torch.nn.Parameter = next(model.parameters())
    if ShardInfo(first).is_zero:
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().current_device_name())
    return first.device


def gathered(parameters: Iterable[Any]) -> AbstractContextManager[Any]:
    """Gather those of `parameters` that DeepSpeed has sharded; changes made inside are lost."""
    shards = [p for p in parameters if ShardInfo(p).is_zero]
    if not shards:
        return nullcontext()
    import deepspeed

    full: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(shards)
    return full


@contextmanager
def assembled(owner: Any, wanted: Callable[[str], bool] = lambda path: True) -> Iterator[None]:
    """Gather the sharded parameters of a module; changes made inside are lost.

    Args:
        owner: the module.
        wanted: takes the path of a parameter from there, and says whether it is needed.
    """
    found = [
        (module, name, p)
        for path, module in owner.named_modules()
        for name, p in module._parameters.items()
        if p is not None and wanted(f"{path}.{name}" if path else name)
    ]
    shards = [(module, name, p) for module, name, p in found if is_dtensor(p)]
    with gathered([p for _, _, p in found]):
        try:
            for module, name, p in shards:
                module._parameters[name] = torch.nn.Parameter(full_parameter(p), requires_grad=False)
            yield
        finally:
            for module, name, p in shards:
                module._parameters[name] = p


@torch.no_grad()
def full_state(model: Any, *, trained_only: bool = False, keep: bool = True) -> dict[str, torch.Tensor]:
    """Full state dict of a model on the CPU, gathered one parameter at a time.

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
                value = full_parameter(p)
                copies[id(p)] = value.to("cpu", copy=True) if keep else torch.empty(0)
        found[name] = copies[id(p)]
    if not keep:
        return {}
    known = set(model.state_dict().keys())
    buffers = {} if trained_only else dict(model.named_buffers())
    return found | {name: b.detach().to("cpu", copy=True) for name, b in buffers.items() if name in known}


@torch.no_grad()
def unshard(model: Any) -> None:
    """Restore an ordinary model from ZeRO 3 in place: new parameters of the same values.

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
