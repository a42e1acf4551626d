"""Models that are held beside a policy to score and to judge, and copies of it that are judged by or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rlhf.commands.meta import Parameter, count, meta_model, parameters_of
from rlhf.errors import ModelError

if TYPE_CHECKING:
    from rlhf.recipe import Recipe
    from rlhf.trainers.policy import FromScratch, Pretrained


def beside(recipe: Recipe, stage: Any, parameters: Sequence[Parameter], size: int, *, attempts: bool) -> dict[str, int]:
    """Bytes of what scores and judges in this process, and of what is copied to be written, by name.

    `rewards`: a local model of a reward is held once, as long as there are attempts to score. `reward_copy`: one that
    is refreshed is copied, with gradients and two moments. `judges`: one that is renewed is a whole copy of the policy,
    and so is the next one while it is audited. `background`: what lies in the machine's memory while a checkpoint is
    written in the background, which is all that is trained with its moments, and what judges are trained in.

    Args:
        recipe: whose rewards are meant.
        stage: that is estimated.
        parameters: of the policy.
        size: bytes of one of its numbers.
        attempts: whether the stage makes attempts.
    """
    from rewards.asking import AsksModel
    from rewards.model_folder import ModelReward

    n, n_trained = count(parameters)
    of_trained = sum(p.n_bytes for p in parameters if p.is_trained)
    asked = list(_parts_of(recipe.rewards, (ModelReward, AsksModel))) if attempts else []
    sizes = {part.path: _bytes_of(part.path, recipe.policy, n * size) for part in asked if part.path is not None}
    refresh = getattr(stage, "reward_refresh", None)
    refreshed = [sizes[part.path] for part in asked if isinstance(part, ModelReward)] if refresh else []
    n_judges = 2 if getattr(stage, "judge_renewal", None) else 0
    # DeepSpeed keeps weights and moments of what is trained in float32 whatever the format of the weights.
    moments = 12 * n_trained if getattr(stage.trainer, "zero", None) is not None else 2 * of_trained
    written = of_trained + moments if getattr(stage, "checkpoint_in_background", False) else 0
    return {
        "rewards": sum(sizes.values()),
        "reward_copy": 4 * max(refreshed, default=0),
        "judges": n_judges * n * size,
        "background": n_judges * of_trained + written,
    }


def shapes_of(path: str, policy: FromScratch | Pretrained) -> list[Parameter] | None:
    """Shapes of a model of its own; None where its configuration is not to be had."""
    from rlhf.trainers.policy import Pretrained

    try:
        return parameters_of(meta_model(Pretrained(path=path, dtype=getattr(policy, "dtype", "float32")))[0])
    except ModelError:
        return None


def _bytes_of(path: str, policy: FromScratch | Pretrained, of_policy: int) -> int:
    """Bytes of another model's weights; where its configuration is not to be had, those of the policy."""
    shapes = shapes_of(path, policy)
    return of_policy if shapes is None else sum(p.n_bytes for p in shapes)


def _parts_of(value: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    """Every part of these kinds in `value`, however deep."""
    if isinstance(value, kinds):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    if is_dataclass(value):
        inner = [getattr(value, one.name) for one in fields(value)]
    for one in inner:
        yield from _parts_of(one, kinds)
