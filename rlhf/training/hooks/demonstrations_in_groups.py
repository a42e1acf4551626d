"""Demonstrations among the attempts: a group that fails on its own still sees how the task is solved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.data import ScoredGroup, Trajectory
from rlhf.rollout.scoring import score_group
from rlhf.settings import STRICT
from rlhf.training.hooks.task_demonstrations import Guide

if TYPE_CHECKING:
    from rlhf.training.run import Run
    from rlhf.training.stage_state import StageComponents


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Expert:
    """Join the policy's attempts at a task with a demonstration by the environment's oracle, scored as they are.

    The estimator sees them all (`guided` can leave demonstrations out of the mean), the loss is told which tokens are
    off-policy. What is said of the policy, from its success to the sampler's and the selection's figures, is of its own
    attempts alone. In the trajectory files a demonstration is an attempt with the number `group_size` or above, whose
    `policy_version` is −1. A task that the oracle does not solve has none.

    Source: LUFFY, arXiv 2504.14945, whose groups are of seven attempts and one demonstration.
    """

    per_group: Annotated[int, Field(ge=1)] = 1
    """How many times the demonstration joins its group; beyond 1 it weighs as many attempts."""


async def with_experts(run: Run, parts: StageComponents, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Return the groups with demonstrations behind their attempts, numbered on from `group_size`.

    A demonstration that a reward fails to judge is a failure of the group like any other.
    """
    guide, stage = parts.guide, parts.stage
    if guide is None or stage.expert is None:
        return list(groups)
    found = await guide.show([group.task_id for group in groups], run)
    n, first = stage.expert.per_group, stage.group_size
    return [
        await _joined(run, guide, group, [replace(found[group.task_id], attempt=first + j) for j in range(n)])
        if group.task_id in found
        else group
        for group in groups
    ]


async def _joined(run: Run, guide: Guide, group: ScoredGroup, shown: Sequence[Trajectory]) -> ScoredGroup:
    collector = run.collector
    timeout_s = collector.limits.reward_timeout_s
    scored = await score_group(guide.tasks[group.task_id], shown, collector.rewards, timeout_s=timeout_s)
    names = ("trajectories", "scores", "failures")
    return replace(group, **{name: getattr(group, name) + getattr(scored, name) for name in names})


def expert_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Tell of the demonstrations in groups that they joined."""
    returns = [
        [score.total for t, score in zip(group.trajectories, group.scores, strict=True) if t.is_demonstration]
        for group in groups
    ]
    totals = [x for row in returns for x in row]
    return {
        "expert/n_trajectories": float(len(totals)),
        "expert/n_unguided_groups": float(sum(not row for row in returns)),
        "expert/return_mean": sum(totals) / max(len(totals), 1),
    }
