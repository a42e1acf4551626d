"""Stages of a recipe, built from plain values, with their overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError
from rlhf.recipe.builder import build, build_environment, build_part, plain_part
from rlhf.recipe.describe import given
from rlhf.recipe.environment_properties import with_defaults
from rlhf.recipe.rewards import plain_rewards, rewards_of

if TYPE_CHECKING:
    from rlhf.rollout.limits import Limits


def stages_of(values: Any, base: Path, limits: Limits) -> tuple[Any, ...]:
    """Build stages from plain values; `limits` hold where those of a stage say nothing. Raises RecipeError."""
    if not isinstance(values, list) or not values:
        raise RecipeError(
            "a recipe needs stages",
            where="stages",
            got=given(values),
            expected="a list: - {kind: policy_gradient, steps: 100}",
            hint="`rlhf recipes --kinds` lists the kinds of stages",
        )
    return tuple(_stage(stage, f"stages[{i}]", base, limits) for i, stage in enumerate(values))


def _stage(values: Any, path: str, base: Path, limits: Limits) -> Any:
    if not isinstance(values, Mapping):
        return build_part("stage", values, path, base=base)
    own = {key: values[key] for key in ("environment", "limits") if values.get(key) is not None}
    plain = {key: value for key, value in values.items() if key not in own}
    defined: dict[str, Any] = {}
    if isinstance(named := plain.get("rewards"), Mapping):
        defined = {str(name): value for name, value in named.items() if isinstance(value, Mapping)}
        plain["rewards"] = {name: value for name, value in named.items() if str(name) not in defined}
    stage = build_part("stage", plain, path, base=base)
    made: dict[str, Any] = {}
    suggested = own.get("limits")
    if "environment" in own:
        made["environment"] = build_environment(own["environment"], f"{path}.environment", base=base)
        suggested = with_defaults("limits", made["environment"], own.get("limits", {}))
    if suggested or "limits" in own:
        made["limits"] = build(type(limits), suggested, f"{path}.limits", base=base, default=limits)
    if defined:
        made["rewards"] = {**plain["rewards"], **rewards_of(defined, base, f"{path}.rewards")}
    return replace(stage, **made) if made else stage


def plain_stage(stage: Any) -> dict[str, Any]:
    """Return the plain values that make an equal stage."""
    if not stage.own_rewards:
        return plain_part("stage", stage)
    weights = {"rewards": stage.weights | plain_rewards(stage.own_rewards)}
    return plain_part("stage", replace(stage, rewards=None)) | weights
