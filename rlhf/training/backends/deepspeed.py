"""The trainer on DeepSpeed: the plain one's passes and losses, with gradients and updates over all processes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from rlhf.errors import TrainingError, boundary
from rlhf.extras import import_optional
from rlhf.processes import current, join
from rlhf.settings import Precision
from rlhf.training.backends.distributed import DistributedTrainer
from rlhf.training.backends.optimizer import Stepper
from rlhf.training.backends.sharded import cast_parameters, is_hollow, is_sharded, unshard
from rlhf.training.backends.zero_optimizer_state import GatheredOptimizerState
from rlhf.training.policy.model import Policy
from rlhf.training.throughput import Meter


class _ZeroKeys(Protocol):
    """Recipe keys that the trainer reads; see `rlhf.training.backends.settings.DeepSpeed`."""

    @property
    def zero_stage(self) -> Literal[0, 1, 2, 3]: ...
    @property
    def precision(self) -> Precision | None: ...

    def config(self, precision: Precision, max_grad_norm: float | None, *, on_gpu: bool) -> dict[str, Any]:
        """Return DeepSpeed's own configuration."""


@dataclass
class DeepSpeedTrainer(DistributedTrainer):
    """Updates `policy` in place by ZeRO.

    Under ZeRO 0 to 2 every process holds the whole module, and what shares it sees the new weights after an update.
    Under ZeRO 3 the module is in pieces until `close`.

    Attributes:
        kind: the recipe keys.
        config: DeepSpeed's own configuration.
    """

    kind: _ZeroKeys = field(kw_only=True)

    def __post_init__(self) -> None:
        deepspeed = _library()
        super().__post_init__()
        self._own_format = self.policy.model.dtype
        precision = self.kind.precision or _format_of(self.policy.model)
        if self.kind.zero_stage == 0 and precision != "float32":
            raise TrainingError(
                "ZeRO 0 computes in float32 only",
                where="trainer.zero_stage",
                got=f"a policy in {precision}",
                expected="zero_stage: 1, 2 or 3",
            )
        if self.policy.load is not None:
            self.policy.load.keeper.release()
        cast_parameters(self.policy.model, getattr(torch, precision))
        self.meter = Meter.of(self.policy.model)  # the peak is that of the format
        on_gpu = torch.cuda.is_available()
        # Without ZeRO the plain stepper bounds the gradient itself.
        limit = self.settings.max_grad_norm if self.kind.zero_stage else None
        self.config = self.kind.config(precision, limit, on_gpu=on_gpu)
        plain_optimizer = self.settings.build(self.policy.model.parameters(), masters=False)
        here = current()
        with (
            here.comm_errors("the start of DeepSpeed"),
            boundary(TrainingError, where="trainer", hint="see the message"),
        ):
            self._engine, *_ = deepspeed.initialize(
                model=self.policy.model, optimizer=plain_optimizer, config=self.config, dist_init_required=False
            )
        masters = precision != "float32"
        self.optimizer = GatheredOptimizerState(
            self._engine, self.kind.zero_stage, keeps=here.is_main, has_master_weights=masters
        )
        if self.kind.zero_stage:
            self._stepper = _EngineStepper(
                self.settings,
                self._engine.optimizer,
                self.total_updates,
                engine=self._engine,
                moments=self.optimizer,
                is_scaled=precision == "float16",
            )
        else:
            self._stepper = Stepper(self.settings, self._engine.optimizer, self.total_updates)

    def _optimizer(self) -> Any:
        return None  # it is made once the weights have their format

    @property
    def live(self) -> Any:
        """The module as DeepSpeed's engine calls it, which prepares the backward pass."""
        return _Live(self._engine)

    def close(self) -> None:
        """Restore an ordinary module, whole in every process and in its own number format; shards stay such."""
        module = self._engine.module
        _destroy(self._engine)
        with current().comm_errors("the end of a stage"):
            if self.policy.load is not None:
                self.policy.load.keeper = _Resting(module, self.config)
            elif is_sharded(module):
                unshard(module)
        for parameter in module.parameters():
            for name in [n for n in vars(parameter) if n in ("_hp_mapping", "_dp_group") or n.endswith("_hp_param")]:
                delattr(parameter, name)
        if self.policy.load is None:
            cast_parameters(module, self._own_format)
        super().close()

    @contextmanager
    def _left_alone(self, unused: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        with self.optimizer.without_means(unused):
            yield

    def _backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        with current().comm_errors("a backward pass"):
            # DeepSpeed takes the mean over the processes; their losses are shares of a sum.
            self._engine.backward(loss * current().n)


@dataclass(frozen=True)
class ZeroLayout:
    """Weights cut over the processes by ZeRO 3, from the begin of a run to its end.

    Attributes:
        kind: the recipe keys.
        timeout_s: longest wait for another process.
    """

    kind: _ZeroKeys
    timeout_s: float

    def lay_out(self, policy: Policy) -> Any:
        """Shard a module on the meta device; returns the gatherer of its weights until a trainer starts."""
        join(self.timeout_s)
        deepspeed, on_gpu = _library(), torch.cuda.is_available()
        precision = self.kind.precision or _format_of(policy.model)
        wanted, config = getattr(torch, precision), self.kind.config(precision, None, on_gpu=on_gpu)
        for module in policy.model.modules():
            hollow = [p for p in module.parameters(recurse=False) if is_hollow(p)]
            for p in hollow:  # one module after the other, so that the memory of one serves the next
                p.data = torch.empty(p.shape, dtype=wanted)
            if hollow:
                deepspeed.zero.Init(torch.nn.ParameterList(hollow), config_dict_or_path=config, dtype=wanted)
        cast_parameters(policy.model, wanted)
        return _Resting(policy.model, config)


class _Resting:
    """ZeRO 3 without an optimizer: between stages it gathers weights for passes as they are needed."""

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        with (
            current().comm_errors("the start of DeepSpeed"),
            boundary(TrainingError, where="trainer", hint="see the message"),
        ):
            self._engine, *_ = _library().initialize(model=model, config=config, dist_init_required=False)
        self._engine.module.eval()

    def release(self) -> None:
        """Leave the module in pieces, for a trainer to go on with."""
        _destroy(self._engine)


def _destroy(engine: Any) -> None:
    """End an engine and what it has hung on its module."""
    engine.destroy()
    engine.destroy = _nothing  # or it would again, whenever it is collected, and undo a later engine's work
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        hook.remove()


class _Live:
    """An engine with the configuration of its model in the place of DeepSpeed's own."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.module, self.config = engine, engine.module, engine.module.config

    def __call__(self, **inputs: Any) -> Any:
        return self._engine(**inputs)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters of the module."""
        found: Iterator[torch.nn.Parameter] = self._engine.module.parameters()
        return found


@dataclass
class _EngineStepper(Stepper):
    """DeepSpeed's clipping and update; non-finite gradients are skipped."""

    engine: Any = None
    moments: Any = None
    is_scaled: bool = False

    def step(self, *, off_schedule: bool = False) -> float:
        """Make an update, as `Stepper.step`.

        What float16's scale made too large is left out too, and the scale is lowered.
        """
        self._set_lr(off_schedule)
        self.moments.prepare()
        with current().comm_errors("an update"):
            self.engine.step()
        if self.engine.optimizer.overflow:
            self._skip(math.inf, counts=not self.is_scaled)
            return math.inf
        self._n_skipped_in_a_row = 0
        self.n_updates += 1
        self.n_off_schedule += off_schedule
        return float(self.engine.get_global_grad_norm())


def _nothing() -> None:
    """Do nothing."""


def _format_of(model: Any) -> Precision:
    found = str(next(p for p in model.parameters()).dtype).removeprefix("torch.")
    if found not in ("float32", "bfloat16", "float16"):
        raise TrainingError(
            "DeepSpeed has no such number format",
            where="trainer.precision",
            got=found,
            expected="float32, bfloat16 or float16",
        )
    return found  # type: ignore[return-value]


def _library() -> Any:
    """DeepSpeed, told where it is and not to talk."""
    import os

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    what = "the trainer needs a package that is not installed"
    deepspeed = import_optional("deepspeed", "deepspeed", what, "trainer.kind")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        # DeepSpeed would compile a faster all-reduce for processes of one machine, which takes minutes the first time.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    return deepspeed
