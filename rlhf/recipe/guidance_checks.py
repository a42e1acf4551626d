"""What guidance asks of the settings around it: votes, demonstrations beside attempts, and new references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError
from rlhf.recipe.loss_checks import policy_gradient_stages
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def _check_votes(recipe: Recipe) -> None:
    for name, weighted in recipe.rewards.items():
        for path, stage in policy_gradient_stages(recipe):
            if weighted.weight and hasattr(weighted.reward, "over_group") and stage.group_size < 2:
                raise RecipeError(
                    "this reward compares the attempts at a task, and there is one of each",
                    where=f"{path}.group_size",
                    got=str(stage.group_size),
                    expected=f"at least 2 for rewards.{name}, {kind_of('reward', weighted.reward)}",
                    hint="attempt each task several times: group_size: 8",
                )


def _check_references(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if stage.reference_reset is None:
            continue
        if not getattr(stage.loss, "needs_ref", False):
            raise RecipeError(
                "there is no reference to renew",
                where=f"{path}.reference_reset",
                got=f"loss {kind_of('loss', stage.loss)} without a KL term",
                expected="a loss that compares with a reference",
                hint="set loss.kl and loss.kl_coef, or remove reference_reset",
            )
        _check_patience(path, stage)


def _check_patience(path: str, stage: Any) -> None:
    patience, every = stage.reference_reset.patience, stage.evaluate_every
    n_evaluations = (stage.steps - 1) // every if every else 0  # none after the last step
    if patience is not None and n_evaluations <= patience:
        raise RecipeError(
            "the patience never ends: there are too few evaluations",
            where=f"{path}.reference_reset.patience",
            got=f"{patience}, with {n_evaluations} evaluations between {stage.steps} steps",
            expected="more evaluations than that, the first being the best so far",
            hint=f"set {path}.evaluate_every, a lower one, or a lower patience",
        )


def _check_shown(recipe: Recipe) -> None:
    from environments.base import can_demonstrate

    for path, stage in policy_gradient_stages(recipe):
        for key in ("expert", "imitate_failed"):
            if getattr(stage, key) is None:
                continue
            if not can_demonstrate(recipe.environment):
                raise RecipeError(
                    "this environment cannot demonstrate",
                    where=f"{path}.{key}",
                    got=kind_of("environment", recipe.environment),
                    expected="an environment with a method `plan(task, taken)`",
                    hint="remove the key, or write `plan`",
                )
            if not callable(getattr(recipe.agent, "write", None)):
                raise RecipeError(
                    "this agent cannot be shown demonstrations",
                    where=f"{path}.{key}",
                    got=f"{kind_of('agent', recipe.agent)}, which lacks write",
                    expected="a method `write(shown)` beside `act`",
                    hint="remove the key, or write it as agents.chat.ChatAgent does",
                )


def _check_experts(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if stage.expert is None:
            if kind_of("advantage", stage.advantage) == "guided" and stage.advantage.baseline == "own":
                raise RecipeError(
                    "this key has no effect",
                    where=f"{path}.advantage.baseline",
                    got="own",
                    expected="nothing, because the stage brings no demonstrations: every attempt is the policy's own",
                    hint="remove the key, or set expert: {per_group: 1}",
                )
            continue
        for got, hint in _cannot_join(recipe, stage):
            raise RecipeError(
                "demonstrations cannot join these groups",
                where=f"{path}.expert",
                got=got,
                expected="parts that tell demonstrations from attempts",
                hint=f"{hint}, or remove expert",
            )


def _cannot_join(recipe: Recipe, stage: Any) -> Iterator[tuple[str, str]]:
    """Say what is in the way of demonstrations, and what to do about it."""
    if not getattr(stage.loss, "takes_off_policy", False):
        loss = kind_of("loss", stage.loss)
        yield f"loss {loss} takes every token for the policy's own", "use loss: {kind: luffy}"
    if getattr(stage.sampler, "replays", False):
        sampler = kind_of("sampler", stage.sampler)
        yield f"sampler {sampler} begins tasks in the middle, demonstrations at their beginning", "use another sampler"
    if stage.critic is not None:
        yield "a critic would learn the value of what the policy does not do", "use advantage: {kind: guided}"
    for name, weighted in recipe.rewards.items():
        if hasattr(weighted.reward, "over_group"):
            why = f"rewards.{name} compares the attempts at a task, and a demonstration is none"
            yield why, "use a reward that judges each trajectory"


GUIDANCE_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_votes, _check_references, _check_shown, _check_experts)
