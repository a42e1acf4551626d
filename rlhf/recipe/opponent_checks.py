"""What games against older versions of the policy ask of the settings around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from agents.contrib.self_play import SelfPlay
from rewards.combinators.parts import with_parts
from rlhf.errors import RecipeError
from rlhf.recipe.declared import declared_by
from rlhf.recipe.loss_checks import policy_gradient_stages, shares_policy
from rlhf.recipe.trainer_checks import shards_parameters
from rlhf.registry import kind_of
from rlhf.rollout.group_structure import Independent

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def _opposed(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each stage with opponents."""
    return ((path, stage) for path, stage in policy_gradient_stages(recipe) if stage.opponents is not None)


def check_seated(recipe: Recipe) -> None:
    """Refuse to train against older versions where they have no seat, and to compare seats where there is one.

    An agent of kind `self_play` can be measured where the other seat is the environment's own: then this waits until
    somebody trains.
    """
    for path, _ in _opposed(recipe):
        environment: Any = getattr(recipe.environment, "environment", recipe.environment)  # in worker processes or not
        seats = declared_by(recipe.environment).seats
        if len(seats) < 2:
            hint = (
                "play both seats: environment.opponent=self"
                if hasattr(environment, "opponent")
                else ("use environment: {kind: textarena, game: TicTacToe-v0, opponent: self}")
            )
            agent = "" if isinstance(recipe.agent, SelfPlay) else " and agent={kind: self_play}"
            raise RecipeError(
                "there is no other seat for an older version",
                where=f"{path}.opponents",
                got=f"{kind_of('environment', recipe.environment)} with "
                + (f"the seat {seats[0]}" if seats else "no seats"),
                expected="an environment whose `properties` name two seats or more",
                hint=f"{hint}{agent}, or remove the key",
            )
    for path, stage in policy_gradient_stages(recipe):
        for where, estimator in with_parts(f"{path}.advantage", stage.advantage):
            if kind_of("advantage", estimator) == "seats" and len(declared_by(recipe.environment).seats) < 2:
                raise RecipeError(
                    "this estimator compares by seats, and the environment has one",
                    where=f"{where}.kind",
                    got="seats",
                    expected="an environment whose `properties` name two seats or more",
                    hint="use its inner estimator alone, or a game whose seats are played",
                )


def _check_seats(recipe: Recipe) -> None:
    if not isinstance(recipe.agent, SelfPlay):
        check_seated(recipe)


def _caution_seats(recipe: Recipe) -> Iterator[str]:
    if isinstance(recipe.agent, SelfPlay) and len(declared_by(recipe.environment).seats) < 2:
        for path, _ in _opposed(recipe):
            yield f"{path}.opponents has no seat in this environment: the recipe can be measured and not trained"


def _check_engine(recipe: Recipe) -> None:
    for path, _ in _opposed(recipe):
        if not shares_policy(recipe):
            apart = shards_parameters(recipe)
            raise RecipeError(
                "older versions play on the engine that shares the trainer's module",
                where=f"{path}.opponents",
                got="a stage with trainer.zero: 3" if apart else f"engine: {kind_of('engine', recipe.engine)}",
                expected="zero: 0, 1 or 2" if apart else "engine: {kind: transformers}",
                hint="lower trainer.zero, or remove the key" if apart else "change engine.kind, or remove the key",
            )


def _check_beside(recipe: Recipe) -> None:
    for path, stage in _opposed(recipe):
        if stage.critic is not None:
            raise RecipeError(
                "a critic learns from all generations, those of older versions among them",
                where=f"{path}.opponents",
                got=f"a critic of kind {kind_of('critic', stage.critic)} beside it",
                expected="critic: null",
                hint="use an estimator without a critic, such as advantage: {kind: seats}",
            )
        if not isinstance(stage.rollout, Independent):
            raise RecipeError(
                "attempts that leave from others would have the same opponent",
                where=f"{path}.opponents",
                got=f"rollout: {kind_of('rollout', stage.rollout)}",
                expected="rollout: {kind: independent}",
                hint="remove one of the two keys",
            )


def _check_ever(recipe: Recipe) -> None:
    for path, stage in _opposed(recipe):
        if stage.opponents.keep > 1 and stage.opponents.every >= stage.steps:
            raise RecipeError(
                "this key has no effect",
                where=f"{path}.opponents.every",
                got=f"{stage.opponents.every}, and the stage has {stage.steps} steps",
                expected=f"less than {stage.steps}: else the policy of the stage's begin is the only older version",
                hint="lower it, or write keep: 1 to play against the stage's begin alone",
            )


OPPONENT_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_seats, _check_engine, _check_beside, _check_ever)
OPPONENT_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_seats,)
