"""What samplers, selections and replay ask of the settings around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlhf.errors import RecipeError
from rlhf.recipe.loss_checks import policy_gradient_stages
from rlhf.registry import kind_of
from rlhf.tasks.curriculum import Curriculum
from rlhf.tasks.dynamic import Dynamic
from rlhf.tasks.greso import GRESO
from rlhf.tasks.group_metric import check_metric
from rlhf.tasks.uncertain import Uncertain

if TYPE_CHECKING:
    from rlhf.recipe.model import Recipe

#: Rewards of the catalogue that only ever take away.
_PENALTIES = frozenset({"invalid_action", "turn_cost", "overlong", "budget", "repetition"})


def _check_metrics(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        for name in ("sampler", "selection"):
            part = getattr(stage, name)
            if isinstance(part, Curriculum | Dynamic | GRESO | Uncertain):
                check_metric(part.metric, list(recipe.trained_rewards), f"{path}.{name}.metric")


def _check_attempts(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        for name in ("sampler", "selection"):
            part = getattr(stage, name)
            if stage.group_size < 2 and isinstance(part, Dynamic | GRESO | Uncertain):
                raise RecipeError(
                    f"this {name} looks at how the attempts at a task differ, and there is one of each",
                    where=f"{path}.group_size",
                    got=str(stage.group_size),
                    expected=f"at least 2 for {kind_of(name, part)}",
                    hint="attempt each task several times: group_size: 8",
                )


def _check_replay(recipe: Recipe) -> None:
    for path, stage in policy_gradient_stages(recipe):
        if stage.replay is None:
            continue
        kind = kind_of("loss", stage.loss)
        if getattr(stage.loss, "needs_fresh_samples", False):
            raise RecipeError(
                "this loss has no ratio, so what is replayed would count as if the policy had just sampled it",
                where=f"{path}.replay",
                got=f"replay with {kind}",
                expected="a loss with a ratio of new to old probability",
                hint="set loss.max_weight" if hasattr(stage.loss, "max_weight") else "use loss: {kind: ppo_clip}",
            )
        if getattr(stage.loss, "needs_whole", None) == "group":
            raise RecipeError(
                "this loss compares the trajectories of a group, and what is replayed has lost its group",
                where=f"{path}.replay",
                got=f"replay with {kind}",
                expected="a loss of tokens or trajectories",
                hint="use loss: {kind: ppo_clip}",
            )
        if not stage.filters.drop_zero_advantage:
            raise RecipeError(
                "groups without an advantage stay in the step, so that replay would fill places that are taken",
                where=f"{path}.filters.drop_zero_advantage",
                got="false",
                expected="true with replay",
                hint="remove the key, or remove replay",
            )


SAMPLING_CHECKS: tuple[Callable[[Recipe], None], ...] = (_check_metrics, _check_attempts, _check_replay)


def _caution_penalties(recipe: Recipe) -> Iterator[str]:
    names = [n for n, w in recipe.rewards.items() if w.weight and kind_of("reward", w.reward) in _PENALTIES]
    for path, stage in policy_gradient_stages(recipe):
        if names and isinstance(stage.selection, Dynamic) and stage.selection.metric == "score":
            yield (
                f"{path}.selection keeps groups that differ in nothing but penalties ({', '.join(names)}): set metric "
                "to success, or to reward/NAME"
            )


def _caution_critic(recipe: Recipe) -> Iterator[str]:
    for path, stage in policy_gradient_stages(recipe):
        selection = stage.selection
        if getattr(stage, "critic", None) is not None and isinstance(selection, Uncertain) and selection.drop_equal:
            yield f"{path}.selection drops groups whose attempts are equal, in which a critic still finds an advantage"


SAMPLING_CAUTIONS: tuple[Callable[[Recipe], Iterator[str]], ...] = (_caution_penalties, _caution_critic)
