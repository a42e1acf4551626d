"""Rewards that are watched: how a recipe says so, and what it cannot mean by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError, nearest
from rlhf.recipe.builder import build
from rlhf.recipe.describe import given
from rlhf.recipe.loss_checks import policy_gradient_stages
from rlhf.recipe.values import join

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf.recipe.model import Recipe
    from rlhf.rollout.reward_watch import Watch


def watch_of(settings: dict[str, Any], path: str, base: Path) -> Watch | None:
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


def _watched(recipe: Recipe) -> Iterator[tuple[str, Watch]]:
    return ((name, weighted.watch) for name, weighted in recipe.rewards.items() if weighted.watch is not None)


def _check_trained(recipe: Recipe) -> None:
    for name, _ in _watched(recipe):
        if not any(weighted.weight for weighted in recipe.rewards.values()):
            raise RecipeError(
                "every reward is watched, and none is trained on",
                where=f"rewards.{name}.watch",
                got=", ".join(recipe.rewards),
                expected="at least one reward with a weight, to compare with",
                hint="remove watch from one of them",
            )


def _check_of(recipe: Recipe) -> None:
    for name, watch in _watched(recipe):
        if watch.of is None:
            continue
        counted = [other for other, weighted in recipe.trained_rewards.items() if weighted.weight > 0]
        if watch.of not in counted:
            is_there = watch.of in recipe.rewards
            raise RecipeError(
                "a watched reward is compared with one that is trained on" if is_there else "there is no such reward",
                where=f"rewards.{name}.watch.of",
                got=watch.of,
                expected=", ".join(counted) or "a reward with a weight above 0",
                hint=nearest(watch.of, counted) or "name one of these, or leave `of` out to compare with the score",
            )


def _check_held_out(recipe: Recipe) -> None:
    from rlhf.recipe.model import plain_rewards

    plain = plain_rewards(recipe.rewards)
    bare = {name: {k: v for k, v in p.items() if k not in ("watch", "weight")} for name, p in plain.items()}
    names = list(recipe.rewards)
    for name, _ in _watched(recipe):
        for other in names:
            is_trained = recipe.rewards[other].watch is None
            if (is_trained and _holds(bare[other], bare[name])) or (
                not is_trained and names.index(other) < names.index(name) and bare[other] == bare[name]
            ):
                raise RecipeError(
                    "this reward is not held out: it is trained on too" if is_trained else "this is watched already",
                    where=f"rewards.{name}",
                    got=f"the same as rewards.{other}" if bare[other] == bare[name] else f"a part of rewards.{other}",
                    expected="a reward that the policy never learns from" if is_trained else "another reward",
                    hint="watch a second, stricter verifier of the same thing" if is_trained else "remove one of them",
                )


def _holds(outer: Any, inner: Mapping[str, Any]) -> bool:
    """Whether the plain values of a reward are those of another, or hold them."""
    if outer == inner:
        return True
    values = outer.values() if isinstance(outer, Mapping) else outer if isinstance(outer, list) else ()
    return any(_holds(value, inner) for value in values)


def _check_watching(recipe: Recipe) -> None:
    longest = max((stage.steps for _, stage in policy_gradient_stages(recipe)), default=0)
    for name, watch in _watched(recipe):
        if not longest:
            raise RecipeError(
                "nothing is watched: rewards are compared in stages of policy gradients",
                where=f"rewards.{name}.watch",
                got=", ".join(stage_name(stage) for stage in recipe.stages),
                expected="a stage {kind: policy_gradient}",
                hint="remove the reward; `rlhf score RUN --reward TARGET` asks it afterwards",
            )
        if longest < watch.window != type(watch)().window:
            raise RecipeError(
                "nothing is watched: no stage is as long as the window",
                where=f"rewards.{name}.watch.window",
                got=str(watch.window),
                expected=f"at most {longest}, the steps of the longest stage",
                hint="lower the window, to 8 at the least, or train for more steps",
            )


def _caution_short(recipe: Recipe) -> Iterator[str]:
    longest = max((stage.steps for _, stage in policy_gradient_stages(recipe)), default=0)
    for name, watch in _watched(recipe):
        if longest < watch.window:
            yield f"rewards.{name}.watch.window is {watch.window} and no stage has as many steps: it cannot warn"


def stage_name(stage: Any) -> str:
    """The kind of a stage."""
    from rlhf.registry import kind_of

    return kind_of("stage", stage)


WATCH_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_short,)
WATCH_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_trained, _check_of, _check_held_out, _check_watching)
