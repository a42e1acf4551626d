"""Which trainer a stage has: its recipe keys, and what it can hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.errors import TrainingError
from rlhf.processes import current
from rlhf.settings import STRICT

if TYPE_CHECKING:
    from rlhf.training.backends.optimizer import AdamW
    from rlhf.training.backends.torch import TorchTrainer
    from rlhf.training.policy.model import Policy

Precision = Literal["float32", "bfloat16", "float16"]


@runtime_checkable
class TrainerKind(Protocol):
    """A frozen dataclass whose fields are its recipe keys.

    One that spreads the policy's weights over the processes, so that no engine can share its module, has an attribute
    `shards_parameters` that is True.
    """

    def start(self, policy: Policy, optimizer: AdamW, total_updates: int) -> TorchTrainer:
        """Return a trainer of `policy` for a stage of `total_updates`."""
        ...


def shards_parameters(trainer: object) -> bool:
    """True if the trainer shards the policy's weights (attribute `shards_parameters`)."""
    return bool(getattr(trainer, "shards_parameters", False))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Torch:
    """Plain torch in one process, on one device."""

    shards_parameters: ClassVar[bool] = False

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass and keep those between layers only: a quarter more time, a
    fraction of the memory."""
    compile: bool | Literal["auto"] = "auto"
    """Compile layers by torch.compile, which takes up to a minute in the first step and then trains about twice as
    fast; auto: on a GPU, in 16 bits."""

    def check_processes(self, context: CheckContext, n: int) -> Iterator[Problem]:
        """Refuse several processes."""
        key = context.path.replace("[", ".").replace("]", "")
        yield Problem(
            "this trainer works in one process",
            where=context.at("kind"),
            got=f"torch, and {n} processes were started",
            expected="deepspeed in every stage",
            do=f"set '{key}={{kind: deepspeed}}', or start one process",
        )

    def start(self, policy: Policy, optimizer: AdamW, total_updates: int) -> TorchTrainer:
        """Return the trainer. Raises TrainingError where several processes would each train a policy of their own."""
        from rlhf.training.backends.torch import TorchTrainer

        if current().n > 1:
            raise TrainingError(
                "this trainer works in one process",
                where="trainer.kind",
                got=f"torch in {current().n} processes",
                expected="deepspeed",
                hint="set trainer: {kind: deepspeed} in every stage, or start one process",
            )
        compiles = policy.compiles_well if self.compile == "auto" else self.compile
        return TorchTrainer(policy, optimizer, total_updates, recomputes=self.gradient_checkpointing, compiles=compiles)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeepSpeed:
    """DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054) in one or several processes, which share every step.

    Each process rolls out its share of the tasks and goes through its share of the micro-batches. The figures of a run
    do not depend on how many there are, but for rounding.
    """

    zero: Literal[0, 1, 2, 3] = 1
    """What is spread over the processes instead of held in each: 0 nothing, 1 the optimiser's moments and the weights
    in float32, 2 gradients too, 3 the weights as well."""
    offload_optimizer: bool = False
    """Keep moments and weights in float32 in the memory of the CPU, and make the update there; from ZeRO 1 on."""
    offload_parameters: bool = False
    """Keep the weights in the memory of the CPU and fetch each layer when it is needed; ZeRO 3 only."""
    precision: Precision | None = None
    """Number format of weights and activations; null is the policy's. In bfloat16 and float16 the optimiser updates
    weights in float32 beside them; float16 scales the loss so that small gradients survive. ZeRO 0 has float32 only."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass and keep those between layers only: a quarter more time, a
    fraction of the memory."""
    bucket_mb: Annotated[int, Field(ge=1)] = 200
    """Gradients are summed over the processes in pieces of about this many megabytes; ZeRO 3 gathers the weights of
    layers ahead of their use up to a tenth of it."""
    keep_whole_below: Annotated[int, Field(ge=0)] = 100_000
    """ZeRO 3 leaves parameters of fewer numbers whole in every process; they would cost more messages than memory."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest that one process waits for another, such as for the end of its rollouts; then all stop."""

    def __post_init__(self) -> None:
        if self.offload_parameters and self.zero != 3:
            raise ValueError(f"offload_parameters needs zero: 3, and zero is {self.zero}")
        if self.offload_optimizer and self.zero == 0:
            raise ValueError("offload_optimizer needs zero: 1, 2 or 3, and zero is 0")
        if self.zero == 0 and self.precision not in (None, "float32"):
            raise ValueError(f"zero: 0 computes in float32 only, and precision is {self.precision}; use zero: 1")

    @property
    def shards_parameters(self) -> bool:
        """True under ZeRO 3."""
        return self.zero == 3

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse critics, references, formats and bases that do not go with it."""
        from rlhf.training.policy.lora import no_base

        stage, policy = context.stage, context.recipe.policy
        own = getattr(policy, "dtype", "float32")
        if context.learns and stage.critic is not None:
            yield from self._beside(stage.critic, context)
        if self.zero == 3 and policy.lora and context.learns and stage.reference_reset is not None:
            yield Problem(
                "adapters in pieces cannot stand in for an older one",
                where=f"{context.stage_path}.reference_reset",
                got="a reference that is renewed, with policy.lora and trainer.zero: 3",
                expected="zero: 0, 1 or 2",
                do="lower trainer.zero, or remove reference_reset",
            )
        if self.zero == 0 and self.precision is None and own != "float32":
            yield Problem(
                "ZeRO 0 computes in float32 only",
                where=context.at("zero"),
                got=f"0 with policy.dtype: {own}",
                expected="1, 2 or 3",
                do="zero: 1 holds the optimiser's state once instead of in every process, and costs no more",
            )
        if policy.lora is not None and policy.lora.quantization is not None:
            whose, expected = f"DeepSpeed in {context.stage_path}", "trainer: {kind: torch}"
            yield no_base("policy.lora.quantization", policy.lora.quantization, whose, expected)

    def _beside(self, critic: Any, context: CheckContext) -> Iterator[Problem]:
        """Yield problems with a critic."""
        path = context.stage_path
        if not getattr(critic, "spans_processes", False):
            yield Problem(
                "this critic learns beside the plain trainer only",
                where=f"{path}.critic.kind",
                got=f"{context.kind_of('critic', critic)} with {path}.trainer.kind: deepspeed",
                expected="values",
                do="use trainer: {kind: torch}, or an estimator for a critic of states: gae, turn_gae or bilevel_gae",
            )
        elif critic.trunk == "policy" and (critic.trains_trunk or self.zero == 3):
            moved = "the value loss would move weights that DeepSpeed has a copy of"
            yield Problem(
                moved if critic.trains_trunk else "the critic would need weights that lie in pieces",
                where=f"{path}.critic.trunk",
                got=f"policy, with {path}.trainer.zero: {self.zero}",
                expected="own" if self.zero == 3 else "own, or gradient: head",
                do="remove critic.trunk: the critic then has a transformer of its own, whole in each process",
            )

    def start(self, policy: Policy, optimizer: AdamW, total_updates: int) -> TorchTrainer:
        """Return the trainer, in this process's part. All processes must start it together."""
        from rlhf.training.backends.deepspeed import DeepSpeedTrainer

        return DeepSpeedTrainer(policy, optimizer, total_updates, recomputes=self.gradient_checkpointing, kind=self)

    def config(self, precision: Precision, max_grad_norm: float | None, *, on_gpu: bool) -> dict[str, Any]:
        """Return DeepSpeed's own configuration.

        Args:
            precision: number format of the weights.
            max_grad_norm: gradients are scaled down to it; None leaves them.
            on_gpu: memory for the CPU's part is then pinned.
        """
        bucket = self.bucket_mb * 1_000_000 // (4 if precision == "float32" else 2)
        zero: dict[str, Any] = {
            "stage": self.zero,
            "overlap_comm": on_gpu,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        }
        if self.zero == 3:
            zero |= {
                "stage3_param_persistence_threshold": self.keep_whole_below,
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
