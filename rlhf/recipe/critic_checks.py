"""What a critic asks of the settings around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.catalog import CATALOG, DEFAULT_KIND
from rlhf.errors import RecipeError
from rlhf.recipe.loss_checks import policy_gradient_stages
from rlhf.recipe.model_folders import refuse_no_model
from rlhf.registry import kind_of, resolve

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def critic_for(estimator: Any) -> str:
    """Return the kind of critic that `estimator`, or the one that it holds, compares with."""
    while hasattr(estimator, "inner"):
        estimator = estimator.inner
    return str(getattr(estimator, "needs_critic", DEFAULT_KIND["critic"]))


def written(kind: str) -> str:
    """Return the shortest way to write a critic of that kind."""
    return "{}" if kind == DEFAULT_KIND["critic"] else f"{{kind: {kind}}}"


def estimators_for(critic: str) -> list[str]:
    """Return, for a hint, the estimators that compare with such a critic, those left out that hold another one."""
    known = {kind: resolve("advantage", kind, base=Path()) for kind in CATALOG["advantage"]}
    needing = {kind: found for kind, found in known.items() if getattr(found, "needs_values", False) is True}
    kinds = [kind for kind, found in needing.items() if critic_for(found) == critic]
    takes = [kind for kind, found in known.items() if getattr(found, "takes_critic", "") == critic]
    kinds += [f"{kind} with contributions: critic" for kind in takes]  # progress alone may do with or without
    return kinds or list(needing)


def _check_pairing(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if stage.critic is None:
            continue
        given, wanted = kind_of("critic", stage.critic), critic_for(stage.advantage)
        if given in CATALOG["critic"] and given != wanted:
            raise RecipeError(
                "this critic does not learn what the estimator asks",
                where=f"{path}.critic.kind",
                got=f"{given} for {kind_of('advantage', stage.advantage)}",
                expected=wanted,
                hint=f"write critic: {written(wanted)}, or use advantage {' or '.join(estimators_for(given))}",
            )


def _check_roles(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if stage.critic is not None and stage.train_roles is not None:
            raise RecipeError(
                "a critic learns from all generations",
                where=f"{path}.train_roles",
                got=f"{', '.join(map(repr, stage.train_roles))} beside a critic",
                expected="null",
                hint="remove the key, or use an estimator without a critic, such as grpo",
            )


def _check_capacity(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        n_episodes = stage.tasks_per_step * stage.group_size
        if kind_of("critic", stage.critic) == "archer" and stage.critic.capacity < n_episodes:
            raise RecipeError(
                "the critic's buffer does not hold one step",
                where=f"{path}.critic.capacity",
                got=f"{stage.critic.capacity} turns",
                expected=f"at least tasks_per_step x group_size = {n_episodes}, for trajectories of one turn",
                hint="raise it to the turns of several steps",
            )


def _check_pairs(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if kind_of("critic", stage.critic) == "sweet" and stage.group_size < 2:
            raise RecipeError(
                "this critic learns from pairs of attempts at one task",
                where=f"{path}.group_size",
                got=str(stage.group_size),
                expected="at least 2",
                hint="raise it; half of the tasks should have attempts that differ in score",
            )


def _check_warmup(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if stage.critic is not None and stage.critic.warmup_steps >= stage.steps:
            raise RecipeError(
                "the policy would never be updated",
                where=f"{path}.critic.warmup_steps",
                got=str(stage.critic.warmup_steps),
                expected=f"less than steps = {stage.steps}",
                hint="lower it, or raise steps",
            )


def _check_path(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        given = getattr(stage.critic, "path", None)
        if given is not None:
            hint = "remove the key: the critic then begins as a copy of the policy"
            refuse_no_model(given, f"{path}.critic.path", hint)


CRITIC_CHECKS: tuple[Callable[[Recipe], None], ...] = (
    _check_pairing,
    _check_roles,
    _check_warmup,
    _check_path,
    _check_capacity,
    _check_pairs,
)


def _caution_clip(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        critic = stage.critic
        if kind_of("critic", critic) != "values" or stage.epochs * stage.minibatches > 1 or critic.backbone == "policy":
            continue
        if critic.clip is not None and critic.clip != type(critic)().clip:
            yield f"{path} makes one update per step, before which no value has moved: critic.clip has no effect"


CRITIC_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_clip,)
