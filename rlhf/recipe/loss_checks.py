"""What a loss asks of the settings around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf.catalog import CATALOG
from rlhf.errors import RecipeError
from rlhf.recipe.model_folders import refuse_no_model
from rlhf.recipe.trainer_checks import shards_parameters
from rlhf.registry import kind_of

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def policy_gradient_stages(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each policy-gradient stage."""
    from rlhf.training.stages.policy_gradient import PolicyGradient

    return ((f"stages[{i}]", s) for i, s in enumerate(recipe.stages) if isinstance(s, PolicyGradient))


def shares_policy(recipe: Recipe) -> bool:
    """Whether the engine will say so of itself (`RolloutEngine.shares_policy`); none is built yet."""
    return kind_of("engine", recipe.engine) == "transformers" and not shards_parameters(recipe)


def _check_shares_of_right_attempts(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        kind = kind_of("advantage", stage.advantage)
        centred = kind == "dr_grpo" or (kind == "grpo" and not stage.advantage.normalize_std)
        if kind_of("loss", stage.loss) == "nft" and kind in CATALOG["advantage"] and not centred:
            raise RecipeError(
                "this loss reads the share of right attempts off the advantages, and these do not tell it",
                where=f"{path}.advantage.kind",
                got=kind,
                expected="dr_grpo: score minus group mean",
                hint="use advantage: {kind: dr_grpo}",
            )


def _check_teachers(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if kind_of("loss", stage.loss) != "kdrl":
            continue
        hint = "a run keeps its policy in checkpoints/NAME/policy"
        refuse_no_model(stage.loss.teacher, f"{path}.loss.teacher", hint)
        if stage.loss.teach == "silent_groups" and stage.filters.drop_zero_advantage:
            raise RecipeError(
                "the teacher is for groups whose attempts all score the same, and those are left out",
                where=f"{path}.filters.drop_zero_advantage",
                got="true",
                expected="false with loss.teach: silent_groups",
                hint="set it to false, or use loss.teach: wrong",
            )


LOSS_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_shares_of_right_attempts, _check_teachers)


def _caution_stale(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        n_updates = stage.epochs * stage.minibatches
        if n_updates > 1 and getattr(stage.loss, "needs_fresh_samples", False):
            instead = "set loss.max_weight" if hasattr(stage.loss, "max_weight") else "set epochs and minibatches to 1"
            yield f"{path} makes {n_updates} updates per step and its loss is right for the first: {instead}"


def _caution_bypass(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        bypassed = kind_of("correction", stage.correction) == "bypass" and not shares_policy(recipe)
        if bypassed and getattr(stage.loss, "needs_fresh_samples", False):
            yield f"{path}.correction is bypass and its loss has no ratio: nothing corrects for the engine"


def _caution_reduction(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        meant = getattr(stage.loss, "reductions", ())
        if meant and stage.reduction.kind not in meant:
            kind = kind_of("loss", stage.loss)
            yield f"{path}.reduction is {stage.reduction.kind}, and {kind} is defined with {' or '.join(meant)}"


def _caution_right_and_wrong(recipe: Recipe) -> Iterator[str]:
    weights = [weighted.weight for weighted in recipe.rewards.values() if weighted.weight]
    for path, stage in policy_gradient_stages(recipe):
        if kind_of("loss", stage.loss) == "nft" and weights != [1]:
            yield f"{path}.loss takes every score for 0 or 1, and the recipe adds up rewards of weights {weights}"


def _caution_silent_groups(recipe: Recipe) -> Iterator[str]:
    why = {
        "min_entropy": "looks at no advantage",
        "kdrl": "teaches attempts of any group",
        "shiq": "keeps what scores as expected where it is",
    }
    for path, stage in policy_gradient_stages(recipe):
        kind = kind_of("loss", stage.loss)
        if kind in why and stage.filters.drop_zero_advantage:
            yield (
                f"{path}.loss {why[kind]}, and groups whose attempts all score the same are left out: set "
                "filters.drop_zero_advantage to false"
            )


#: Losses that take advantages for scores less a baseline, in units of reward; and the estimators that give these.
_IN_UNITS_OF_REWARD = ("shiq", "rover", "rebel")
_UNSCALED = ("dr_grpo", "rloo", "loop")


def _caution_units(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        loss, kind = kind_of("loss", stage.loss), kind_of("advantage", stage.advantage)
        unscaled = kind in _UNSCALED or (kind == "grpo" and not stage.advantage.normalize_std)
        if loss in _IN_UNITS_OF_REWARD and kind in CATALOG["advantage"] and not unscaled:
            yield f"{path}.loss takes advantages for scores less a baseline, {kind} gives others: use dr_grpo"


def _caution_reference(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        if getattr(stage.loss, "kl", None) is not None and not stage.loss.kl_coef:
            yield f"{path}.loss.kl is measured only: kl_coef is 0, and the reference model costs a forward pass"


LOSS_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    _caution_stale,
    _caution_bypass,
    _caution_reduction,
    _caution_right_and_wrong,
    _caution_silent_groups,
    _caution_units,
    _caution_reference,
)
