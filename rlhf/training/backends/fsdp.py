"""The trainer on FSDP2: torch's `fully_shard`, with weights, gradients and moments in pieces in several processes.

Every layer is gathered for its forward and its backward pass, and its gradients are added up over the processes and cut
as soon as they are there. What is cut is float32: where the model computes in bfloat16, weights are rounded when they
are gathered, so the pieces are the masters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rlhf.batching.pack import PackedBatch
from rlhf.errors import TrainingError
from rlhf.processes import ProcessError, current, join
from rlhf.settings import Precision
from rlhf.training.backends.distributed import DistributedTrainer
from rlhf.training.backends.master_weights import MasterAdamW
from rlhf.training.backends.microbatch_stats import Computed
from rlhf.training.backends.sharded import (
    cast_parameters,
    device_of,
    empty_copy,
    format_of,
    full_state,
    full_tensor_of,
    is_hollow,
)
from rlhf.training.policy.model import Policy

#: Of the logits, which nothing here changes in place.
_WARNING = "FSDP2-wrapped module .* returned a view tensor"


class _FsdpKeys(Protocol):
    """Recipe keys that the trainer reads; see `rlhf.training.backends.settings.Fsdp`."""

    @property
    def precision(self) -> Precision | None: ...
    @property
    def reshard_after_forward(self) -> bool: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def formats(self) -> Collection[Precision]: ...


@dataclass(frozen=True)
class FsdpLayout:
    """Every layer cut over the processes, from the begin of a run to its end.

    Attributes:
        precision: number format of gathered weights; None is the policy's.
        timeout_s: longest wait for another process.
    """

    precision: Precision | None
    timeout_s: float

    def lay_out(self, policy: Policy) -> None:
        """Shard a module on the meta device; its shards are uninitialised."""
        join(self.timeout_s)
        wanted = format_for(self.precision, policy.model)
        for p in policy.model.parameters():
            if is_hollow(p):
                p.data = torch.zeros((), dtype=wanted).expand(p.shape)
        cast_parameters(policy.model, wanted)
        with current().comm_errors("the start of FSDP"):
            cut(policy, wanted)


def format_for(precision: Precision | None, model: Any) -> torch.dtype:
    """Number format that a model is to compute in."""
    found: torch.dtype = getattr(torch, precision) if precision else model.dtype
    return found


def cut(policy: Policy, wanted: torch.dtype) -> None:
    """Shard a policy's module, layer by layer, and the rest as one unit."""
    model = policy.model
    base = model.get_base_model() if policy.is_lora else model
    layers = [m for m in base.modules() if type(m).__name__ in set(base._no_split_modules or ())]
    formats = MixedPrecisionPolicy(wanted, torch.float32, cast_forward_inputs=False)
    warnings.filterwarnings("ignore", message=_WARNING)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (current().n,))
    for module in (*layers, model):
        for p in module.parameters():
            if isinstance(p, DTensor):
                continue
            if is_hollow(p):  # memory that nobody writes to takes none; only this process's piece is kept
                p.data = torch.empty(p.shape, dtype=torch.float32 if p.requires_grad else p.dtype)
            elif p.requires_grad:
                p.data = p.data.float()
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=formats)
    for p in model.parameters():
        p.computed_in = wanted
    if wanted != torch.float32:
        model.__class__ = type(type(model).__name__, (_Rounded, type(model)), {})


@torch.no_grad()
def _round(model: Any) -> None:
    """Round shards to the model's format, as a stage does that gathers it."""
    for p in model.parameters():
        p.grad = None
        own = p.to_local()
        own.copy_(own.to(format_of(p)))


@dataclass
class FsdpTrainer(DistributedTrainer):
    """Updates `policy` in pieces; until `close` its parameters are DTensors, of which each process holds its share.

    Attributes:
        kind: the recipe keys.
    """

    kind: _FsdpKeys = field(kw_only=True)

    def __post_init__(self) -> None:
        model = self.policy.model
        self._format = format_for(self.kind.precision, model)
        if str(self._format).removeprefix("torch.") not in self.kind.formats:
            raise TrainingError(
                "FSDP has no such number format",
                where="trainer.precision",
                got=str(self._format).removeprefix("torch."),
                expected=" or ".join(self.kind.formats),
            )
        join(self.kind.timeout_s)
        self._own_format = model.dtype
        if self.policy.load is None:
            cast_parameters(model, self._format)
        super().__post_init__()

    def _optimizer(self) -> Any:
        if self.policy.load is None:
            self._empty = empty_copy(self.policy.model)
            with current().comm_errors("the start of FSDP"):
                cut(self.policy, self._format)
        return self.settings.build(self.policy.model.parameters(), kind=ShardedAdamW)

    def close(self) -> None:
        """Restore an ordinary module, whole in every process and in its own number format; shards stay such."""
        if self.policy.load is not None:
            _round(self.policy.model)
            super().close()
            return
        device = device_of(self.policy.model)
        with current().comm_errors("the end of a stage"):
            found = full_state(self.policy.model)
        made = {id(value): nn.Parameter(value) for value in found.values()}  # one for a tensor of two names
        names = [name for name, _ in self._empty.named_parameters(remove_duplicate=False)]
        self._empty.load_state_dict({name: made[id(found[name])] for name in names}, assign=True, strict=False)
        self.policy.model = self._empty.to(device)
        cast_parameters(self.policy.model, self._own_format)
        super().close()

    def _backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        # FSDP takes the mean over the processes; their losses are shares of a sum.
        (loss * current().n).backward()  # type: ignore[no-untyped-call]

    def _step(
        self, batches: Sequence[PackedBatch], compute: Callable[[PackedBatch], Computed], *, off_schedule: bool = False
    ) -> dict[str, float]:
        model: FSDPModule = self.policy.model
        model.set_reshard_after_forward(self.kind.reshard_after_forward)
        try:
            with current().comm_errors("an update"):
                return super()._step(batches, compute, off_schedule=off_schedule)
        except ProcessError:
            raise
        except Exception:
            if hasattr(
                model, "reset_iter_state"
            ):  # from torch 2.13 on; before, a trainer that has failed is not used again
                model.reset_iter_state()
            raise
        finally:
            model.set_reshard_after_forward(True)  # what is outside of an update has no backward pass to do so


class ShardedAdamW(MasterAdamW):
    """AdamW over parameters in pieces, whose state is saved whole: that of plain torch's, whatever cut it.

    Where parameters are rounded for the model, their pieces are saved as the state's `master`. AdamW looks at each
    number by itself, so a state that is cut anew continues a run exactly.
    """

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """All processes call it together; the first one gets moments, the others an empty state."""
        found, state = super().state_dict(), {}
        for number, p in enumerate(_all(self.param_groups)):
            values = dict(found["state"].get(number, {}))
            if format_of(p) != p.dtype:
                values["master"] = p.detach()
            gathered = {name: full_tensor_of(value).to("cpu", copy=True) for name, value in values.items()}
            if gathered and current().is_main:
                state[number] = gathered
        return {**found, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from there; each process takes its pieces. Raises ValueError for the state of another model."""
        state = {}
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, p in zip(numbers, _all(self.param_groups), strict=True):
            values = dict(state_dict["state"].get(number, {}))
            pieces = {name: _piece(value, p) if value.ndim else value for name, value in values.items()}
            if "master" in pieces:
                p.copy_(pieces.pop("master"))
            if pieces:
                state[number] = pieces
        super().load_state_dict({**state_dict, "state": state})


class _Rounded:
    """A model whose pieces are finer than what it computes with."""

    @property
    def dtype(self: Any) -> torch.dtype:
        """Number format that it computes in."""
        return format_of(next(self.parameters()))


def _all(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [p for group in groups for p in group["params"]]


def _piece(value: torch.Tensor, like: DTensor) -> DTensor:
    """Return this process's piece of a tensor that all of them have whole, cut as `like`."""
    if value.shape != like.shape:
        raise ValueError(f"{tuple(value.shape)} numbers for a parameter of shape {tuple(like.shape)}: another model's")
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
