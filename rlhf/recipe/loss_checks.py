"""What a loss asks of the settings around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rlhf.catalog import CATALOG, kind_of
from rlhf.errors import RecipeError

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe

#: Keys of losses that say what happens where the ratio of new to old probability is not 1.
_RATIO_KEYS = (
    "clip_low", "clip_high", "dual_clip", "max_weight", "max_log_ratio", "drift_coef", "max_drift", "min_negative",
    "ratio",
)  # fmt: skip


def policy_gradient_stages(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Give YAML path and settings of each policy-gradient stage."""
    from rlhf.trainers.policy_gradient import PolicyGradient

    return ((f"stages[{i}]", s) for i, s in enumerate(recipe.stages) if isinstance(s, PolicyGradient))


def shares_policy(recipe: Recipe) -> bool:
    """Whether the engine will say so of itself (`RolloutEngine.shares_policy`); none is built yet."""
    return kind_of("engine", recipe.engine) == "transformers"


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


LOSS_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_shares_of_right_attempts,)


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


def _caution_ratio_of_one(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        bypassed = kind_of("correction", stage.correction) == "bypass" and not shares_policy(recipe)
        if stage.epochs * stage.minibatches > 1 or bypassed or kind_of("loss", stage.loss) not in CATALOG["loss"]:
            continue
        default = type(stage.loss)()
        names = [f.name for f in fields(stage.loss) if f.name in _RATIO_KEYS]
        changed = [name for name in names if getattr(stage.loss, name) != getattr(default, name)]
        if changed:
            keys = ", ".join(f"loss.{name}" for name in changed)
            yield f"{path} makes one update per step, in which every ratio is 1: {keys} has no effect"


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
    for path, stage in policy_gradient_stages(recipe):
        if kind_of("loss", stage.loss) == "min_entropy" and stage.filters.drop_zero_advantage:
            yield (
                f"{path}.loss looks at no advantage, and groups whose attempts all score the same are left out: set "
                "filters.drop_zero_advantage to false"
            )


def _caution_reference(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        if getattr(stage.loss, "needs_ref", False) and not stage.loss.kl_coef:
            yield f"{path}.loss.kl is measured only: kl_coef is 0, and the reference model costs a forward pass"


LOSS_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (
    _caution_stale,
    _caution_bypass,
    _caution_ratio_of_one,
    _caution_reduction,
    _caution_right_and_wrong,
    _caution_silent_groups,
    _caution_reference,
)
