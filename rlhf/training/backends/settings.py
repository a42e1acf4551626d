"""Settings of trainers: their recipe keys, and what each can hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.errors import TrainingError
from rlhf.processes import current
from rlhf.settings import STRICT, Precision
from rlhf.training.backends.sharding import (
    Sharding,
    format_problems,
    key_that_shards,
    row_problems,
    shared_problems,
)

if TYPE_CHECKING:
    from rlhf.training.backends.optimizer import AdamW
    from rlhf.training.backends.torch import TorchTrainer
    from rlhf.training.policy.model import Policy


@runtime_checkable
class TrainerKind(Protocol):
    """Settings of a training backend (torch, DeepSpeed, FSDP2), a frozen dataclass of its recipe keys.

    One that shares out anything over several processes says what in an attribute `sharding`.
    """

    def start(self, policy: Policy, optimizer: AdamW, total_updates: int) -> TorchTrainer:
        """Return a trainer of `policy` for a stage of `total_updates`."""


#: Whether activations are computed again, or for what share of the layers.
Recomputed = bool | Annotated[float, Field(gt=0, lt=1, strict=True)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Torch:
    """Plain torch in one process, on one device."""

    sharding: ClassVar[Sharding] = Sharding(formats=("float32", "bfloat16"))

    gradient_checkpointing: Recomputed = False
    """Gradient checkpointing: recompute activations in the backward pass, for a quarter more time and a fraction of the
    memory. A share, such as 0.5, applies it to every second layer."""
    compile: bool | Literal["auto"] = "auto"
    """Compile layers with torch.compile: up to a minute in the first step, then about twice as fast; auto: on a GPU, in
    16 bits. On a CPU it compiles for minutes, once for each packing of rows, and gains nothing."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Data type of the optimizer moments, the largest part of the memory; bfloat16 uses stochastic rounding."""
    offload_moments: bool = False
    """Offload moments and float32 master weights to host memory; they pass through the GPU in an update, a few tensors
    at a time."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse float16, whose small gradients vanish without a scaled loss."""
        yield from format_problems(self, context)

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse several processes."""
        key = context.path.replace("[", ".").replace("]", "")
        yield Problem(
            "this trainer runs in one process",
            where=context.at("kind"),
            got=f"torch, and {n} processes were started",
            expected="a trainer for several processes, such as deepspeed, in every stage",
            do=f"set '{key}={{kind: deepspeed}}', or start one process",
        )

    def start(self, policy: Policy, optimizer: AdamW, total_updates: int) -> TorchTrainer:
        """Return the trainer. Raises TrainingError where several processes would each train a policy of their own."""
        import torch

        from rlhf.training.backends.torch import TorchTrainer

        if current().n > 1:
            raise TrainingError(
                "this trainer runs in one process",
                where="trainer.kind",
                got=f"torch in {current().n} processes",
                expected="a trainer for several processes, such as deepspeed",
                hint="set trainer: {kind: deepspeed} in every stage, or start one process",
            )
        compiles = policy.compiles_well if self.compile == "auto" else self.compile
        return TorchTrainer(
            policy,
            optimizer,
            total_updates,
            recomputes=self.gradient_checkpointing,
            compiles=compiles,
            moments=getattr(torch, self.moments),
            offloads=self.offload_moments,
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeepSpeed:
    """DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054) in one or several processes, which share every step.

    Each process rolls out its share of the tasks and goes through its share of the micro-batches. The figures of a run
    do not depend on how many there are, but for rounding.
    """

    zero_stage: Literal[0, 1, 2, 3] = 1
    """ZeRO stage, what is sharded over processes: 0 nothing, 1 optimizer moments and float32 masters, 2 gradients too,
    3 weights as well."""
    offload_optimizer: bool = False
    """Offload moments and float32 masters to host memory, and update there; from ZeRO 1 on."""
    offload_parameters: bool = False
    """Offload the weights to host memory and fetch each layer on demand; ZeRO 3 only."""
    precision: Precision | None = None
    """Data type of weights and activations; null is the policy's. In bfloat16 and float16 the optimizer updates float32
    masters; float16 uses loss scaling. ZeRO 0 has float32 only."""
    gradient_checkpointing: Recomputed = False
    """Gradient checkpointing: recompute activations in the backward pass, for a quarter more time and a fraction of the
    memory. A share, such as 0.5, applies it to every second layer."""
    bucket_mb: Annotated[int, Field(ge=1)] = 200
    """Bucket size of the gradient reduction in megabytes; ZeRO 3 prefetches layer weights up to a tenth of it."""
    param_persistence_threshold: Annotated[int, Field(ge=0)] = 100_000
    """ZeRO 3 does not shard parameters with fewer elements, which would cost more messages than memory."""
    sequence_parallel: Annotated[int, Field(ge=1)] = 1
    """Sequence-parallel size for long rows (Ulysses, Jacobs et al., arXiv 2309.14509): each process computes an equal
    part of the tokens of a micro-batch, and in attention of the heads. Must divide the processes and the attention
    heads."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Maximum time one process waits for another, such as for the end of its rollouts; then all stop."""

    def __post_init__(self) -> None:
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(f"offload_parameters needs zero_stage: 3, and zero_stage is {self.zero_stage}")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage: 1, 2 or 3, and zero_stage is 0")
        if self.zero_stage == 0 and self.precision not in (None, "float32"):
            raise ValueError(
                f"zero_stage: 0 computes in float32 only, and precision is {self.precision}; use zero_stage: 1"
            )

    @property
    def sharding(self) -> Sharding:
        """By the stage of ZeRO."""
        formats: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
        return Sharding(
            processes=True,
            optimizer=self.zero_stage >= 1,
            gradients=self.zero_stage >= 2,
            parameters=self.zero_stage == 3,
            min_numel=self.param_persistence_threshold,
            formats=formats if self.zero_stage else formats[:1],
            bucket_bytes=self.bucket_mb * 1_000_000,
            key="zero_stage",
        )

    @property
    def layout(self) -> Any:
        """Under ZeRO 3 a policy is loaded in the pieces that it is trained in."""
        if self.zero_stage != 3:
            return None
        from rlhf.training.backends.deepspeed import ZeroLayout

        return ZeroLayout(self, self.timeout_s)

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse critics, references, formats and bases that do not go with it."""
        yield from shared_problems(self, context)
        lora, decay = context.recipe.policy.lora, context.stage.optimizer.weight_decay
        if lora is not None and lora.roles and decay:
            yield Problem(
                "weight decay would change adapters that an update does not train",
                where=f"{context.stage_path}.optimizer.weight_decay",
                got=f"{decay:g}, with policy.lora.roles and {key_that_shards(self, 'deepspeed')}",
                expected="0",
                do="set it to 0",
            )

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse to share rows unevenly."""
        yield from row_problems(self, context, n)

    def start(self, policy: Policy, optimizer: AdamW, total_updates: int) -> TorchTrainer:
        """Return the trainer, in this process's part. All processes must start it together."""
        from rlhf.training.backends.deepspeed import DeepSpeedTrainer

        return DeepSpeedTrainer(
            policy,
            optimizer,
            total_updates,
            recomputes=self.gradient_checkpointing,
            n_per_row=self.sequence_parallel,
            kind=self,
        )

    def config(self, precision: Precision, max_grad_norm: float | None, *, on_gpu: bool) -> dict[str, Any]:
        """Return DeepSpeed's own configuration.

        Args:
            precision: number format of the weights.
            max_grad_norm: gradients are scaled down to it; None leaves them.
            on_gpu: memory for the CPU's part is then pinned.
        """
        bucket = self.bucket_mb * 1_000_000 // (4 if precision == "float32" else 2)
        zero: dict[str, Any] = {
            "stage": self.zero_stage,
            "overlap_comm": on_gpu,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        }
        if self.zero_stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": self.param_persistence_threshold,
                "stage3_prefetch_bucket_size": bucket // 10,
            }
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        if self.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
        formats: dict[str, Any] = {}
        if precision == "bfloat16":
            formats = {"bf16": {"enabled": True, "check_grad_overflow": True}}
            formats["data_types"] = {"grad_accum_dtype": "fp32"}
        elif precision == "float16":
            formats = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_grad_norm or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **formats,
        }


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fsdp:
    """PyTorch's FSDP2 (Zhao et al., arXiv 2304.11277) in one or several processes, which share every step.

    Weights, gradients and the optimiser's moments lie in pieces in all of them, as under ZeRO 3, and no package is
    needed beside torch.
    """

    #: Number formats that it computes in.
    formats: ClassVar[Collection[Precision]] = ("float32", "bfloat16")

    precision: Literal["float32", "bfloat16"] | None = None
    """Data type of gathered weights and activations; null is the policy's. The optimizer updates float32 shards."""
    reshard_after_forward: bool = True
    """Reshard weights after a layer's forward pass, and gather them again for its backward pass; false keeps them,
    which takes more memory and less communication."""
    gradient_checkpointing: Recomputed = False
    """Gradient checkpointing: recompute activations in the backward pass, for a quarter more time and a fraction of the
    memory. A share, such as 0.5, applies it to every second layer."""
    sequence_parallel: Annotated[int, Field(ge=1)] = 1
    """Sequence-parallel size for long rows (Ulysses, Jacobs et al., arXiv 2309.14509): each process computes an equal
    part of the tokens of a micro-batch, and in attention of the heads. Must divide the processes and the attention
    heads."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Maximum time one process waits for another, such as for the end of its rollouts; then all stop."""

    @property
    def layout(self) -> Any:
        """A policy is loaded in the pieces that it is trained in."""
        from rlhf.training.backends.fsdp import FsdpLayout

        return FsdpLayout(self.precision, self.timeout_s)

    @property
    def sharding(self) -> Sharding:
        """Everything, in layers."""
        return Sharding(
            processes=True,
            optimizer=True,
            gradients=True,
            parameters=True,
            keeps_full_weights=not self.reshard_after_forward,
            has_master_weights=False,
            formats=self.formats,
        )

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse critics, references, formats and bases that do not go with it."""
        yield from shared_problems(self, context)

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse to share rows unevenly."""
        yield from row_problems(self, context, n)

    def start(self, policy: Policy, optimizer: AdamW, total_updates: int) -> TorchTrainer:
        """Return the trainer, in this process's part. All processes must start it together."""
        from rlhf.training.backends.fsdp import FsdpTrainer

        return FsdpTrainer(
            policy,
            optimizer,
            total_updates,
            recomputes=self.gradient_checkpointing,
            n_per_row=self.sequence_parallel,
            kind=self,
        )
