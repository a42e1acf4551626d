"""What stages that are no policy gradient ask of the settings around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError
from rlhf.recipe.start_checks import refuse_group_size, refuse_replay
from rlhf.recipe.trainer_checks import shards_parameters
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe

#: Keys of demonstrations, which attempts take the place of.
_OF_DEMONSTRATIONS = ("n_demonstrations", "random_share", "unsolved_share")
#: Keys of pairs that say how attempts are made, and how they are compared.
_OF_ATTEMPTS, _OF_COMPARING = ("tasks", "group_size", "temperature"), ("level", "gamma", "margin", "max_per_task")


def _imitating(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each stage that imitates attempts."""
    from rlhf.training.stages.supervised import Supervised

    found = ((f"stages[{i}]", stage) for i, stage in enumerate(recipe.stages))
    return ((path, stage) for path, stage in found if isinstance(stage, Supervised) and stage.attempts is not None)


def paired_stages(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each stage that learns from pairs."""
    found: Iterator[tuple[str, Any]] = ((f"stages[{i}]", stage) for i, stage in enumerate(recipe.stages))
    return ((path, stage) for path, stage in found if hasattr(stage, "pairs"))


def _check_attempts(recipe: Recipe) -> None:
    for path, stage in _imitating(recipe):
        why = f"{path}.attempts takes the place of demonstrations"
        _refuse_changed(stage, _OF_DEMONSTRATIONS, path, why, "remove the key, or attempts")


def _check_sources(recipe: Recipe) -> None:
    for path, stage in paired_stages(recipe):
        source, where = stage.pairs, f"{path}.pairs"
        if source.file is not None and source.from_run is not None:
            raise RecipeError(
                "pairs come from one place",
                where=where,
                got=f"file {source.file} and from_run {source.from_run}",
                expected="one of the two, or neither",
                hint="remove one",
            )
        name = "file" if source.file is not None else "from_run" if source.from_run is not None else ""
        if not name:
            continue
        why = f"the pairs are those of {where}.{name}"
        _refuse_changed(source, _OF_ATTEMPTS, where, why, f"remove the key, or {name}")
        _refuse_changed(stage, ("split",), path, why, f"remove the key, or {name}")
        if name == "file":
            _refuse_changed(source, _OF_COMPARING, where, why, f"remove the key, or {name}")


def _check_compared(recipe: Recipe) -> None:
    for path, stage in paired_stages(recipe):
        source = stage.pairs
        if source.level == "trajectory":
            why = "whole attempts are compared by their score"
            _refuse_changed(source, ("gamma",), f"{path}.pairs", why, "remove the key, or use level: state or parting")
        if source.file is None and not any(weighted.weight for weighted in recipe.rewards.values()):
            raise RecipeError(
                "no attempt can be better than another: every reward has weight 0",
                where="rewards",
                got=", ".join(recipe.rewards) or "no rewards",
                expected=f"a reward with a weight, for {path}.pairs",
                hint="add rewards: {outcome: {kind: outcome}}, or name a file of pairs",
            )


def _check_alone(recipe: Recipe) -> None:
    for path, stage in paired_stages(recipe):
        if shards_parameters(recipe):
            raise RecipeError(
                "this stage cannot train weights that lie in pieces",
                where=f"{path}.kind",
                got=f"{kind_of('stage', stage)} beside a stage with trainer.zero: 3",
                expected="zero: 0, 1 or 2",
                hint="lower trainer.zero, or run the stage by itself on a checkpoint",
            )


def _check_base(recipe: Recipe) -> None:
    for path, stage in paired_stages(recipe):
        if getattr(stage, "reference", "") == "base" and recipe.policy.lora is None:
            raise RecipeError(
                "there is no model under an adapter",
                where=f"{path}.reference",
                got="base, and policy.lora is null",
                expected="start, or a policy with an adapter",
                hint="use reference: start, or add policy.lora",
            )


def _refuse_changed(part: Any, names: tuple[str, ...], path: str, why: str, hint: str) -> None:
    """Raise RecipeError for the first of `names` that has another value than its default."""
    for name in names:
        if getattr(part, name) != getattr(type(part)(), name):
            raise RecipeError(
                "this key has no effect",
                where=f"{path}.{name}",
                got=str(getattr(part, name)),
                expected=f"nothing, because {why}",
                hint=hint,
            )


def _check_scored(recipe: Recipe) -> None:
    for path, stage in _imitating(recipe):
        if stage.attempts.keep == "best" and not any(weighted.weight for weighted in recipe.rewards.values()):
            raise RecipeError(
                "no attempt can be better than another: every reward has weight 0",
                where="rewards",
                got=", ".join(recipe.rewards) or "no rewards",
                expected=f"a reward with a weight, for {path}.attempts.keep: best",
                hint="add rewards: {outcome: {kind: outcome}}, or use keep: solved",
            )


def _learning(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each stage that trains a reward model."""
    from rlhf.training.stages.reward_model import RewardModel

    found: Iterator[tuple[str, Any]] = ((f"stages[{i}]", stage) for i, stage in enumerate(recipe.stages))
    return ((path, stage) for path, stage in found if isinstance(stage, RewardModel))


def _check_learning(recipe: Recipe) -> None:
    for path, stage in _learning(recipe):
        why = f"{path} learns from {stage.learns}"
        if stage.learns == "pairs":
            keys = ("enough", "rollout", "eta", "merge")
            _refuse_changed(stage, keys, path, why, "remove the key, or use learns: steps")
            continue
        _refuse_changed(stage, ("centring",), path, why, "remove the key, or use learns: pairs")
        if stage.learns == "outcome":
            _refuse_changed(stage, ("rollout", "eta", "merge"), path, why, "remove the key, or use learns: steps")
        names = ("file", "level", "gamma", "margin", "max_per_task")
        _refuse_changed(stage.pairs, names, f"{path}.pairs", why, "remove the key, or use learns: pairs")
        if stage.pairs.from_run is not None:
            why = f"the attempts are those of {path}.pairs.from_run"
            _refuse_changed(stage, ("rollout",), path, why, "remove the key, or from_run")


def _check_branches(recipe: Recipe) -> None:
    for path, stage in _learning(recipe):
        if stage.pairs.from_run is None:
            refuse_group_size(f"{path}.pairs", stage.rollout, stage.pairs.group_size)
            refuse_replay(recipe, path, "rollout", stage.rollout)


STAGE_CHECKS: tuple[Callable[[Recipe], None], ...] = (
    _check_attempts,
    _check_scored,
    _check_sources,
    _check_compared,
    _check_alone,
    _check_base,
    _check_learning,
    _check_branches,
)
