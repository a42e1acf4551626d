"""Suite runner: task blocks, each stored before the next, so that evaluations can be resumed.

Of the block that is being played a journal keeps each attempt as it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.data import SamplingParams, ScoredGroup, Task
from rlhf.evaluation.answers import select_answers
from rlhf.evaluation.baselines import OracleEnvironment
from rlhf.evaluation.chance import RandomAgent
from rlhf.evaluation.folder import CANDIDATES
from rlhf.evaluation.journal import AttemptJournal, earlier_attempts
from rlhf.evaluation.store import TrajectoryWriter, list_steps, read_columns
from rlhf.rollout.contrib.strategies import Strategy
from rlhf.rollout.group_structure import Independent, replays
from rlhf.rollout.limits import Limits
from rlhf.rollout.runner import RolloutRunner
from rlhf.rollout.scoring import check_failures

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


class _Tally:
    """Failures and attempts of a part so far, in earlier calls too."""

    def __init__(self) -> None:
        self._before = (0, 0)
        self._failed: list[ScoredGroup] = []

    def add_stored(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count attempts of an earlier call."""
        self._count(sum(row["is_failure"] for row in rows), len(rows))

    def judge(self, groups: Sequence[ScoredGroup], limits: Limits) -> None:
        """Count attempts; raises TrainingError where too many of all have failed."""
        for g in (g for g in groups if g.failures):
            failures = tuple(replace(failure, trajectory=None) for failure in g.failures)
            self._failed.append(ScoredGroup(g.task_id, (), (), failures))
        self._count(0, sum(len(g.trajectories) for g in groups))
        check_failures(self._failed, limits, before=self._before)

    def _count(self, n_failed: int, n: int) -> None:
        self._before = self._before[0] + n_failed, self._before[1] + n


async def play_part(
    name: str,
    tasks: Sequence[Task],
    runner: RolloutRunner,
    folder: Path,
    *,
    attempts: int,
    sampling: SamplingParams,
    strategy: Strategy | None = None,
    on_block: Callable[[Played], None] = lambda played: None,
) -> None:
    """Attempt every task `attempts` times and write the attempts; what `folder` has is not played again.

    Seeds depend on the task, the attempt and the runner's seed, so blocks and interruptions change nothing. Of an
    evaluation that was given more attempts those that are there are scored with the new ones.

    Args:
        name: of the part.
        tasks: in order.
        runner: of the part's environment.
        folder: of the trajectories.
        attempts: at each task.
        sampling: how one generation is sampled.
        strategy: chooses each attempt among candidates, all of which are kept in a folder beside `folder`; without one
            there is nothing to choose from.
        on_block: told of each block that is there.

    Raises:
        TrainingError: more than `limits.max_error_fraction` of the attempts ended with infrastructure errors; the
            block is not written, so that a later call plays those that failed afresh.
    """
    writer, kept = TrajectoryWriter(folder), TrajectoryWriter(folder.with_name(CANDIDATES))
    there, candidates_there = (
        {s.step: s.path for s in list_steps(place) if (s.stage, s.phase) == (name, "eval")}
        for place in (folder, folder.with_name(CANDIDATES))
    )
    patient = replace(runner, limits=replace(runner.limits, max_error_fraction=1.0))
    answers, candidates = _Tally(), _Tally()  # a strategy with few candidates left is another strategy
    made, rollout = (attempts, Independent()) if strategy is None else (attempts * strategy.n, strategy.rollout)
    size = block_size(made, runner.limits)
    firsts = range(0, len(tasks), size)
    if isinstance(runner.agent, RandomAgent) and len(there) < len(firsts):
        await runner.agent.prepare(tasks, runner.limits)
    for number, first in enumerate(firsts):
        block = tasks[first : first + size]
        kept_at = folder / f"{name}-eval-{number:06d}.jsonl"
        if number in there:
            kept_at.unlink(missing_ok=True)  # a kill came between the block and this
            rows = list(read_columns(there[number], ["solved", "is_failure"]))
            solved = [row["solved"] for row in rows if not row["is_failure"]]
            answers.add_stored(rows)
            if number in candidates_there:
                candidates.add_stored(list(read_columns(candidates_there[number], ["is_failure"])))
        else:
            if isinstance(runner.environment, OracleEnvironment):
                runner.environment.prepare(block)
            earlier = earlier_attempts(folder.parent, {task.id for task in block}, chosen=strategy is not None)
            # Ids that name other messages in another process would be read in a branch off an attempt from there.
            whole = 0 if runner.renderer.has_lasting_ids or not replays(rollout) else made
            journal = AttemptJournal(kept_at, name, earlier, whole)
            how: Any = {"grouping": rollout, "sampling": sampling, "journal": journal}
            found = await patient.collect(block, group_size=made, step=STEP, **how)
            groups, spent = found.groups, None
            if strategy is not None:
                timeout_s = runner.limits.reward_timeout_s
                pairs = zip(block, found.groups, strict=True)
                answered = [await select_answers(strategy, t, g, attempts, timeout_s=timeout_s) for t, g in pairs]
                groups, spent = tuple(a.group for a in answered), [a.spent for a in answered]
            answers.judge(groups, runner.limits)
            if strategy is not None:
                candidates.judge(found.groups, runner.limits)
                kept.write_groups(name, number, "eval", found.groups)
            writer.write_groups(name, number, "eval", groups, spent=spent)
            kept_at.unlink(missing_ok=True)
            solved = [t.solved for group in groups for t in group.trajectories]
        on_block(Played(name, len(block), sum(solved), len(solved)))
