"""Suite runner: task blocks, each stored before the next, so that evaluations can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf.data import SamplingParams, ScoredGroup, Task
from rlhf.evaluation.answers import answers_of
from rlhf.evaluation.baselines import OracleEnvironment
from rlhf.evaluation.chance import RandomAgent
from rlhf.evaluation.folder import CANDIDATES
from rlhf.evaluation.store import TrajectoryWriter, list_steps, read_columns
from rlhf.rollout.contrib.strategies import Strategy
from rlhf.rollout.group_structure import Independent
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
    """Attempt every task `attempts` times and write the attempts; blocks that `folder` has are not played again.

    Seeds depend on the task, the attempt and the runner's seed, so blocks and interruptions change nothing.

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
        TrainingError: more than `limits.max_error_fraction` of the attempts failed for no fault of the policy; the
            block is not written, so that a later call plays it afresh.
    """
    writer, kept = TrajectoryWriter(folder), TrajectoryWriter(folder.with_name(CANDIDATES))
    there, candidates = (
        {s.step: s.path for s in list_steps(place) if (s.stage, s.phase) == (name, "eval")}
        for place in (folder, folder.with_name(CANDIDATES))
    )
    patient = replace(runner, limits=replace(runner.limits, max_error_fraction=1.0))
    # Of the answers, and of the candidates for them: failures of earlier calls, attempts but for those that fail now,
    # and these.
    counts = [(0, 0), (0, 0)]
    failed: tuple[list[ScoredGroup], list[ScoredGroup]] = ([], [])
    made, rollout = (attempts, Independent()) if strategy is None else (attempts * strategy.n, strategy.rollout)
    size = block_size(made, runner.limits)
    firsts = range(0, len(tasks), size)
    if isinstance(runner.agent, RandomAgent) and len(there) < len(firsts):
        await runner.agent.prepare(tasks, runner.limits)
    for number, first in enumerate(firsts):
        block = tasks[first : first + size]
        if number in there:
            rows = list(read_columns(there[number], ["solved", "is_failure"]))
            solved = [row["solved"] for row in rows if not row["is_failure"]]
            made_of = list(read_columns(candidates[number], ["is_failure"])) if number in candidates else []
            for i, judged in enumerate((rows, made_of)):
                counts[i] = counts[i][0] + sum(row["is_failure"] for row in judged), counts[i][1] + len(judged)
        else:
            if isinstance(runner.environment, OracleEnvironment):
                runner.environment.prepare(block)
            found = await patient.collect(block, group_size=made, grouping=rollout, sampling=sampling, step=STEP)
            groups, spent = found.groups, None
            if strategy is not None:
                timeout_s = runner.limits.reward_timeout_s
                pairs = zip(block, found.groups, strict=True)
                answered = [await answers_of(strategy, t, g, attempts, timeout_s=timeout_s) for t, g in pairs]
                groups, spent = tuple(a.group for a in answered), [a.spent for a in answered]
            # A strategy with few candidates left is another strategy.
            for i, judged_now in enumerate((groups, found.groups) if strategy is not None else (groups,)):
                failed[i].extend(replace(g, trajectories=(), scores=()) for g in judged_now if g.failures)
                counts[i] = counts[i][0], counts[i][1] + sum(len(g.trajectories) for g in judged_now)
                check_failures(failed[i], runner.limits, before=counts[i])
            if strategy is not None:
                kept.write_groups(name, number, "eval", found.groups)
            writer.write_groups(name, number, "eval", groups, spent=spent)
            solved = [t.solved for group in groups for t in group.trajectories]
        on_block(Played(name, len(block), sum(solved), len(solved)))
