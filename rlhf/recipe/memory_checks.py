"""What rewards that remember ask of the recipe around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rewards.contrib.episodic_memory import remembering
from rlhf.errors import RecipeError, nearest
from rlhf.recipe.loss_checks import policy_gradient_stages

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe


def _check_memories(recipe: Recipe) -> None:
    plain = {name: weighted.reward for name, weighted in recipe.rewards.items()}
    for path, reward in remembering("rewards", plain):
        own = path.split(".")[1]
        others = [name for name in recipe.rewards if name != own]
        if reward.of is not None and reward.of not in others:
            raise RecipeError(
                "a memory is told by another reward what came out right"
                if reward.of == own
                else "there is no such reward",
                where=f"{path}.of",
                got=reward.of,
                expected=", ".join(others) or "another reward of the recipe",
                hint=nearest(reward.of, others) or "name one of these, or leave `of` out to ask the environment",
            )
        longest = max((stage.steps for _, stage in policy_gradient_stages(recipe)), default=0)
        if not longest:
            raise RecipeError(
                "nothing is remembered: only stages of policy gradients fill a memory",
                where=path,
                got=", ".join(type(stage).__name__ for stage in recipe.stages),
                expected="a stage {kind: policy_gradient}",
                hint="remove the reward",
            )
        if not reward.explore and longest <= reward.warmup_steps:
            raise RecipeError(
                "this reward never pays: it ends before it has warmed up, and exploring is worth nothing",
                where=f"{path}.warmup_steps",
                got=str(reward.warmup_steps),
                expected=f"less than the longest stage, which has {longest} steps",
                hint="lower warmup_steps, or give explore a weight",
            )


MEMORY_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_memories,)
