"""What the trainer of a stage asks of the settings around it, and of the processes it is started in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError
from rlhf.recipe.registry import kind_of
from rlhf.training.backends.settings import Spread, spread_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


#: What goes with parts that need the policy's weights whole, and what to do about them.
KEEPS_WHOLE = "a trainer that keeps weights whole: torch, or deepspeed with zero: 0, 1 or 2"


def shards_parameters(recipe: Recipe) -> bool:
    """Whether a stage spreads the policy's weights over the processes, so that no engine can share its module."""
    return bool(apart_by(recipe))


def apart_by(recipe: Recipe) -> str:
    """Key and value of the trainer that spreads the policy's weights, such as `trainer.zero: 3`; empty without one."""
    for stage in recipe.stages:
        if spread_of(stage.trainer).parameters:
            return said(stage.trainer)
    return ""


def said(trainer: Any) -> str:
    """Key and value that say what a trainer spreads, such as `trainer.zero: 3`."""
    key = spread_of(trainer).key
    return f"trainer.{key}: {kind_of('trainer', trainer) if key == 'kind' else getattr(trainer, key)}"


#: Key of a stage that works in one process only -> what is done then.
_IN_ONE_PROCESS = {
    "reward_refresh": "models of rewards are renewed",
    "judge_renewal": "models of rewards are renewed",
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
        if not spread_of(stage.trainer).processes:
            raise RecipeError(
                "this trainer works in one process",
                where=f"stages[{i}].trainer.kind",
                got=f"{kind_of('trainer', stage.trainer)}, and {n} processes were started",
                expected="a trainer for several processes, such as deepspeed, in every stage",
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


def _shared_stages(recipe: Recipe) -> list[tuple[str, Any, Spread]]:
    """Stages that several processes may share."""
    found = [(f"stages[{i}]", stage, spread_of(stage.trainer)) for i, stage in enumerate(recipe.stages)]
    return [(path, stage, spread) for path, stage, spread in found if spread.processes]


def _check_critic(recipe: Recipe) -> None:
    for path, stage, spread in _shared_stages(recipe):
        critic = getattr(stage, "critic", None)
        if critic is None:
            continue
        if kind_of("critic", critic) != "values":
            raise RecipeError(
                "this critic learns beside the plain trainer only",
                where=f"{path}.critic.kind",
                got=f"{kind_of('critic', critic)} with {path}.trainer.kind: {kind_of('trainer', stage.trainer)}",
                expected="values",
                hint="use trainer: {kind: torch}, or an estimator for a critic of states: gae, turn_gae or bilevel_gae",
            )
        if critic.trunk == "policy" and (critic.trains_trunk or spread.parameters):
            moved = "the value loss would move weights that the trainer has a copy of"
            raise RecipeError(
                moved if critic.trains_trunk else "the critic would need weights that lie in pieces",
                where=f"{path}.critic.trunk",
                got=f"policy, with {path}.{said(stage.trainer)}",
                expected="own" if spread.parameters else "own, or gradient: head",
                hint="remove critic.trunk: the critic then has a transformer of its own, whole in each process",
            )


def _check_reset(recipe: Recipe) -> None:
    for path, stage, spread in _shared_stages(recipe):
        if spread.parameters and recipe.policy.lora and getattr(stage, "reference_reset", None) is not None:
            raise RecipeError(
                "adapters in pieces cannot stand in for an older one",
                where=f"{path}.reference_reset",
                got=f"a reference that is renewed, with policy.lora and {said(stage.trainer)}",
                expected=KEEPS_WHOLE,
                hint="use such a trainer, or remove reference_reset",
            )


def _check_formats(recipe: Recipe) -> None:
    for path, stage, spread in _shared_stages(recipe):
        own = getattr(recipe.policy, "dtype", "float32")
        if own not in spread.formats and stage.trainer.precision is None:
            raise RecipeError(
                f"this trainer computes in {' and '.join(spread.formats)} only",
                where=f"{path}.trainer.{spread.key}",
                got=f"{said(stage.trainer)}, with policy.dtype: {own}",
                expected="a number format that it has, in policy.dtype or trainer.precision",
                hint="deepspeed with zero: 1, 2 or 3 has all of them",
            )


TRAINER_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_critic, _check_reset, _check_formats)
