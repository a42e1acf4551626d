"""Rollout phase of a step: draw tasks, attempt and score them in rounds, select groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rlhf.data import Credit, ScoredGroup
from rlhf.errors import RlhfError, TrainingError, boundary
from rlhf.rollout.runner import RolloutBatch
from rlhf.tasks.selection import Selection
from rlhf.training.hooks.base import Step
from rlhf.training.run import Run
from rlhf.training.stage_components import StageComponents

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingGroups:
    """Groups that a step drew, and those it trains on.

    Attributes:
        collected: every group of every round, in the order their tasks were drawn in.
        selection: which of them are trained on.
        n_rounds: rounds drawn.
        guided: the groups that are trained on as hooks have changed them; None where none has.
    """

    collected: RolloutBatch
    selection: Selection
    n_rounds: int
    guided: Sequence[ScoredGroup] | None = None

    @property
    def groups(self) -> list[ScoredGroup]:
        """The groups that are trained on."""
        if self.guided is not None:
            return list(self.guided)
        return [self.collected.groups[i] for i in self.selection.kept]

    @property
    def recorded(self) -> list[ScoredGroup]:
        """Every group drawn, in order; those that are trained on as they are then."""
        of_kept = dict(zip(self.selection.kept, self.groups, strict=True))
        return [of_kept.get(i, group) for i, group in enumerate(self.collected.groups)]

    def weighted(self, credits: Sequence[Credit]) -> list[Credit]:
        """Return the credits of `groups` with their advantages multiplied by the factors of the selection."""
        if self.selection.factors is None:
            return list(credits)
        return [_scaled(c, factor) for c, factor in zip(credits, self.selection.factors, strict=True)]

    def align_to_all_groups(self, values: Sequence[T]) -> list[T | None]:
        """Return for every group drawn its value among `values`, which are those of `groups`, or None."""
        of_kept = dict(zip(self.selection.kept, values, strict=True))
        return [of_kept.get(i) for i in range(len(self.collected.groups))]

    def metrics(self, estimate: Callable[[Sequence[bool], Sequence[str]], Any]) -> dict[str, float]:
        """Means over trajectories, counts of drawn tasks, and the fates of groups.

        Args:
            estimate: interval of a share, of what was right and the tasks that these belong to.
        """
        n, n_kept = len(self.collected.groups), len(self.selection.kept)
        factors = (1.0,) * n_kept if self.selection.factors is None else self.selection.factors
        return (
            self.collected.metrics()
            | self.collected.success_interval(estimate)
            | {
                "sampling/n_rounds": float(self.n_rounds),
                "rollout/n_groups": float(n),
                "sampling/n_dropped_groups": float(n - n_kept),
                "sampling/advantage_scale_mean": sum(factors) / max(n_kept, 1),
            }
        )


async def sample_groups(run: Run, parts: StageComponents, step: Step) -> TrainingGroups:
    """Return the scored groups of a step.

    Raises:
        TrainingError: more attempts failed than `limits.max_error_fraction` allows, the selection gives up, too many
            steps before this one had nothing to train on, or a monitored reward says to stop.
    """
    stage = parts.stage
    for hook in parts.hooks:
        hook.before_step(run, step)
    await run.check_stop()
    sampling = run.runner.limits.sampling(stage.temperature)
    is_sampled = stage.offline_data is None or stage.offline_data.sample
    wanted = stage.tasks_per_step if is_sampled else 0
    collected, selection, n_rounds = RolloutBatch((), 0.0), Selection((), n_more=wanted), 0
    if parts.ahead is not None:
        collected = await parts.ahead.collect(run, step)
        selection, n_rounds = _selected(run, parts, collected, 1, step.number), 1
    async with parts.rollout(run) as opponents:
        while selection.n_more:
            collected = await run.runner.collect(
                parts.source.draw(selection.n_more, len(collected.groups)),
                group_size=stage.group_size,
                grouping=stage.rollout,
                sampling=sampling,
                step=step.number,
                earlier=collected,
                opponents=opponents,
            )
            n_rounds += 1
            selection = _selected(run, parts, collected, n_rounds, step.number)
            if selection.n_more:
                run.progress.note(f"{len(selection.kept)} of {stage.tasks_per_step} groups kept, drawing another round")
    run.caution(collected, step.where)
    gathered = TrainingGroups(collected, selection, n_rounds)
    for hook in parts.hooks:
        gathered = replace(gathered, guided=await hook.transform_groups(run, step, gathered.groups))
    return gathered


def _selected(run: Run, parts: StageComponents, collected: RolloutBatch, n_rounds: int, step: int) -> Selection:
    """Ask the selection; what it gives up on is recorded."""
    stage = parts.stage
    try:
        with boundary(TrainingError, where=f"the selection of {run.state.label}, step {step + 1}"):
            selection = stage.selection(collected.groups, stage.tasks_per_step, n_rounds)
            selection.check(len(collected.groups), type(stage.selection).__name__)
    except RlhfError:
        run.record(run.state.label, step + 1, "train", collected.groups, None)
        raise
    return selection


def _scaled(credit: Credit, factor: float) -> Credit:
    tokens = tuple(tuple(tuple(factor * x for x in row) for row in rows) for rows in credit.advantages_GNT)
    return replace(credit, advantages_GNT=tokens)
