"""Checks of episodes that begin in the middle, and of those that branch: what a replay asks of the other parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError
from rlhf.recipe.declared import declared_by
from rlhf.recipe.loss_checks import policy_gradient_stages
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def refuse_replay(recipe: Recipe, path: str, section: str, part: Any) -> None:
    """Raise RecipeError where `part`, the `section` of `path`, replays what the environment may not repeat."""
    if getattr(part, "replays", False) and not declared_by(recipe.environment).replayable:
        raise RecipeError(
            "episodes would begin with a replay, which this environment does not promise to repeat",
            where=f"{path}.{section}.kind",
            got=f"{kind_of(section, part)} in {kind_of('environment', recipe.environment)}",
            expected="an environment whose `properties` say replayable=True",
            hint="declare it if it is so, `rlhf check environment` proves it; or remove the key",
        )


def refuse_group_size(path: str, rollout: Any, group_size: int) -> None:
    """Raise RecipeError where `rollout` cannot make groups of the size that `path` has."""
    try:
        rollout.n_from_start(group_size)
    except ValueError as error:
        raise RecipeError(
            "groups of this size cannot be made",
            where=f"{path}.group_size",
            got=str(group_size),
            expected=str(error),
            hint="group_size counts the attempts of all trees of a task",
        ) from error


def _check_replays(recipe: Recipe) -> None:
    for path, section, part in _that_may_replay(recipe):
        refuse_replay(recipe, path, section, part)


def _that_may_replay(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    """Path of the holder, section and part."""
    for path, stage in policy_gradient_stages(recipe):
        yield path, "sampler", stage.sampler
        yield path, "rollout", stage.rollout
    for i, stage in enumerate(recipe.stages):
        if (attempts := getattr(stage, "attempts", None)) is not None:
            yield f"stages[{i}].attempts", "rollout", attempts.rollout


def _check_given(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if getattr(stage.sampler, "replays", False) and not callable(getattr(recipe.agent, "write", None)):
            raise RecipeError(
                "this agent cannot show turns that it did not take",
                where=f"{path}.sampler.kind",
                got=f"{kind_of('sampler', stage.sampler)} with {kind_of('agent', recipe.agent)}, which lacks write",
                expected="a method `write(action)` that its messages use for turns without generations",
                hint="use sampler: {kind: shuffled}, or write it as agents.chat.ChatAgent does",
            )


def _check_oracle(recipe: Recipe) -> None:
    from environments.base import can_demonstrate
    from rlhf.tasks.sampler import DemonstratedSampler

    for path, stage in policy_gradient_stages(recipe):
        if isinstance(stage.sampler, DemonstratedSampler) and not can_demonstrate(recipe.environment):
            kind, environment = kind_of("sampler", stage.sampler), kind_of("environment", recipe.environment)
            raise RecipeError(
                "this environment cannot demonstrate",
                where=f"{path}.sampler.kind",
                got=f"{kind} with {environment}",
                expected="an environment with a method `plan(task, taken)`",
                hint="use sampler: {kind: exit}, which needs no demonstrations, or write `plan`",
            )


def _check_trees(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        refuse_group_size(path, stage.rollout, stage.group_size)


def _check_calibrated(recipe: Recipe) -> None:
    from environments.base import can_demonstrate

    for i, stage in enumerate(recipe.stages):
        attempts = getattr(stage, "attempts", None)
        if attempts is None or not attempts.calibrate:
            continue
        is_replayable = declared_by(recipe.environment).replayable
        if not (is_replayable and can_demonstrate(recipe.environment)):
            raise RecipeError(
                "attempts at these tasks cannot be corrected",
                where=f"stages[{i}].attempts.calibrate",
                got=f"{kind_of('environment', recipe.environment)}, "
                + ("without a method `plan`" if is_replayable else "which does not promise to repeat itself"),
                expected="a replayable environment with a method `plan(task, taken)`",
                hint="remove the key",
            )
        if not callable(getattr(recipe.agent, "write", None)):
            raise RecipeError(
                "this agent cannot be shown corrections",
                where=f"stages[{i}].attempts.calibrate",
                got=f"{kind_of('agent', recipe.agent)}, which lacks write",
                expected="a method `write` beside `act`, as agents.chat.ChatAgent has",
                hint="remove the key, or write the method",
            )


START_CHECKS: tuple[Callable[[Recipe], None], ...] = (
    _check_replays,
    _check_given,
    _check_oracle,
    _check_trees,
    _check_calibrated,
)
