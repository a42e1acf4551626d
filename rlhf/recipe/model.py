"""The recipe itself: every part of a run as a live settings object."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError, nearest
from rlhf.recipe.aliases import ours
from rlhf.recipe.builder import build, build_environment, build_part, plain, plain_part
from rlhf.recipe.describe import given
from rlhf.recipe.environment_properties import properties_declared_by, with_defaults
from rlhf.recipe.keys import keys_of
from rlhf.recipe.values import join

if TYPE_CHECKING:
    from agents.base import Agent
    from environments.base import Environment
    from rlhf.asynchrony.cluster import Cluster
    from rlhf.asynchrony.settings import Asynchrony
    from rlhf.evaluation.evaluate import Evaluation
    from rlhf.inference.settings import TransformersSettings, VllmSettings
    from rlhf.rollout.limits import Limits
    from rlhf.rollout.reward_watch import Watch
    from rlhf.rollout.scoring import Weighted
    from rlhf.training.hub import Hub
    from rlhf.training.policy.model import FromScratch, Pretrained
    from rlhf.training.stages.policy_gradient import PolicyGradient
    from rlhf.training.stages.preference import Preference
    from rlhf.training.stages.reward_model import RewardModel
    from rlhf.training.stages.supervised import Supervised
    from rlhf.training.trackers import Tracker


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Policy, environment, rewards and stages of a run. Made by `load`, which has checked all of it.

    Attributes:
        name: names the run; letters, digits, dot, dash and underscore.
        seed: everything random in a run follows from it.
        rewards: name -> reward with its weight; a score is their weighted sum.
        stages: run one after the other on one policy.
        trackers: what metrics are sent to besides the run's own files.
        push_to_hub: repository that the trained policy is pushed to.
        base: folder that files named by a kind are looked for in.
    """

    name: str
    seed: int = 0
    policy: FromScratch | Pretrained
    environment: Environment
    agent: Agent
    rewards: Mapping[str, Weighted]
    engine: TransformersSettings | VllmSettings
    asynchrony: Asynchrony
    cluster: Cluster
    limits: Limits
    evaluation: Evaluation
    stages: tuple[Supervised | Preference | RewardModel | PolicyGradient, ...]
    trackers: tuple[Tracker, ...] = ()
    push_to_hub: Hub | None = None
    base: Path = field(default=Path(), compare=False)

    @property
    def trained_rewards(self) -> dict[str, Weighted]:
        """The rewards that make the score; the others are watched."""
        return {name: weighted for name, weighted in self.rewards.items() if weighted.watch is None}


#: Every key of a recipe, in the order in which they are written.
KEYS = (
    *("name", "seed", "policy", "environment", "agent", "rewards", "engine", "asynchrony", "cluster", "limits"),
    *("evaluation", "stages", "trackers", "push_to_hub"),
)
_REQUIRED = ("policy", "environment", "stages")


def recipe_of(values: Mapping[str, Any], *, name: str, base: Path) -> Recipe:
    """Build a recipe from plain values, strictly; pairs of parts are not looked at yet.

    Args:
        values: the YAML as plain Python values.
        name: used where `values` has none.
        base: folder of the recipe.
    """
    for key in values:
        if key not in KEYS:
            hint = ours(key) or nearest(key, KEYS) or "remove the key"
            raise RecipeError(
                f"a recipe has no key '{key}'", where=key, got=given(values[key]), expected=", ".join(KEYS), hint=hint
            )
    for key in _REQUIRED:
        if key not in values:
            raise RecipeError(
                "a recipe needs this key", where=key, got="nothing", expected=f"{key}: ...", hint="see `rlhf recipes`"
            )
    # Light parts come first: a package that is missing there is told before torch is loaded for the others.
    environment = build_environment(values["environment"], "environment", base=base)
    agent = build_part("agent", with_defaults("agent", environment, values.get("agent", {})), "agent", base=base)
    limits = with_defaults("limits", environment, values.get("limits", {}))

    from rlhf.asynchrony.cluster import Cluster
    from rlhf.asynchrony.settings import Asynchrony
    from rlhf.evaluation.evaluate import Evaluation
    from rlhf.rollout.limits import Limits

    return Recipe(
        name=_name(values.get("name", name)),
        seed=_seed(values.get("seed", 0)),
        environment=environment,
        agent=agent,
        rewards=deciding(rewards_of(values.get("rewards", {}), base), environment),
        engine=build_part("engine", values.get("engine", {}), "engine", base=base),
        asynchrony=build(Asynchrony, values.get("asynchrony", {}), "asynchrony", base=base),
        cluster=build(Cluster, values.get("cluster", {}), "cluster", base=base),
        limits=build(Limits, limits, "limits", base=base),
        evaluation=build(Evaluation, values.get("evaluation", {}), "evaluation", base=base),
        policy=build_part("policy", values["policy"], "policy", base=base),
        stages=_stages(values["stages"], base),
        trackers=_trackers(values.get("trackers", []), base),
        push_to_hub=_hub(values.get("push_to_hub"), base),
        base=base,
    )


def values_of(recipe: Recipe) -> dict[str, Any]:
    """Return the plain values of `recipe`, defaults written out; `recipe_of` makes an equal recipe of them."""
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "policy": plain_part("policy", recipe.policy),
        "environment": plain_part("environment", recipe.environment),
        "agent": plain_part("agent", recipe.agent),
        "rewards": plain_rewards(recipe.rewards),
        "engine": plain_part("engine", recipe.engine),
        "asynchrony": plain_part(None, recipe.asynchrony),
        **({"cluster": plain_part(None, recipe.cluster)} if recipe.cluster.is_on else {}),
        "limits": plain_part(None, recipe.limits),
        "evaluation": plain_part(None, recipe.evaluation),
        "stages": [plain_part("stage", stage) for stage in recipe.stages],
        **({"trackers": [plain_part("tracker", one) for one in recipe.trackers]} if recipe.trackers else {}),
        **({"push_to_hub": plain_part(None, recipe.push_to_hub)} if recipe.push_to_hub else {}),
    }


def plain_rewards(rewards: Mapping[str, Weighted]) -> dict[str, Any]:
    """Return the plain values that `rewards_of` makes equal rewards of."""
    return {
        name: plain_part("reward", _as_named(weighted.reward))
        | ({"watch": plain_part(None, weighted.watch)} if weighted.watch else {"weight": plain(float, weighted.weight)})
        | ({} if weighted.solved_at is None or weighted.max_value is not None else {"solved_at": weighted.solved_at})
        for name, weighted in rewards.items()
    }


def _as_named(reward: Any) -> Any:
    """Part as the recipe names it: the verifier or function inside a wrapped reward."""
    from rewards.trl_function import TrlFunction
    from rewards.verified import Verified

    if isinstance(reward, TrlFunction):
        return reward.function
    return reward.verifier if isinstance(reward, Verified) else reward


def named_parts(recipe: Recipe) -> dict[str, Any]:
    """Return the parts that a program may have given, by their paths, as the recipe names them."""
    rewards = {f"rewards.{name}": _as_named(weighted.reward) for name, weighted in recipe.rewards.items()}
    return {"environment": recipe.environment, "agent": recipe.agent, **rewards}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise RecipeError(
            "this cannot name a run",
            where="name",
            got=given(name),
            expected="letters, digits, dot, dash and underscore",
            hint="the name becomes a folder",
        )
    return name


def _seed(seed: Any) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise RecipeError(
            "invalid seed",
            where="seed",
            got=given(seed),
            expected="a whole number, at least 0",
            hint="change the value, or remove the key for seed 0",
        )
    return seed


def rewards_of(values: Any, base: Path) -> dict[str, Weighted]:
    """Build rewards from plain values: name -> kind, keys and weight. Raises RecipeError."""
    if not isinstance(values, Mapping):
        raise RecipeError(
            "rewards have names",
            where="rewards",
            got=given(values),
            expected="a mapping: outcome: {kind: outcome}",
            hint="write each reward under a name of your choice",
        )
    rewards = {str(name): _reward(str(name), value, base) for name, value in values.items()}
    solving = [name for name, weighted in rewards.items() if weighted.solved_at is not None]
    if len(solving) > 1:
        raise RecipeError(
            "one reward says what is solved",
            where=f"rewards.{solving[1]}.solved_at",
            got=", ".join(solving),
            expected="the key at one of them",
            hint="remove it from the others; a reward of kind combine joins several",
        )
    return rewards


def deciding(rewards: dict[str, Weighted], environment: Any) -> dict[str, Weighted]:
    """Rewards, one of which says what is solved where the environment leaves that to them.

    It is the first that compares with the task's reference, from a value of 1 on, which is the most that it may say
    then; without one, the only reward there is.

    Raises:
        RecipeError: there are several rewards, and nothing says which of them decides.
    """
    from rewards.combinators.parts import compared_in

    if not properties_declared_by(environment).judged_by_rewards or any(
        w.solved_at is not None for w in rewards.values()
    ):
        return rewards
    scored = [name for name, w in rewards.items() if w.watch is None]
    comparing = [name for name in scored if any(compared_in(name, rewards[name].reward, None))]
    if not comparing and len(scored) > 1:
        raise RecipeError(
            "no reward defines when an attempt is solved",
            where="rewards",
            got=", ".join(scored),
            expected="solved_at at one of them",
            hint=f"write rewards.{scored[0]}.solved_at: 1.0, or what it has to be worth",
        )
    first, most = (comparing or scored)[:1], 1.0 if comparing else None  # a verifier says at most 1
    return {name: replace(w, solved_at=1.0, max_value=most) if name in first else w for name, w in rewards.items()}


def _reward(name: str, values: Any, base: Path) -> Weighted:
    from rewards.trl_function import as_reward
    from rlhf.rollout.scoring import Weighted

    path = join("rewards", name)
    settings = dict(values) if isinstance(values, Mapping) else values
    watch = _watch(settings, path, base) if isinstance(settings, dict) else None
    weight = settings.pop("weight", 0.0 if watch else 1.0) if isinstance(settings, dict) else 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) < float("inf"):
        raise RecipeError(
            "wrong type",
            where=join(path, "weight"),
            got=given(weight),
            expected="a number",
            hint="the weight multiplies this reward in the sum",
        )
    solved_at = settings.pop("solved_at", None) if isinstance(settings, dict) else None
    if solved_at is not None and (watch or isinstance(solved_at, bool) or not isinstance(solved_at, int | float)):
        raise RecipeError(
            "a watched reward does not decide success" if watch else "wrong type",
            where=join(path, "solved_at"),
            got=given(solved_at),
            expected="a number: an attempt is solved where the reward is worth at least so much",
            hint="remove the key or watch" if watch else "solved_at: 1.0",
        )
    reward = build_part("reward", settings, path, base=base)
    for key in {"weight", "watch", "solved_at"} & set(() if inspect.isroutine(reward) else keys_of(type(reward))):
        raise RecipeError(
            f"the {key} belongs to the recipe, so a reward cannot have a key of that name",
            where=join(path, key),
            got=f"a field {type(reward).__name__}.{key}",
            expected="a class without it",
            hint="remove the field; the recipe multiplies" if key == "weight" else "remove the field",
        )
    least = None if solved_at is None else float(solved_at)
    return Weighted(name=name, weight=float(weight), reward=as_reward(reward), watch=watch, solved_at=least)


def _watch(settings: dict[str, Any], path: str, base: Path) -> Watch | None:
    """Take the key `watch` out of a reward's settings: true, false, or a mapping of its keys. Raises RecipeError."""
    from rlhf.rollout.reward_watch import Watch

    values = settings.pop("watch", False)
    if values is False:
        return None
    where = join(path, "watch")
    if values is not True and not isinstance(values, Mapping):
        expected = "true, or a mapping: {of: NAME, window: 20, stop: false}"
        raise RecipeError("wrong type", where=where, got=given(values), expected=expected, hint="write watch: true")
    if "weight" in settings:
        raise RecipeError(
            "this key has no effect",
            where=join(path, "weight"),
            got=given(settings["weight"]),
            expected="nothing, because a watched reward is no part of the score",
            hint="remove the key, or watch",
        )
    watch: Watch = build(Watch, {} if values is True else values, where, base=base)
    return watch


def _trackers(values: Any, base: Path) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise RecipeError(
            "wrong type",
            where="trackers",
            got=given(values),
            expected="a list: - {kind: wandb, project: NAME}",
            hint="`rlhf recipes --kinds tracker` lists the kinds",
        )
    return tuple(build_part("tracker", one, f"trackers[{i}]", base=base) for i, one in enumerate(values))


def _hub(values: Any, base: Path) -> Hub | None:
    """Build the key `push_to_hub`: the name of a repository, or a mapping of keys."""
    from rlhf.training.hub import Hub

    if values is None:
        return None
    hub: Hub = build(Hub, {"repo": values} if isinstance(values, str) else values, "push_to_hub", base=base)
    return hub


def _stages(values: Any, base: Path) -> tuple[Any, ...]:
    if not isinstance(values, list) or not values:
        raise RecipeError(
            "a recipe needs stages",
            where="stages",
            got=given(values),
            expected="a list: - {kind: policy_gradient, steps: 100}",
            hint="`rlhf recipes --kinds` lists the kinds of stages",
        )
    return tuple(build_part("stage", stage, f"stages[{i}]", base=base) for i, stage in enumerate(values))
