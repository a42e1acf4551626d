"""What the trainer of a stage asks of the settings around it, and of the processes it is started in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def shards_parameters(recipe: Recipe) -> bool:
    """Whether a stage spreads the policy's weights over the processes, so that no engine can share its module."""
    return any(getattr(stage.trainer, "zero", 0) == 3 for stage in recipe.stages)


#: Key of a stage that works in one process only -> what is done then.
_IN_ONE_PROCESS = {
    "reward_refresh": "models of rewards are renewed",
    "judge_refresh": "models of rewards are renewed",
    "opponents": "older versions of the policy are kept",
}


def check_processes(recipe: Recipe, n: int) -> None:
    """Raise RecipeError where a part of the recipe cannot work in `n` processes."""
    if n == 1:
        return
    for i, stage in enumerate(recipe.stages):
        if hasattr(stage, "pairs"):
            raise RecipeError(
                "this stage works in one process",
                where=f"stages[{i}].kind",
                got=f"{kind_of('stage', stage)}, and {n} processes were started",
                expected="one process",
                hint="start one process, or run the stage by itself on the checkpoint of the others",
            )
        for key, what in _IN_ONE_PROCESS.items():
            if getattr(stage, key, None) is not None:
                raise RecipeError(
                    f"{what} in one process",
                    where=f"stages[{i}].{key}",
                    got=f"{n} processes",
                    expected="one process",
                    hint="start one process, or remove the key",
                )
        if kind_of("trainer", stage.trainer) == "torch":
            raise RecipeError(
                "this trainer works in one process",
                where=f"stages[{i}].trainer.kind",
                got=f"torch, and {n} processes were started",
                expected="deepspeed in every stage",
                hint=f"set 'stages.{i}.trainer={{kind: deepspeed}}', or start one process",
            )
    servers = getattr(recipe.engine, "servers", ())
    if servers:
        raise RecipeError(
            "every process delivers weights to an engine of its own",
            where="engine.servers",
            got=f"{len(servers)} servers, and {n} processes were started",
            expected="an engine that each process starts: servers: []",
            hint="remove the key, or start one process",
        )


def _deepspeed_stages(recipe: Recipe) -> list[tuple[str, Any]]:
    found = [(f"stages[{i}]", stage) for i, stage in enumerate(recipe.stages)]
    return [(path, stage) for path, stage in found if kind_of("trainer", stage.trainer) == "deepspeed"]


def _check_critic(recipe: Recipe) -> None:
    for path, stage in _deepspeed_stages(recipe):
        critic = getattr(stage, "critic", None)
        if critic is None:
            continue
        if kind_of("critic", critic) != "values":
            raise RecipeError(
                "this critic learns beside the plain trainer only",
                where=f"{path}.critic.kind",
                got=f"{kind_of('critic', critic)} with {path}.trainer.kind: deepspeed",
                expected="values",
                hint="use trainer: {kind: torch}, or an estimator for a critic of states: gae, turn_gae or bilevel_gae",
            )
        if critic.backbone == "policy" and (critic.trains_backbone or stage.trainer.zero == 3):
            moved = "the value loss would move weights that DeepSpeed has a copy of"
            raise RecipeError(
                moved if critic.trains_backbone else "the critic would need weights that lie in pieces",
                where=f"{path}.critic.backbone",
                got=f"policy, with {path}.trainer.zero: {stage.trainer.zero}",
                expected="own" if stage.trainer.zero == 3 else "own, or gradient: head",
                hint="remove critic.backbone: the critic then has a transformer of its own, whole in each process",
            )


def _check_reset(recipe: Recipe) -> None:
    for path, stage in _deepspeed_stages(recipe):
        if stage.trainer.zero == 3 and recipe.policy.lora and getattr(stage, "reference_reset", None) is not None:
            raise RecipeError(
                "adapters in pieces cannot stand in for an older one",
                where=f"{path}.reference_reset",
                got="a reference that is renewed, with policy.lora and trainer.zero: 3",
                expected="zero: 0, 1 or 2",
                hint="lower trainer.zero, or remove reference_reset",
            )


def _check_formats(recipe: Recipe) -> None:
    for path, stage in _deepspeed_stages(recipe):
        own = getattr(recipe.policy, "dtype", "float32")
        if stage.trainer.zero == 0 and stage.trainer.precision is None and own != "float32":
            raise RecipeError(
                "ZeRO 0 computes in float32 only",
                where=f"{path}.trainer.zero",
                got=f"0 with policy.dtype: {own}",
                expected="1, 2 or 3",
                hint="zero: 1 holds the optimiser's state once instead of in every process, and costs no more",
            )


TRAINER_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_critic, _check_reset, _check_formats)
