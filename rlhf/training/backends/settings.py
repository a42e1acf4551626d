"""Settings of trainers: their recipe keys, and what each can hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass as plain_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.capabilities import Capability, CapabilityView
from rlhf.checking import KEEPS_WHOLE, CheckContext, Problem
from rlhf.errors import TrainingError
from rlhf.processes import current
from rlhf.settings import STRICT, Precision

if TYPE_CHECKING:
    from rlhf.training.backends.optimizer import AdamW
    from rlhf.training.backends.torch import TorchTrainer
    from rlhf.training.policy.model import Policy


@plain_dataclass(frozen=True)
class Sharding:
    """Declares what a trainer shards over the processes instead of holding it in full in each.

    Attributes:
        processes: whether several processes may share a stage; the kind then has a `timeout_s`.
        optimizer: moments, and weights in float32 beside those in 16 bits.
        gradients: of the trained parameters.
        parameters: the weights themselves, so that no engine can share the module.
        min_numel: parameters of fewer numbers are held in full by every process.
        bucket_bytes: gradients wait to be summed in so many; 0: those of a layer at a time.
        keeps_full_weights: whether gathered weights stay gathered between the two passes.
        has_master_weights: whether weights in float32 lie beside those that it shards; else it shards these, and they
            are rounded when they are gathered.
        formats: number formats that it computes in.
        key: the recipe key that says so, for messages.
    """

    processes: bool = False
    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    min_numel: int = 0
    bucket_bytes: int = 0
    keeps_full_weights: bool = False
    has_master_weights: bool = True
    formats: Collection[Precision] = ("float32", "bfloat16", "float16")
    key: str = "kind"


class _TrainerCapabilities(CapabilityView):
    sharding = Capability(Sharding(), Sharding)
    layout = Capability[Any](None)
    """Layout of a policy that is loaded in shards; None where each process loads all of it."""


def sharding_of(kind: object) -> Sharding:
    """Sharding that a trainer declares; a plug-in without one works alone."""
    return _TrainerCapabilities(kind).sharding


def layout_of(kinds: Iterable[object]) -> Any:
    """Return the layout that all of these trainers share, None where they have none or several."""
    found = [_TrainerCapabilities(kind).layout for kind in kinds]
    return found[0] if found and all(layout == found[0] for layout in found) else None


@runtime_checkable
class TrainerKind(Protocol):
    """A frozen dataclass whose fields are its recipe keys.

    One that shares out anything over several processes says what in an attribute `sharding`.
    """

    def start(self, policy: Policy, optimizer: AdamW, total_updates: int) -> TorchTrainer:
        """Return a trainer of `policy` for a stage of `total_updates`."""
        ...


def key_that_shards(trainer: Any, kind: str) -> str:
    """Return key and value that say what a trainer of this kind spreads, such as `trainer.zero: 3`."""
    key = sharding_of(trainer).key
    return f"trainer.{key}: {kind if key == 'kind' else getattr(trainer, key)}"


def _shared_problems(trainer: DeepSpeed | Fsdp, context: CheckContext) -> Iterator[Problem]:
    """Yield what does not go with a trainer that several processes may share."""
    from rlhf.training.policy.lora import no_base

    sharding, path, stage = trainer.sharding, context.stage_path, context.stage
    kind = context.kind_of("trainer", trainer)
    said = key_that_shards(trainer, kind)
    policy = context.recipe.policy
    own = _PolicyCapabilities(policy).dtype
    if context.learns and stage.critic is not None:
        yield from _critic_problems(trainer, stage.critic, context)
    if sharding.parameters and policy.lora and context.learns and stage.reference_reset is not None:
        yield Problem(
            "adapters in pieces cannot stand in for an older one",
            where=f"{path}.reference_reset",
            got=f"a reference that is renewed, with policy.lora and {said}",
            expected=KEEPS_WHOLE,
            do="use such a trainer, or remove reference_reset",
        )
    if own not in sharding.formats and trainer.precision is None:
        yield Problem(
            f"this trainer computes in {' and '.join(sharding.formats)} only",
            where=context.at(sharding.key),
            got=f"{said}, with policy.dtype: {own}",
            expected="a number format that it has, in policy.dtype or trainer.precision",
            do="deepspeed with zero: 1, 2 or 3 has all of them",
        )
    if policy.lora is not None and policy.lora.quantization is not None:
        yield no_base(
            "policy.lora.quantization", policy.lora.quantization, f"{kind} in {path}", "trainer: {kind: torch}"
        )


class _PolicyCapabilities(CapabilityView):
    """Optional attributes of a policy's settings that trainers read."""

    dtype = Capability("float32", str)
    """Number format of its weights."""


class _CriticCapabilities(CapabilityView):
    """Optional attributes of a critic that trainers read."""

    spans_processes = Capability(False, bool)
    """True if it learns beside trainers of several processes."""


def _critic_problems(trainer: DeepSpeed | Fsdp, critic: Any, context: CheckContext) -> Iterator[Problem]:
    """Yield problems of a critic beside it."""
    path, is_apart, kind = context.stage_path, trainer.sharding.parameters, context.kind_of("trainer", trainer)
    if not _CriticCapabilities(critic).spans_processes:
        yield Problem(
            "this critic learns beside the plain trainer only",
            where=f"{path}.critic.kind",
            got=f"{context.kind_of('critic', critic)} with {path}.trainer.kind: {kind}",
            expected="values",
            do="use trainer: {kind: torch}, or an estimator for a critic of states: gae, turn_gae or bilevel_gae",
        )
    elif critic.backbone == "policy" and (critic.trains_backbone or is_apart):
        moved = "the value loss would move weights that the trainer has a copy of"
        yield Problem(
            moved if critic.trains_backbone else "the critic would need weights that lie in pieces",
            where=f"{path}.critic.backbone",
            got=f"policy, with {path}.{key_that_shards(trainer, kind)}",
            expected="own" if is_apart else "own, or gradient: head",
            do="remove critic.backbone: the critic then has a transformer of its own, whole in each process",
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Torch:
    """Plain torch in one process, on one device."""

    sharding: ClassVar[Sharding] = Sharding()

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
            expected="a trainer for several processes, such as deepspeed, in every stage",
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
                expected="a trainer for several processes, such as deepspeed",
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
    """ZeRO stage, what is sharded over the processes: 0 nothing, 1 the optimiser's moments and the weights in float32,
    2 gradients too, 3 the weights as well."""
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
    def sharding(self) -> Sharding:
        """By the stage of ZeRO."""
        formats: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
        return Sharding(
            processes=True,
            optimizer=self.zero >= 1,
            gradients=self.zero >= 2,
            parameters=self.zero == 3,
            min_numel=self.keep_whole_below,
            formats=formats if self.zero else formats[:1],
            bucket_bytes=self.bucket_mb * 1_000_000,
            key="zero",
        )

    @property
    def layout(self) -> Any:
        """Under ZeRO 3 a policy is loaded in the pieces that it is trained in."""
        if self.zero != 3:
            return None
        from rlhf.training.backends.deepspeed import ZeroLayout

        return ZeroLayout(self, self.timeout_s)

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse critics, references, formats and bases that do not go with it."""
        yield from _shared_problems(self, context)

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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Fsdp:
    """PyTorch's FSDP2 (Zhao et al., arXiv 2304.11277) in one or several processes, which share every step.

    Weights, gradients and the optimiser's moments lie in pieces in all of them, as under ZeRO 3, and no package is
    needed beside torch.
    """

    precision: Literal["float32", "bfloat16"] | None = None
    """Number format of gathered weights and of activations; null is the policy's. The optimiser updates pieces in
    float32."""
    reshard_after_forward: bool = True
    """Give gathered weights back after a layer's forward pass, and gather them again for its backward pass; false keeps
    the whole policy in between, which takes more memory and fewer messages."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass and keep those between layers only: a quarter more time, a
    fraction of the memory."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest that one process waits for another, such as for the end of its rollouts; then all stop."""

    @property
    def formats(self) -> Collection[Precision]:
        """Number formats that it computes in."""
        return ("float32", "bfloat16")

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
        yield from _shared_problems(self, context)

    def start(self, policy: Policy, optimizer: AdamW, total_updates: int) -> TorchTrainer:
        """Return the trainer, in this process's part. All processes must start it together."""
        from rlhf.training.backends.fsdp import FsdpTrainer

        return FsdpTrainer(policy, optimizer, total_updates, recomputes=self.gradient_checkpointing, kind=self)
