"""Calibrated trajectories: the policy's failed attempts, corrected from the first bad step on.

Source: STeCa, arXiv 2502.14276, which tells bad steps by rollouts and has the policy reflect on them in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from environments.base import Environment, StepResult
from rlhf.data import ScoredGroup, Task, Trajectory
from rlhf.rollout.env_session import EpisodeEnded
from rlhf.rollout.episode import executor_for
from rlhf.rollout.executors import Lane
from rlhf.rollout.limits import Limits
from rlhf.training.stages.demonstrations import Demonstration, plan_of, play_one


def first_bad_step(left: Sequence[int | None]) -> int | None:
    """Return the first step after which the way to the goal is no shorter than before it.

    Args:
        left: `[K + 1]`, actions that the oracle needs before the first step and after each; None where it knows no way.

    Returns:
        Its number from 0; None where no step is bad, or where there was no way to begin with. 5, 4, 4, 3 gives 1: the
        second step. 3, 2, None gives 1 too, and 3, 2, 1 gives None.
    """
    for k, (before, after) in enumerate(pairwise(left)):
        if before is None:
            return None
        if after is None or after >= before:
            return k
    return None


class _Own:
    """Deviations of a demonstration that are given actions, before the oracle's."""

    def __init__(self, actions: Sequence[str]) -> None:
        self.left = list(actions)

    def is_next(self, state: StepResult) -> bool:
        """True if a given action is left."""
        return bool(self.left)

    def action(self, state: StepResult) -> str:
        """The next given action; any that is possible where the oracle knows no way on."""
        return self.left.pop(0) if self.left else (state.admissible_actions or ("",))[0]


async def calibrated(
    environment: Environment,
    tasks: Mapping[str, Task],
    groups: Sequence[ScoredGroup],
    kept: Sequence[Trajectory],
    limits: Limits,
    *,
    max_per_task: int,
    needs: Collection[str] = (),
) -> list[Demonstration]:
    """Corrected unsolved attempts: own actions up to the first bad step, then the oracle's.

    Each is played in a fresh episode, so an environment has to be replayable. A correction is left out where it does
    not solve the task, where another one of the task begins with the same actions, and where a task has `max_per_task`
    attempts to imitate already.

    Args:
        environment: with a `plan`.
        tasks: by id.
        groups: of the attempts.
        kept: what is imitated already.
        limits: of episodes.
        max_per_task: of what is imitated, corrections and attempts together.
        needs: what the agent is shown beside actions; see `rlhf.training.stages.demonstrations.play`.
    """
    counts = Counter(t.task_id for t in kept)
    found: list[Demonstration] = []
    executor = executor_for(environment)
    try:
        for group in groups:
            seen: set[tuple[str, ...]] = set()
            for t in (t for t in group.trajectories if not t.solved):
                if counts[t.task_id] >= max_per_task:
                    break
                try:
                    made = await _corrected(environment, tasks[t.task_id], t, seen, limits, executor.open(), needs)
                except EpisodeEnded:  # the environment failed; other attempts are left
                    continue
                if made is not None and made.trajectory.solved:
                    counts[t.task_id] += 1
                    found.append(made)
    finally:
        await executor.close()
    return found


async def _corrected(
    environment: Environment,
    task: Task,
    attempt: Trajectory,
    seen: set[tuple[str, ...]],
    limits: Limits,
    lane: Lane,
    needs: Collection[str],
) -> Demonstration | None:
    """Correct one attempt; None if it needs no correction, or has one already. Raises EpisodeEnded."""
    done = [turn.action for turn in attempt.turns if turn.action.error is None]
    taken = [action.text for action in done if not action.parts]
    left: list[int | None] = []
    for k in range(len(taken) + 1):
        left.append(len(await plan_of(environment, task, taken[:k], limits, lane)) or None)
        if left[0] is None:
            return None
        if first_bad_step(left[-2:]) is not None:
            good = tuple(taken[: k - 1])
            if good in seen or len(taken) < len(done):
                return None
            seen.add(good)
            return await play_one(environment, task, _Own(good), limits, lane, needs)
    return None
