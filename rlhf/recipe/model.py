"""The recipe itself: every part of a run as a live settings object."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError, RlhfError, UnknownKeyError, nearest
from rlhf.recipe.aliases import alias_hint
from rlhf.recipe.builder import build, build_environment, build_part, plain_part
from rlhf.recipe.describe import given
from rlhf.recipe.environment_properties import with_defaults
from rlhf.recipe.places import KEYS, nested_key_hint
from rlhf.recipe.rewards import as_named, deciding, plain_rewards, refuse_two, rewards_of
from rlhf.recipe.stages import plain_stage, stages_of

if TYPE_CHECKING:
    from agents.base import Agent
    from environments.base import Environment
    from rlhf.asynchrony.cluster import Cluster
    from rlhf.asynchrony.settings import Asynchrony
    from rlhf.evaluation.evaluate import Evaluation
    from rlhf.inference.settings import TransformersSettings, VllmSettings
    from rlhf.rollout.limits import Limits
    from rlhf.rollout.scoring import WeightedReward
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
        policy, environment, agent, engine, asynchrony, cluster, limits, evaluation: objects whose fields are the keys
            of that part of a recipe.
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
    rewards: Mapping[str, WeightedReward]
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
    def trained_rewards(self) -> dict[str, WeightedReward]:
        """The rewards that make the score; the others are monitored."""
        return {name: weighted for name, weighted in self.rewards.items() if weighted.monitor is None}

    @property
    def all_rewards(self) -> dict[str, WeightedReward]:
        """Those of the recipe, and those that stages define for themselves, by their paths."""
        own = ((i, stage.own_rewards) for i, stage in enumerate(self.stages))
        theirs = {f"stages[{i}].rewards.{name}": w for i, rewards in own for name, w in rewards.items()}
        return {f"rewards.{name}": w for name, w in self.rewards.items()} | theirs

    def at(self, stage: Any) -> Recipe:
        """Recipe whose environment, limits and rewards are those of one of its stages.

        Raises:
            RecipeError: none of the rewards there says what is solved, or two do.
        """
        if not stage.differs:
            return self
        environment = self.environment if stage.environment is None else stage.environment
        path, rewards = f"stages[{self.stages.index(stage)}].rewards", self._asked_by(stage) | stage.own_rewards
        refuse_two(rewards, path)
        limits = self.limits if stage.limits is None else stage.limits
        return replace(self, environment=environment, limits=limits, rewards=deciding(rewards, environment, path))

    def _asked_by(self, stage: Any) -> dict[str, WeightedReward]:
        """Rewards of the recipe that a stage asks, with its weights."""
        from rlhf.training.stage_rewards import reweighted

        found = reweighted(self.rewards, stage.weights)
        if stage.environment is not None:
            found = {name: w for name, w in found.items() if stage.weights is None or name in stage.weights}
        elif all(w.success_threshold is None for w in stage.own_rewards.values()):
            return found
        # What decides because nothing else does need not do so in another environment, or beside what does.
        return {
            name: w if w.max_value is None else replace(w, success_threshold=None, max_value=None)
            for name, w in found.items()
        }


_REQUIRED = ("policy", "environment", "stages")
#: Unknown keys that an error names, beside the first.
_MOST_TOLD = 20


def recipe_of(values: Mapping[str, Any], *, name: str, base: Path) -> Recipe:
    """Build a recipe from plain values, strictly; pairs of parts are not looked at yet.

    Args:
        values: the YAML as plain Python values.
        name: used where `values` has none.
        base: folder of the recipe.

    Raises:
        RecipeError: the first thing that is wrong; of unknown keys with others that can be told apart from it.
    """
    try:
        return _recipe_of(values, name=name, base=base)
    except UnknownKeyError as error:
        error.hint += "".join(f"\n  also:     {one}" for one in _further(error, values, name=name, base=base))
        raise


def _further(error: UnknownKeyError, values: Mapping[str, Any], *, name: str, base: Path) -> Iterator[str]:
    """Yield a line for each unknown key but the first: one after the other is taken out of a copy."""
    left: Any = None
    for _ in range(_MOST_TOLD):
        try:
            left = left or deepcopy(dict(values))
            _take_out(left, error.where)
            # A misspelt key is told before torch is loaded, so that what comes after waits for the next time.
            if "torch" in sys.modules:
                _recipe_of(left, name=name, base=base)
            else:
                _light_parts(left, base)
            return
        except UnknownKeyError as other:
            error = other
            yield f"{error.where}: {error.what}; {error.hint}"
        except (RlhfError, LookupError, TypeError, ValueError):  # cannot be told apart from what went before
            return


def _take_out(values: Any, path: str) -> None:
    """Delete the key at a YAML path, `stages[1].optimizer.rate`; names within it may hold dots. Raises LookupError."""
    if isinstance(values, list):
        number, _, rest = path.removeprefix("[").partition("]")
        return _take_out(values[int(number)], rest.removeprefix("."))
    if path in values:
        del values[path]
        return None
    above = [key for key in values if path.startswith((f"{key}.", f"{key}["))]
    return _take_out(values[above[0]], path.removeprefix(above[0]).removeprefix("."))


def _light_parts(values: Mapping[str, Any], base: Path) -> tuple[Environment, Agent]:
    """Check the keys of a recipe and make the parts that need no torch."""
    for key in values:
        if key not in KEYS:
            hint = nested_key_hint(key) or alias_hint(key) or nearest(key, KEYS) or "remove the key"
            raise UnknownKeyError(
                f"a recipe has no key '{key}'", where=key, got=given(values[key]), expected=", ".join(KEYS), hint=hint
            )
    for key in _REQUIRED:
        if key not in values:
            raise RecipeError(
                "a recipe needs this key", where=key, got="nothing", expected=f"{key}: ...", hint="see `rlhf recipes`"
            )
    environment = build_environment(values["environment"], "environment", base=base)
    agent = build_part("agent", with_defaults("agent", environment, values.get("agent", {})), "agent", base=base)
    return environment, agent


def _recipe_of(values: Mapping[str, Any], *, name: str, base: Path) -> Recipe:
    # Light parts come first: a package that is missing there is told before torch is loaded for the others.
    environment, agent = _light_parts(values, base)
    limits = with_defaults("limits", environment, values.get("limits", {}))

    from rlhf.asynchrony.cluster import Cluster
    from rlhf.asynchrony.settings import Asynchrony
    from rlhf.evaluation.evaluate import Evaluation
    from rlhf.rollout.limits import Limits

    own_limits = build(Limits, limits, "limits", base=base)
    return Recipe(
        name=_name(values.get("name", name)),
        seed=_seed(values.get("seed", 0)),
        environment=environment,
        agent=agent,
        rewards=deciding(rewards_of(values.get("rewards", {}), base), environment),
        engine=build_part("engine", values.get("engine", {}), "engine", base=base),
        asynchrony=build(Asynchrony, values.get("asynchrony", {}), "asynchrony", base=base),
        cluster=build(Cluster, values.get("cluster", {}), "cluster", base=base),
        limits=own_limits,
        evaluation=build(Evaluation, values.get("evaluation", {}), "evaluation", base=base),
        policy=build_part("policy", values["policy"], "policy", base=base),
        stages=stages_of(values["stages"], base, own_limits),
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
        "stages": [plain_stage(stage) for stage in recipe.stages],
        **({"trackers": [plain_part("tracker", one) for one in recipe.trackers]} if recipe.trackers else {}),
        **({"push_to_hub": plain_part(None, recipe.push_to_hub)} if recipe.push_to_hub else {}),
    }


def differing(mine: Any, theirs: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys, as an override has them, that two recipes give different values, with both."""
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        mine, theirs = dict(enumerate(mine)), dict(enumerate(theirs))
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        return {} if mine == theirs else {path: (mine, theirs)}
    keys = [*mine, *(key for key in theirs if key not in mine)]
    found = (differing(mine.get(k), theirs.get(k), f"{path}.{k}" if path else str(k)) for k in keys)
    return {key: both for of_key in found for key, both in of_key.items()}


def named_parts(recipe: Recipe) -> dict[str, Any]:
    """Return the parts that a program may have given, by their paths, as the recipe names them."""
    rewards = {f"rewards.{name}": as_named(weighted.reward) for name, weighted in recipe.rewards.items()}
    return {"environment": recipe.environment, "agent": recipe.agent, **rewards}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise RecipeError(
            "this is not a valid run name",
            where="name",
            got=given(name),
            expected="a text of letters, digits, dot, dash and underscore",
            hint=f"write name: '{name}'" if isinstance(name, int | float) else "the name becomes a folder",
        )
    return name


def _seed(seed: Any) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise RecipeError(
            "invalid seed",
            where="seed",
            got=given(seed),
            expected=f"a whole number from 0 to {2**32 - 1}",
            hint="change the value, or remove the key for seed 0",
        )
    return seed


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
