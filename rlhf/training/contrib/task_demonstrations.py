"""Demonstrations of single tasks, played lazily by the environment's oracle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlhf.data import Task, Trajectory
from rlhf.processes import current
from rlhf.training.context import RunContext
from rlhf.training.stages import demonstrations


@dataclass
class DemonstrationCache:
    """Cache of oracle demonstrations per task, played on demand and again after a resume: no checkpoint keeps it.

    Attributes:
        tasks: of the stage's split, by their ids.
        known: demonstrations that solve their task, with the tokens that the agent would have said; None where the
            oracle does not.
    """

    tasks: Mapping[str, Task]
    known: dict[str, Trajectory | None] = field(default_factory=dict)

    async def show(self, task_ids: Iterable[str], run: RunContext) -> dict[str, Trajectory]:
        """Demonstrations of these tasks by id, of those that the oracle solves."""
        ids = [i for i in dict.fromkeys(task_ids) if i in self.tasks]
        for task_id in ids:
            if task_id not in self.known:
                self.known[task_id] = await self._play(self.tasks[task_id], run)
        found = ((i, self.known[i]) for i in ids)
        return {i: demonstration for i, demonstration in found if demonstration is not None}

    async def _play(self, task: Task, run: RunContext) -> Trajectory | None:
        here = current()
        return here.from_main(await self._solve(task, run) if here.is_main else None, "a demonstration")

    async def _solve(self, task: Task, run: RunContext) -> Trajectory | None:
        runner = run.runner
        played = await demonstrations.play(
            runner.environment,
            [task],
            random_share=0.0,
            unsolved_share=0.0,
            # One task that cannot be played is a task without a demonstration, not the end of the run.
            limits=replace(runner.limits, max_error_fraction=1.0),
            seed=run.seed,
            needs=demonstrations.needs_of(runner.agent),
            say=lambda text: run.warn_once({"a demonstration failed": text}),
        )
        solved = [d for d in played if d.trajectory.solved and d.trajectory.turns]
        rendered = await demonstrations.render(solved, runner.agent, runner.renderer)
        return next(iter(fitting(run, rendered)), None)


def fitting(run: RunContext, played: Sequence[Trajectory]) -> list[Trajectory]:
    """Demonstrations that fit into the policy's context, with a caution where some do not."""
    longest = [max((g.length for g in t.generations), default=0) for t in played]
    kept = [t for t, n in zip(played, longest, strict=True) if n <= run.policy.max_context]
    if len(kept) < len(played):
        run.warn_once(
            {
                "long demonstrations": f"a demonstration of {max(longest):,} tokens is longer than policy.max_context, "
                f"{run.policy.max_context:,}: such ones are left out"
            }
        )
    return kept
