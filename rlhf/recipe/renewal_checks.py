"""What models of rewards that are renewed within a stage ask of the settings around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError, nearest
from rlhf.recipe.loss_checks import policy_gradient_stages
from rlhf.recipe.split_checks import check_split
from rlhf.recipe.trainer_checks import shards_parameters
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe

#: What a reward's model has learnt -> keys of `reward_refresh` that mean nothing to it.
_SILENT = {
    "pairs": ("enough", "eta"),
    "outcome": ("eta", "max_per_task", "centring"),
    "steps": ("max_per_task", "centring"),
}


def _refreshing(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each `reward_refresh`."""
    for path, stage in policy_gradient_stages(recipe):
        if stage.reward_refresh is not None:
            yield f"{path}.reward_refresh", stage.reward_refresh


def _check_refreshed(recipe: Recipe) -> None:
    from rewards.models.model_folder import ModelReward, nodes_of

    found = [name for name, w in recipe.trained_rewards.items() if isinstance(w.reward, ModelReward)]
    for path, settings in _refreshing(recipe):
        _check_named(
            f"{path}.reward", settings.reward, found, "reward model", "rewards: {learned: {kind: reward_model}}"
        )
        reward: Any = recipe.rewards[settings.reward or found[0]].reward
        if nodes_of(reward.path) is not None:
            raise RecipeError(
                "a model that reads nodes with a mark cannot be trained further on turns without",
                where=path,
                got=f"a reward model that was trained with merge: {reward.path}",
                expected="a model of a stage without the key merge",
                hint="remove reward_refresh, or train the model without merge",
            )
        for name in _SILENT[reward.learnt]:
            if getattr(settings, name) != getattr(type(settings)(), name):
                raise RecipeError(
                    "this key has no effect",
                    where=f"{path}.{name}",
                    got=str(getattr(settings, name)),
                    expected=f"nothing, because the reward is a {kind_of('reward', reward)}",
                    hint="remove the key",
                )
        if settings.optimizer.schedule != "constant":
            raise RecipeError(
                "nobody knows how many updates there will be, so the learning rate cannot fall towards the last",
                where=f"{path}.optimizer.schedule",
                got=settings.optimizer.schedule,
                expected="constant",
                hint="remove the key",
            )


def _renewing(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each `judge_refresh`."""
    for path, stage in policy_gradient_stages(recipe):
        if stage.judge_refresh is not None:
            yield f"{path}.judge_refresh", stage.judge_refresh


def _check_renewed(recipe: Recipe) -> None:
    from rewards.judges.asking import AsksModel

    rewards: dict[str, object] = {name: weighted.reward for name, weighted in recipe.trained_rewards.items()}
    found = [name for name, reward in rewards.items() if isinstance(reward, AsksModel) and reward.path is not None]
    for path, settings in _renewing(recipe):
        example = "rewards: {own: {kind: grade, path: FOLDER}}"
        _check_named(f"{path}.reward", settings.reward, found, "judge with a path", example)
        others = [name for name in recipe.rewards if name != (settings.reward or found[0])]
        if settings.truth is not None and settings.truth not in others:
            raise RecipeError(
                "this names no reward that could be the truth",
                where=f"{path}.truth",
                got=settings.truth,
                expected=" or ".join(others) or "null",
                hint=nearest(settings.truth, others)
                or "remove the key: what the environment calls solved is then true",
            )
        check_split(settings.split, recipe.environment, f"{path}.split")
        if shards_parameters(recipe):
            raise RecipeError(
                "a policy that lies in pieces cannot be copied to judge",
                where=path,
                got="a stage with trainer.zero: 3",
                expected="zero: 0, 1 or 2",
                hint="lower trainer.zero, or remove the key",
            )


def _check_named(where: str, name: str | None, found: list[str], what: str, example: str) -> None:
    """Raise RecipeError unless `name` is one of `found`, or null and there is one."""
    if name in found or (name is None and len(found) == 1):
        return
    if name is None:
        got = f"null, and there are {', '.join(found)}" if found else f"null, and no reward is a {what}"
    else:
        got = name
    raise RecipeError(
        f"this names no reward that is a {what} and is trained on",
        where=where,
        got=got,
        expected=" or ".join(found) or example,
        hint=nearest(name or "", found) or ("name one of them" if found else "remove the key, or add the reward"),
    )


def _check_truth(recipe: Recipe) -> None:
    for path, settings in _refreshing(recipe):
        truth, others = settings.truth, [name for name in recipe.trained_rewards if name != settings.reward]
        if truth is None:
            continue
        watched = truth in recipe.rewards and truth not in recipe.trained_rewards
        if truth not in others or (settings.reward is None and hasattr(recipe.rewards[truth].reward, "learnt")):
            raise RecipeError(
                "what is watched cannot be learnt from" if watched else "this names no reward that could be the truth",
                where=f"{path}.truth",
                got=truth,
                expected="the name of another reward, or null",
                hint=f"write weight: 0 in place of watch in rewards.{truth}, or add a second reward to watch"
                if watched
                else nearest(truth, others) or "remove the key: what the environment calls solved is then true",
            )


def _caution_never(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        for key in ("reward_refresh", "judge_refresh"):
            settings = getattr(stage, key)
            if settings is not None and settings.every > stage.steps:
                yield f"{path}.{key}.every is {settings.every} and the stage has {stage.steps} steps"


RENEWAL_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_never,)
RENEWAL_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_refreshed, _check_truth, _check_renewed)
