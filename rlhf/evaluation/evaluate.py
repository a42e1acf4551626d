"""Evaluation: a fixed set of tasks, an interval, and errors apart from failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem, unused
from rlhf.evaluation.statistics import success_estimate
from rlhf.rollout.runner import RolloutBatch, RolloutRunner
from rlhf.rollout.tasks import tasks_of
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluation:
    """Evaluation tasks and sampling."""

    split: str = "test"
    """Split of the final evaluation; never trained on."""
    n_tasks: Annotated[int, Field(ge=1)] = 200
    """Number of tasks, the first of the split. At 200 the 95% interval is at most ±7 points."""
    attempts: Annotated[int, Field(ge=1)] = 1
    """Attempts per task."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Sampling temperature; 0 is greedy."""
    before: bool = True
    """Evaluate before RL too: before the first stage that is not SFT."""
    validation_split: str = "dev"
    """Split of the evaluations during training, and of those by which `rlhf tune` selects."""
    validation_n_tasks: Annotated[int, Field(ge=1)] = 64
    """Number of tasks of the evaluations during training."""
    allow_overlap: bool = False
    """Allow overlap of test tasks with training tasks, or with those of `validation_split`; otherwise an error."""
    seed: int = 20_000
    """Seed of the evaluation, independent of the run's seed."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a number of tasks during training where `evaluate_every` is not set."""
        if not any(stage.evaluate_every for _, stage in context.recipe.learning):
            yield from unused(self, ("validation_n_tasks",), context.path, "no stage sets evaluate_every")


@plain_dataclass(frozen=True)
class EvaluationResult:
    """Success on a fixed set of tasks.

    Attributes:
        success: share of attempts solved, of those that say something about the policy.
        low, high: 95% interval of `success`, clustered by task when there are several attempts.
        n: attempts behind it.
        n_errors: attempts that ended with infrastructure errors; not in `n`.
    """

    success: float
    low: float
    high: float
    n: int
    n_errors: int
    return_mean: float
    n_turns_mean: float
    split: str
    collected: RolloutBatch

    @property
    def record(self) -> dict[str, Any]:
        """Plain values for files and the command line."""
        names = ("success", "low", "high", "n", "n_errors", "return_mean", "n_turns_mean", "split")
        return {name: getattr(self, name) for name in names}

    @property
    def versions(self) -> set[int]:
        """Versions of the policy that sampled; opponents' are not among them."""
        trajectories = (t for group in self.collected.groups for t in group.trajectories)
        generations = (g for t in trajectories for turn in t.own_turns for g in turn.generations)
        return {version for g in generations if not g.opponent for version in g.versions}

    @property
    def metrics(self) -> dict[str, float]:
        """Values under their metric names."""
        return {
            "eval/success": self.success,
            "eval/success_low": self.low,
            "eval/success_high": self.high,
            "eval/n_episodes": float(self.n),
            "eval/n_errors": float(self.n_errors),
            "eval/return_mean": self.return_mean,
            "eval/n_turns_mean": self.n_turns_mean,
            "time/eval_s": self.collected.seconds,
        }


async def evaluate(
    runner: RolloutRunner, settings: Evaluation, *, split: str | None = None, n_tasks: int | None = None
) -> EvaluationResult:
    """Attempt the first `n_tasks` tasks of `split` and count."""
    split = split or settings.split
    tasks = tasks_of(runner.environment, split, n_tasks or settings.n_tasks)
    sampling = runner.limits.sampling(settings.temperature)
    # Seed and step number keep the seeds of evaluations apart from those of training, and equal between evaluations.
    seeded = replace(runner, seed=settings.seed)
    collected = await seeded.collect(tasks, group_size=settings.attempts, sampling=sampling, step=-1)
    trajectories = [t for g in collected.groups for t in g.trajectories]
    n_errors = sum(len(g.failures) for g in collected.groups)
    found = success_estimate([t.solved for t in trajectories], [t.task_id for t in trajectories], n_errors=n_errors)
    values = collected.metrics()
    return EvaluationResult(
        success=found.value,
        low=found.low,
        high=found.high,
        n=found.n,
        n_errors=n_errors,
        return_mean=values.get("rollout/return_mean", 0.0),
        n_turns_mean=values.get("rollout/n_turns_mean", 0.0),
        split=split,
        collected=collected,
    )
