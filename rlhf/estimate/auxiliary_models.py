"""Auxiliary models in memory beside the policy: reward models, judges, copies being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlhf.errors import ModelError
from rlhf.estimate.meta import Dtype, Parameter, config_of, dtype_of, parameters_of, shaped
from rlhf.estimate.trainer_memory import alone
from rlhf.training.policy.model import FromScratch, Pretrained
from rlhf.training.stages.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from rlhf.recipe import Recipe


def beside(
    recipe: Recipe, stage: Any, parameters: Sequence[Parameter], size: int, *, moments: int, attempts: bool
) -> dict[str, int]:
    """Bytes of auxiliary models and copies in this process, by name.

    `rewards`: a local model of a reward is held once, as long as there are attempts to score. `reward_copy`: one that
    is refreshed is copied, with gradients, two moments and weights in float32. `judges`: one that is renewed is a whole
    copy of the policy, and so is the next one while it is audited. `background`: what lies in the machine's memory
    while a checkpoint is written in the background, which is all that is trained with its moments, and what judges are
    trained in.

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

    of_policy = [replace(p, size=size) for p in parameters]
    of_trained = _bytes_of([p for p in parameters if p.is_trained])
    parts = with_parts("", {path: weighted.reward for path, weighted in recipe.all_rewards.items()})
    asked = [part for _, part in parts if isinstance(part, ModelReward | AsksModel)] if attempts else []
    paths = {part.path for part in asked if part.path is not None}
    models = {path: shapes_of(path, recipe.policy, as_saved=True) or of_policy for path in sorted(paths)}
    own = stage if isinstance(stage, PolicyGradient) else PolicyGradient()
    refreshed = [_trained(models[p.path]) for p in asked if isinstance(p, ModelReward)] if own.reward_refresh else []
    n_judges = 2 if own.judge_refresh else 0
    written = of_trained + moments if own.checkpoint_in_background else 0
    return {
        "rewards": sum(map(_bytes_of, models.values())),
        "reward_copy": max(refreshed, default=0),
        "judges": n_judges * _bytes_of(of_policy),
        "background": n_judges * of_trained + written,
    }


def shapes_of(path: str, policy: FromScratch | Pretrained, *, as_saved: bool = False) -> list[Parameter] | None:
    """Shapes of a model of its own; None if its configuration is unavailable.

    Args:
        path: folder or name on a hub.
        policy: whose number format it is loaded in.
        as_saved: it is loaded in the format that its own configuration names, if any.
    """
    try:
        return _shapes(path, dtype_of(policy), as_saved)
    except ModelError:
        return None


@lru_cache(maxsize=16)
def _shapes(path: str, dtype: Dtype, as_saved: bool) -> list[Parameter]:
    """Shapes of a model of its own. Raises ModelError, which is not kept."""
    config = config_of(Pretrained(path=path))
    own = str(config.dtype).removeprefix("torch.") if as_saved and config.dtype is not None else dtype
    return parameters_of(shaped(config, own, None))


def _bytes_of(parameters: Sequence[Parameter]) -> int:
    return sum(p.n_bytes for p in parameters)


def _trained(parameters: Sequence[Parameter]) -> int:
    """Bytes of a model all of which is trained."""
    kept = alone([replace(p, is_trained=True) for p in parameters])
    return sum(n for name, n in kept.items() if name != "update")
