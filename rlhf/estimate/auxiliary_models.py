"""Auxiliary models in memory beside the policy: reward models, judges, copies being written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlhf.errors import ModelError
from rlhf.estimate.meta import Dtype, Parameter, count, dtype_of, meta_model, parameters_of
from rlhf.training.policy.model import FromScratch, Pretrained
from rlhf.training.stages.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from rlhf.recipe import Recipe


def beside(
    recipe: Recipe, stage: Any, parameters: Sequence[Parameter], size: int, *, moments: int, attempts: bool
) -> dict[str, int]:
    """Bytes of auxiliary models and copies in this process, by name.

    `rewards`: a local model of a reward is held once, as long as there are attempts to score. `reward_copy`: one that
    is refreshed is copied, with gradients and two moments. `judges`: one that is renewed is a whole copy of the policy,
    and so is the next one while it is audited. `background`: what lies in the machine's memory while a checkpoint is
    written in the background, which is all that is trained with its moments, and what judges are trained in.

    Args:
        recipe: whose rewards are meant.
        stage: that is estimated.
        parameters: of the policy.
        size: bytes of one of its numbers.
        moments: bytes of what the trainer keeps in all of its processes beside what is trained and its gradients.
        attempts: whether the stage makes attempts.
    """
    from rewards.combinators.parts import with_parts
    from rewards.judges.asking import AsksModel
    from rewards.models.model_folder import ModelReward

    n, _ = count(parameters)
    of_trained = sum(p.n_bytes for p in parameters if p.is_trained)
    parts = with_parts("", {path: weighted.reward for path, weighted in recipe.all_rewards.items()})
    asked = [part for _, part in parts if isinstance(part, ModelReward | AsksModel)] if attempts else []
    paths = {part.path for part in asked if part.path is not None}
    sizes = {path: _bytes_of(path, recipe.policy, n * size) for path in sorted(paths)}
    own = stage if isinstance(stage, PolicyGradient) else PolicyGradient()
    refreshed = [sizes[part.path] for part in asked if isinstance(part, ModelReward)] if own.reward_refresh else []
    n_judges = 2 if own.judge_refresh else 0
    written = of_trained + moments if own.checkpoint_in_background else 0
    return {
        "rewards": sum(sizes.values()),
        "reward_copy": 4 * max(refreshed, default=0),
        "judges": n_judges * n * size,
        "background": n_judges * of_trained + written,
    }


def shapes_of(path: str, policy: FromScratch | Pretrained) -> list[Parameter] | None:
    """Shapes of a model of its own; None where its configuration is not to be had."""
    try:
        return _shapes(path, dtype_of(policy))
    except ModelError:
        return None


@lru_cache(maxsize=16)
def _shapes(path: str, dtype: Dtype) -> list[Parameter]:
    """Shapes of a model of its own. Raises ModelError, which is not kept."""
    return parameters_of(meta_model(Pretrained(path=path, dtype=dtype))[0])


def _bytes_of(path: str, policy: FromScratch | Pretrained, of_policy: int) -> int:
    """Bytes of another model's weights; where its configuration is not to be had, those of the policy."""
    shapes = shapes_of(path, policy)
    return of_policy if shapes is None else sum(p.n_bytes for p in shapes)
