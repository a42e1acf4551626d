"""Rewards of a recipe, of a stage or of a suite's part: built from plain values, and one of them decides success."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError
from rlhf.recipe.builder import OF_EVERY_REWARD, build, build_part, plain, plain_part
from rlhf.recipe.describe import given
from rlhf.recipe.environment_properties import properties_declared_by
from rlhf.recipe.keys import keys_of
from rlhf.recipe.values import join
from rlhf.renamed import RENAMED_OF_REWARDS, under_new_names

if TYPE_CHECKING:
    from rlhf.rollout.reward_monitor import RewardMonitor
    from rlhf.rollout.scoring import WeightedReward


def rewards_of(values: Any, base: Path, path: str = "rewards") -> dict[str, WeightedReward]:
    """Build rewards from plain values at a YAML path: name -> kind, keys and weight. Raises RecipeError."""
    if not isinstance(values, Mapping):
        raise RecipeError(
            "rewards need names",
            where=path,
            got=given(values),
            expected="a mapping: outcome: {kind: outcome}",
            hint="write each reward under a name of your choice",
        )
    rewards = {str(name): _reward(str(name), value, base, path) for name, value in values.items()}
    refuse_two(rewards, path)
    return rewards


def refuse_two(rewards: Mapping[str, WeightedReward], path: str = "rewards") -> None:
    """Raise RecipeError where two rewards have `success_threshold`."""
    solving = [name for name, weighted in rewards.items() if weighted.success_threshold is not None]
    if len(solving) > 1:
        raise RecipeError(
            "only one reward may have success_threshold",
            where=f"{path}.{solving[1]}.success_threshold",
            got=", ".join(solving),
            expected="the key at one of them",
            hint="remove it from the others; a reward of kind combine joins several",
        )


def plain_rewards(rewards: Mapping[str, WeightedReward]) -> dict[str, Any]:
    """Return the plain values that `rewards_of` makes equal rewards of."""
    return {
        name: plain_part("reward", as_named(weighted.reward))
        | (
            {"monitor": plain_part(None, weighted.monitor)}
            if weighted.monitor
            else {"weight": plain(float, weighted.weight)}
        )
        | (
            {}
            if weighted.success_threshold is None or weighted.max_value is not None
            else {"success_threshold": weighted.success_threshold}
        )
        for name, weighted in rewards.items()
    }


def deciding(rewards: dict[str, WeightedReward], environment: Any, path: str = "rewards") -> dict[str, WeightedReward]:
    """Rewards, one of which says what is solved where the environment leaves that to them.

    It is the first that compares with the task's reference, from a value of 1 on, which is the most that it may say
    then; without one, the only reward there is, unless its values, or those of one nested in it, have a scale of their
    own.

    Raises:
        RecipeError: there are several rewards, and nothing says which of them decides; the only one has a scale of its
            own; or the one that would decide compares with no reference, and another that does is only monitored.
    """
    from rewards.base import Capabilities
    from rewards.combinators.parts import compared_in, with_parts

    if not properties_declared_by(environment).judged_by_rewards or any(
        w.success_threshold is not None for w in rewards.values()
    ):
        return rewards
    scored = [name for name, w in rewards.items() if w.monitor is None]
    compared = [name for name, w in rewards.items() if any(compared_in(name, w.reward, None))]
    comparing = [name for name in scored if name in compared]
    if compared and scored and not comparing:
        raise RecipeError(
            "a monitored reward does not define success, and no other reward compares with the reference",
            where=join(path, compared[0]),
            got="monitor",
            expected="a reward that defines success",
            hint=f"write weight: 0 in place of monitor, so that {compared[0]} defines success untrained, or "
            f"{path}.{scored[0]}.success_threshold with its threshold",
        )
    if not comparing and len(scored) > 1:
        raise RecipeError(
            "no reward defines when an attempt is solved",
            where=path,
            got=", ".join(scored),
            expected="success_threshold at one of them",
            hint=f"write {path}.{scored[0]}.success_threshold: 1.0, or another threshold",
        )
    parts = () if comparing else with_parts("", [rewards[name].reward for name in scored])
    if any(not Capabilities(part).marks_solved for _, part in parts):
        raise RecipeError(
            "the only reward does not say when an attempt is solved",
            where=join(path, scored[0]),
            got="scores without a natural threshold, such as the points of a judge or the output of a reward model",
            expected="success_threshold: the value from which an attempt counts as solved",
            hint=f"write {join(path, scored[0])}.success_threshold, such as the mean score before training, or add a "
            "reward that compares with the reference, with weight: 0 so that it is not trained on",
        )
    first, most = (comparing or scored)[:1], 1.0 if comparing else None  # a verifier says at most 1
    return {
        name: replace(w, success_threshold=1.0, max_value=most) if name in first else w for name, w in rewards.items()
    }


def as_named(reward: Any) -> Any:
    """Part as the recipe names it: the verifier or function inside a wrapped reward."""
    from rewards.trl_function import TrlFunction
    from rewards.verified import Verified

    if isinstance(reward, TrlFunction):
        return reward.function
    return reward.verifier if isinstance(reward, Verified) else reward


def _reward(name: str, values: Any, base: Path, of: str) -> WeightedReward:
    from rewards.trl_function import as_reward
    from rlhf.rollout.scoring import WeightedReward

    path = join(of, name)
    settings = under_new_names(values, RENAMED_OF_REWARDS, path) if isinstance(values, Mapping) else values
    monitor = _monitor(settings, path, base) if isinstance(settings, dict) else None
    weight = settings.pop("weight", 0.0 if monitor else 1.0) if isinstance(settings, dict) else 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) < float("inf"):
        raise RecipeError(
            "wrong type",
            where=join(path, "weight"),
            got=given(weight),
            expected="a number",
            hint="the weight multiplies this reward in the sum",
        )
    success_threshold = settings.pop("success_threshold", None) if isinstance(settings, dict) else None
    is_number = (
        isinstance(success_threshold, int | float)
        and not isinstance(success_threshold, bool)
        and math.isfinite(success_threshold)
    )
    if success_threshold is not None and (monitor or not is_number):
        raise RecipeError(
            "a monitored reward does not define success" if monitor else "wrong type",
            where=join(path, "success_threshold"),
            got=given(success_threshold),
            expected="a number: an attempt is solved if the reward is at least this",
            hint="remove the key or monitor" if monitor else "success_threshold: 1.0",
        )
    reward = build_part("reward", settings, path, base=base)
    for key in {*OF_EVERY_REWARD} & set(() if inspect.isroutine(reward) else keys_of(type(reward))):
        raise RecipeError(
            f"the {key} is a key of the recipe, so a reward cannot have a field of that name",
            where=join(path, key),
            got=f"a field {type(reward).__name__}.{key}",
            expected="a class without it",
            hint="remove the field; the recipe applies the weight" if key == "weight" else "remove the field",
        )
    least = None if success_threshold is None else float(success_threshold)
    return WeightedReward(
        name=name, weight=float(weight), reward=as_reward(reward), monitor=monitor, success_threshold=least
    )


def _monitor(settings: dict[str, Any], path: str, base: Path) -> RewardMonitor | None:
    """Take the key `monitor` out of a reward's settings: true, false, or a mapping of its keys. Raises RecipeError."""
    from rlhf.rollout.reward_monitor import RewardMonitor

    values = settings.pop("monitor", False)
    if values is False:
        return None
    where = join(path, "monitor")
    if values is not True and not isinstance(values, Mapping):
        expected = "true, or a mapping: {compare_with: NAME, window: 20, stop: false}"
        raise RecipeError("wrong type", where=where, got=given(values), expected=expected, hint="write monitor: true")
    if "weight" in settings:
        raise RecipeError(
            "this key has no effect",
            where=join(path, "weight"),
            got=given(settings["weight"]),
            expected="nothing, because a monitored reward is not part of the score",
            hint="remove the key, or monitor",
        )
    monitor: RewardMonitor = build(RewardMonitor, {} if values is True else values, where, base=base)
    return monitor
