"""Demonstrations added to groups, so that a group without success has a solved example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.base import GroupReward
from rlhf.checking import CheckContext, Problem
from rlhf.data import ScoredGroup, Trajectory
from rlhf.losses.policy_loss import LossNeeds
from rlhf.rollout.group_structure import replays
from rlhf.rollout.scoring import score_group
from rlhf.settings import STRICT
from rlhf.training.context import RunContext
from rlhf.training.contrib.task_demonstrations import DemonstrationCache
from rlhf.training.demonstration_requirements import unshowable
from rlhf.training.hooks.base import StageHook, Step


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GroupDemonstrations:
    """Add the oracle's demonstration to the policy's attempts at a task, scored as they are.

    The estimator sees them all (`guided` can leave demonstrations out of the mean), the loss is told which tokens are
    off-policy. What is said of the policy, from its success to the sampler's and the selection's figures, is of its own
    attempts alone. In the trajectory files a demonstration is an attempt with the number `group_size` or above, whose
    `policy_version` is −1. A task that the oracle does not solve has none.

    Source: LUFFY, arXiv 2504.14945, whose groups are of seven attempts and one demonstration.
    """

    per_group: Annotated[int, Field(ge=1)] = 1
    """Copies of the demonstration in its group; more than 1 weigh as many attempts."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse parts that cannot demonstrate, or cannot tell demonstrations from attempts."""
        yield from unshowable(context)
        for got, do in self._in_the_way(context):
            yield Problem(
                "demonstrations cannot join these groups",
                where=context.path,
                got=got,
                expected="parts that distinguish demonstrations from attempts",
                do=f"{do}, or remove group_demonstrations",
            )

    def _in_the_way(self, context: CheckContext) -> Iterator[tuple[str, str]]:
        """Say what is in the way of demonstrations, and what to do about it."""
        stage = context.stage
        if not LossNeeds(stage.loss).takes_off_policy:
            loss = context.kind_of("loss", stage.loss)
            yield f"loss {loss} treats every token as on-policy", "use loss: {kind: luffy}"
        if replays(stage.sampler):
            why = "begins tasks in the middle, demonstrations at their beginning"
            yield f"sampler {context.kind_of('sampler', stage.sampler)} {why}", "use another sampler"
        if stage.critic is not None:
            yield "a critic would learn the values of off-policy actions", "use advantage: {kind: guided}"
        for name, weighted in context.recipe.rewards.items():
            if isinstance(weighted.reward, GroupReward):
                why = f"rewards.{name} compares the attempts at a task, and a demonstration is none"
                yield why, "use a reward that judges each trajectory"


@plain_dataclass(frozen=True)
class DemonstrationHook(StageHook):
    """Adds demonstrations to the groups that a step trains on.

    Attributes:
        settings: the recipe keys.
        group_size: attempts of the policy at each task, from which on demonstrations are numbered.
        guide: plays them.
    """

    settings: GroupDemonstrations
    group_size: int
    guide: DemonstrationCache

    async def transform_groups(
        self, run: RunContext, step: Step, groups: Sequence[ScoredGroup]
    ) -> Sequence[ScoredGroup]:
        """Return the groups with demonstrations behind their attempts, numbered on from `group_size`.

        A demonstration that a reward fails to judge is a failure of the group like any other.
        """
        found = await self.guide.show([group.task_id for group in groups], run)
        joined = [await self._joined(run, g, found[g.task_id]) if g.task_id in found else g for g in groups]
        step.metrics |= expert_metrics(joined)
        return joined

    async def _joined(self, run: RunContext, group: ScoredGroup, shown: Trajectory) -> ScoredGroup:
        runner = run.runner
        attempts = [replace(shown, attempt=self.group_size + j) for j in range(self.settings.per_group)]
        task, timeout_s = self.guide.tasks[group.task_id], runner.limits.reward_timeout_s
        scored = await score_group(task, attempts, runner.rewards, timeout_s=timeout_s)
        return replace(
            group,
            trajectories=group.trajectories + scored.trajectories,
            scores=group.scores + scored.scores,
            failures=group.failures + scored.failures,
        )


def expert_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Metrics of demonstrations in groups: their count, groups without one, their mean return."""
    returns = [
        [score.total for t, score in zip(group.trajectories, group.scores, strict=True) if t.is_demonstration]
        for group in groups
    ]
    totals = [x for row in returns for x in row]
    return {
        "group_demonstrations/n_trajectories": float(len(totals)),
        "group_demonstrations/n_unguided_groups": float(sum(not row for row in returns)),
        "group_demonstrations/return_mean": sum(totals) / max(len(totals), 1),
    }
