"""The parts of a recipe with their places, and what follows from all of them together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf.catalog import CATALOG
from rlhf.checking import CheckContext, RecipeView
from rlhf.recipe.environment_properties import properties_declared_by
from rlhf.recipe.keys import holds_objects, keys_of, section_in
from rlhf.recipe.values import join
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


@dataclass(frozen=True, kw_only=True)
class Place:
    """A part where it stands.

    Attributes:
        part: its settings, or a function.
        section: of the catalogue, where it has a kind; else empty.
        context: what it may look at.
    """

    part: Any
    section: str
    context: CheckContext


def stages_of(recipe: Recipe, kind: type[Any] = object) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each stage that is a `kind`."""
    return ((f"stages[{i}]", stage) for i, stage in enumerate(recipe.stages) if isinstance(stage, kind))


def environments_of_run(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Give path and recipe of each environment with limits and rewards: of all plain stages, and of each other stage.

    The path stands before keys: "" for the recipe's own, or "stages[1].". A recipe's `stages` are those that are there.
    """
    yield "", replace(recipe, stages=tuple(stage for stage in recipe.stages if not stage.differs))
    for path, stage in stages_of(recipe):
        if stage.differs:
            yield f"{path}.", replace(recipe.at(stage), stages=(stage,))


def shards_parameters(recipe: Recipe) -> bool:
    """True if a stage's trainer shards the policy, so that no engine can share its module."""
    return bool(_sharded(recipe))


def copies_policy(recipe: Recipe) -> bool:
    """True if an in-process engine needs a copy of the policy."""
    return shards_parameters(recipe) or recipe.asynchrony.is_on


def _sharded(recipe: Recipe) -> Mapping[str, str]:
    from rlhf.training.backends.sharding import key_that_shards, sharding_of

    stages = [(path, stage.trainer) for path, stage in stages_of(recipe)]
    return {
        path: key_that_shards(trainer, kind_of("trainer", trainer))
        for path, trainer in stages
        if sharding_of(trainer).parameters
    }


def view_of(recipe: Recipe) -> RecipeView:
    """The view of `recipe` that its parts check themselves against."""
    from agents.chat import ChatAgent
    from agents.roles import roles_of
    from rewards.base import is_penalty
    from rewards.combinators.parts import with_parts
    from rlhf.inference.settings import shares_policy
    from rlhf.training.stages.policy_gradient import PolicyGradient

    properties, sharded = properties_declared_by(recipe.environment), _sharded(recipe)
    chatting = (part for _, part in with_parts("agent", recipe.agent) if isinstance(part, ChatAgent))
    return RecipeView(
        policy=recipe.policy,
        environment=recipe.environment,
        agent=recipe.agent,
        rewards=recipe.rewards,
        trained_rewards=recipe.trained_rewards,
        engine=recipe.engine,
        asynchrony=recipe.asynchrony,
        cluster=recipe.cluster,
        limits=recipe.limits,
        evaluation=recipe.evaluation,
        stages=recipe.stages,
        properties=properties,
        roles=roles_of(recipe.agent, properties.seats),
        learning=tuple(stages_of(recipe, PolicyGradient)),
        penalties=tuple(name for name, w in recipe.rewards.items() if w.weight and is_penalty(w.reward)),
        is_silent=any(agent.think == "off" for agent in chatting),
        without_tools=lambda: list(_without_tools("environment", recipe.environment)),
        sharded=sharded,
        shares_policy=shares_policy(recipe.engine) and not copies_policy(recipe),
        kind_of=kind_of,
        is_listed=_is_listed,
    )


def _is_listed(section: str, part: object) -> bool:
    return kind_of(section, part) in CATALOG[section]


def _without_tools(path: str, world: Any) -> Iterator[tuple[str, Any]]:
    """Give path and settings of each environment that takes no calls, those within another in its place."""
    from environments.base import Capabilities, member_environments

    held = member_environments(world)
    for where, inner in held:
        yield from _without_tools(path + where, inner)
    says = Capabilities(world).offers_tools
    if not held and not (says if says is not None else not _is_listed("environment", world)):
        yield path, world


def places(recipe: Recipe, view: RecipeView | None = None, *, is_trained: bool = False) -> list[Place]:
    """Every part of `recipe` with its place: stages before their parts, other parents after.

    Args:
        recipe: all of it is built.
        view: of it, where there is one already.
        is_trained: whether the policy is only to be evaluated.
    """
    common: dict[str, Any] = {"recipe": view or view_of(recipe), "is_trained": is_trained}
    found = list(_within(recipe.agent, "agent", "agent", common))
    for name, weighted in recipe.rewards.items():
        path, own = join("rewards", name), common | {"reward": name}
        if weighted.monitor is not None:
            found += _within(weighted.monitor, "", join(path, "monitor"), own)
        found += _within(weighted.reward, "reward", path, own)
    found += _within(recipe.environment, "environment", "environment", common)
    found += _within(recipe.policy, "policy", "policy", common)
    for path, stage in stages_of(recipe):
        own = common | {"stage": stage, "stage_path": path}
        if stage.differs:
            own["recipe"] = view_of(recipe.at(stage))
        for name, weighted in stage.own_rewards.items():
            where, named = f"{path}.rewards.{name}", own | {"reward": name}
            if weighted.monitor is not None:
                found += _within(weighted.monitor, "", join(where, "monitor"), named)
            found += _within(weighted.reward, "reward", where, named)
        found.append(_place(stage, "stage", path, own))
        found += _held(stage, path, own)
    found += _within(recipe.engine, "engine", "engine", common)
    found += _within(recipe.asynchrony, "", "asynchrony", common)
    found += _within(recipe.cluster, "", "cluster", common)
    found += _within(recipe.limits, "", "limits", common)
    for i, tracker in enumerate(recipe.trackers):
        found += _within(tracker, "tracker", f"trackers[{i}]", common)
    return [*found, *_within(recipe.evaluation, "", "evaluation", common)]


def _within(part: Any, section: str, path: str, known: Mapping[str, Any]) -> Iterator[Place]:
    """Give the places of all that `part` holds, and its own last. A verifier stands where the reward does."""
    from rewards.verified import Verified

    if isinstance(part, Verified):
        yield from _within(part.verifier, section, path, known)
        return
    if not inspect.isroutine(part):
        yield from _held(part, path, {**known, "parent": part})
    yield _place(part, section, path, known)


def _place(part: Any, section: str, path: str, known: Mapping[str, Any]) -> Place:
    return Place(part=part, section=section, context=CheckContext(path=path, **known))


def _held(part: Any, path: str, known: Mapping[str, Any]) -> Iterator[Place]:
    """Give the places of what the keys of `part` hold, in their order; rewards of a stage have theirs already."""
    from rlhf.training.stages.overrides import StageOverrides

    for name, key in keys_of(type(part)).items():
        if holds_objects(key.annotation) and not (name == "rewards" and isinstance(part, StageOverrides)):
            section = section_in(key.annotation) or ""
            for where, value in _objects(join(path, name), getattr(part, name)):
                yield from _within(value, section, where, known)


def _objects(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Give the places of the objects in a value; numbers, texts and null are none."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _objects(join(path, str(name)), inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _objects(f"{path}[{i}]", inner)
    elif value is not None and not isinstance(value, str | int | float):
        yield path, value
