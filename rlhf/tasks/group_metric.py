"""Metric by which samplers and selections compare the attempts at a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf.checking import CheckContext, Problem, refusal
from rlhf.data import ScoredGroup
from rlhf.errors import RecipeError, nearest

#: Before the name of a reward.
REWARD = "reward/"


def measured(group: ScoredGroup, metric: str) -> list[float]:
    """Return `[G]`, a number for each attempt at a task.

    Args:
        group: attempts that failed are not in it.
        metric: `success`, 1 where the environment's criterion was met, else 0; `score`, the total with all penalties;
            or `reward/<name>`, the unweighted value of one reward.

    Raises:
        RecipeError: the recipe has no such reward, or `metric` is nothing of these.
    """
    if metric == "success":
        return [float(trajectory.solved) for trajectory in group.trajectories]
    if metric == "score":
        return [score.total for score in group.scores]
    if not group.scores:
        return []
    known = list(group.scores[0].parts)
    check_metric(metric, known, "metric")
    return [score.parts[metric.removeprefix(REWARD)].value for score in group.scores]


def check_metric(metric: str, rewards: Sequence[str], where: str) -> None:
    """Raise RecipeError unless `metric` can be measured where the rewards have these names."""
    names = ["success", "score", *(REWARD + name for name in rewards)]
    if metric not in names:
        raise RecipeError(
            "unknown metric",
            where=where,
            got=metric,
            expected=", ".join(names),
            hint=nearest(metric, names) or "use success",
        )


def unmeasurable(metric: str, context: CheckContext) -> Iterator[Problem]:
    """Yield a problem where the rewards of the recipe do not have what `metric` names."""
    yield from refusal(check_metric, metric, list(context.recipe.trained_rewards), context.at("metric"))


def incomparable(section: str, part: Any, context: CheckContext) -> Iterator[Problem]:
    """Yield problems of a sampler or selection whose `metric` compares attempts: no such reward, or groups of one."""
    yield from unmeasurable(part.metric, context)
    if context.stage.group_size < 2:
        yield Problem(
            f"this {section} compares the attempts within a group, and a group has one",
            where=f"{context.stage_path}.group_size",
            got=str(context.stage.group_size),
            expected=f"at least 2 for {context.kind_of(section, part)}",
            do="set group_size: 8",
        )
