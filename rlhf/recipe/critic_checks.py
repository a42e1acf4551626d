"""What a critic asks of the settings around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import RecipeError
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def _check_warmup(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if stage.critic is not None and stage.critic.warmup_steps >= stage.steps:
            raise RecipeError(
                "the policy would never be updated",
                where=f"{path}.critic.warmup_steps",
                got=str(stage.critic.warmup_steps),
                expected=f"less than steps = {stage.steps}",
                hint="lower it, or raise steps",
            )


def _check_path(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if stage.critic is None or stage.critic.path is None:
            continue
        given = stage.critic.path
        folder = Path(given).expanduser()
        is_local = folder.exists() or given.startswith((".", "/", "~"))
        if is_local and not (folder / "config.json").is_file():
            raise RecipeError(
                "there is no model in this folder",
                where=f"{path}.critic.path",
                got=f"{given}, {'without config.json' if folder.is_dir() else 'no such folder'}",
                expected="a folder with config.json, tokenizer.json and *.safetensors, or a hub name",
                hint="remove the key: the critic then begins as a copy of the policy",
            )


CRITIC_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_warmup, _check_path)


def _caution_clip(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        critic = stage.critic
        if critic is None or stage.epochs * stage.minibatches > 1 or critic.trunk == "policy":
            continue
        if critic.clip is not None and critic.clip != type(critic)().clip:
            yield f"{path} makes one update per step, before which no value has moved: critic.clip has no effect"


CRITIC_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_clip,)
