"""Playing a suite: blocks of tasks, each written before the next is begun, so that an evaluation can be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf.data import SamplingParams, ScoredGroup, Task
from rlhf.evaluation.store import TrajectoryWriter, list_steps, read_columns
from rlhf.rollout.collect import Collector
from rlhf.rollout.limits import Limits
from rlhf.rollout.score import check_failures

#: Step number that keeps the seeds of evaluations apart from those of training, and equal between evaluations.
STEP = -1
#: Blocks hold this many times the episodes alive at a time: at the end of each, some seats stay empty.
_WAVES = 4


@dataclass(frozen=True, slots=True)
class Played:
    """A block that is there.

    Attributes:
        part: of the suite.
        n_tasks: of the block.
        n_solved: attempts at them that were solved.
        n_counted: attempts that no part failed in.
    """

    part: str
    n_tasks: int
    n_solved: int
    n_counted: int


def block_size(attempts: int, limits: Limits) -> int:
    """Tasks of one block. It follows from the suite alone: an evaluation that goes on has the blocks it began with."""
    return max(1, _WAVES * limits.max_concurrent // attempts)


async def play_part(
    name: str,
    tasks: Sequence[Task],
    collector: Collector,
    folder: Path,
    *,
    attempts: int,
    sampling: SamplingParams,
    on_block: Callable[[Played], None] = lambda played: None,
) -> None:
    """Attempt every task `attempts` times and write the attempts; blocks that `folder` has are not played again.

    Seeds depend on the task, the attempt and the collector's seed, so blocks and interruptions change nothing.

    Args:
        name: of the part.
        tasks: in order.
        collector: of the part's environment.
        folder: of the trajectories.
        attempts: at each task.
        sampling: how one generation is sampled.
        on_block: told of each block that is there.

    Raises:
        TrainingError: more than `limits.max_error_fraction` of the attempts failed for no fault of the policy; the
            block is not written, so that a later call plays it afresh.
    """
    writer = TrajectoryWriter(folder)
    there = {s.step: s.path for s in list_steps(folder) if (s.stage, s.phase) == (name, "eval")}
    patient = replace(collector, limits=replace(collector.limits, max_error_fraction=1.0))
    played: list[ScoredGroup] = []
    size = block_size(attempts, collector.limits)
    for number, first in enumerate(range(0, len(tasks), size)):
        block = tasks[first : first + size]
        if number in there:
            solved = list(_stored(there[number]))
        else:
            found = await patient.collect(block, group_size=attempts, sampling=sampling, step=STEP)
            played += found.groups
            # Judged over what was played so far, not over each block by itself.
            check_failures(played, collector.limits)
            writer.write_groups(name, number, "eval", found.groups)
            solved = [t.solved for group in found.groups for t in group.trajectories]
        on_block(Played(name, len(block), sum(solved), len(solved)))


def _stored(path: Path) -> Iterator[bool]:
    """Whether each attempt of a block was solved, failures of parts left out."""
    return (row["solved"] for row in read_columns(path, ["solved", "is_failure"]) if not row["is_failure"])
