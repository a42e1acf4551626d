"""Declarations of what trainers shard over processes, and of incompatible parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rlhf.capabilities import Capability, CapabilityView
from rlhf.checking import KEEPS_WHOLE, CheckContext, Problem
from rlhf.settings import Precision


@dataclass(frozen=True)
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
    sequence_parallel = Capability(1, int)
    compile = Capability[object](False)
    precision = Capability[str | None](None, str)
    layout = Capability[Any](None)
    """Layout of a policy that is loaded in shards; None where each process loads all of it."""


def sharding_of(kind: object) -> Sharding:
    """Sharding that a trainer declares; a plug-in without one works alone."""
    return _TrainerCapabilities(kind).sharding


def n_per_row_of(kind: object) -> int:
    """Processes that share each micro-batch of a trainer."""
    return _TrainerCapabilities(kind).sequence_parallel


def compiles(kind: object) -> bool:
    """True if a trainer is set to compile layers; False if it decides itself."""
    return _TrainerCapabilities(kind).compile is True


def heads_rule(n_heads: int, n_kv_heads: int) -> str:
    """Numbers of processes that may share a model's heads, in words."""
    fitting = [str(n) for n in range(1, n_heads + 1) if not heads_problem(n, n_heads, n_kv_heads)]
    return f"one of {', '.join(fitting)}"


def heads_problem(n: int, n_heads: int, n_kv_heads: int) -> str | None:
    """Say what keeps `n` processes from sharing attention heads; None where they can.

    Key-value heads are shared too, or, where they are fewer, each goes to as many processes as there are to a head: 8
    processes take 16 heads with 2 key-value heads, and 6 do not.
    """
    if n_heads % n:
        return f"the model has {n_heads} attention heads"
    if n_kv_heads % n and n % n_kv_heads:
        return f"the model has {n_kv_heads} key-value heads"
    return None


def layout_of(kinds: Iterable[object]) -> Any:
    """Return the layout that all of these trainers share, None where they have none or several."""
    found = [_TrainerCapabilities(kind).layout for kind in kinds]
    return found[0] if found and all(layout == found[0] for layout in found) else None


def key_that_shards(trainer: Any, kind: str) -> str:
    """Return key and value that say what a trainer of this kind spreads, such as `trainer.zero_stage: 3`."""
    key = sharding_of(trainer).key
    return f"trainer.{key}: {kind if key == 'kind' else getattr(trainer, key)}"


def shared_problems(trainer: Any, context: CheckContext) -> Iterator[Problem]:
    """Yield what does not go with a trainer that several processes may share."""
    from rlhf.training.contrib.reference_reset import copies_adapter
    from rlhf.training.policy.lora import no_base

    sharding, path, stage = trainer.sharding, context.stage_path, context.stage
    kind = context.kind_of("trainer", trainer)
    said = key_that_shards(trainer, kind)
    policy = context.recipe.policy
    if context.learns and stage.critic is not None:
        yield from _critic_problems(trainer, stage.critic, context)
    if sharding.parameters and policy.lora and context.learns and copies_adapter(context.recipe.stages, stage):
        key, got, do = (
            "loss",
            "adapters of an earlier stage",
            "start this stage alone from `rlhf export` of the earlier one",
        )
        if stage.reference_reset is not None:
            key, got, do = "reference_reset", "a reset reference", "remove reference_reset"
        yield Problem(
            "sharded adapters cannot be swapped for older ones, which are the reference",
            where=f"{path}.{key}",
            got=f"{got}, policy.lora and {said}",
            expected=KEEPS_WHOLE,
            do=f"use such a trainer, or {do}",
        )
    yield from format_problems(trainer, context)
    if policy.lora is not None and policy.lora.quantization is not None:
        yield no_base(
            "policy.lora.quantization", policy.lora.quantization, f"{kind} in {path}", "trainer: {kind: torch}"
        )


def format_problems(trainer: Any, context: CheckContext) -> Iterator[Problem]:
    """Yield a number format of the policy that a trainer does not compute in."""
    sharding, capabilities = sharding_of(trainer), _TrainerCapabilities(trainer)
    own = capabilities.precision or _PolicyCapabilities(context.recipe.policy).dtype
    if own not in sharding.formats:
        yield Problem(
            f"this trainer computes in {' and '.join(sharding.formats)} only",
            where=context.at(sharding.key),
            got=f"{key_that_shards(trainer, context.kind_of('trainer', trainer))}, with policy.dtype: {own}",
            expected="a supported number format in policy.dtype or trainer.precision",
            do="deepspeed with zero_stage: 1, 2 or 3 has all of them",
        )


def unscaled(what: str, context: CheckContext) -> Iterator[Problem]:
    """Yield the problem of `what`, which trains a model in the policy's number format without a scaled loss."""
    if _PolicyCapabilities(context.recipe.policy).dtype == "float16":
        yield Problem(
            "small gradients vanish in float16 without a scaled loss",
            where="policy.dtype",
            got=f"float16, with {what}",
            expected="bfloat16 or float32",
            do="set policy.dtype: bfloat16",
        )


def row_problems(trainer: Any, context: CheckContext, n: int) -> Iterator[Problem]:
    """Yield what keeps `n` processes from sharing rows."""
    each = trainer.sequence_parallel
    if n % each:
        yield Problem(
            "the number of processes is not divisible by sequence_parallel",
            where=context.at("sequence_parallel"),
            got=f"{each}, and {n} processes",
            expected=f"a divisor of {n}",
            do=f"start a multiple of {each} processes, or set sequence_parallel to a divisor of {n}",
        )


class _PolicyCapabilities(CapabilityView):
    """Optional attributes of a policy's settings that trainers read."""

    dtype = Capability("float32", str)
    """Number format of its weights."""


class _CriticCapabilities(CapabilityView):
    """Optional attributes of a critic that trainers read."""

    spans_processes = Capability(False, bool)
    """True if it learns beside trainers of several processes."""


def _critic_problems(trainer: Any, critic: Any, context: CheckContext) -> Iterator[Problem]:
    """Yield problems of a critic beside it."""
    path, is_apart, kind = context.stage_path, trainer.sharding.parameters, context.kind_of("trainer", trainer)
    if not _CriticCapabilities(critic).spans_processes:
        yield Problem(
            "this critic works with the torch trainer only",
            where=f"{path}.critic.kind",
            got=f"{context.kind_of('critic', critic)} with {path}.trainer.kind: {kind}",
            expected="values",
            do="use trainer: {kind: torch}, or an estimator for a critic of states: gae, turn_gae or bilevel_gae",
        )
    elif critic.backbone == "policy" and (critic.trains_backbone or is_apart):
        moved = "the value loss would move weights that the trainer has a copy of"
        yield Problem(
            moved if critic.trains_backbone else "the critic would need sharded weights",
            where=f"{path}.critic.backbone",
            got=f"policy, with {path}.{key_that_shards(trainer, kind)}",
            expected="own" if is_apart else "own, or gradient: head",
            do="remove critic.backbone: the critic then has a transformer of its own, whole in each process",
        )
