"""Group rollouts: every task attempted `group_size` times, concurrently."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agents.base import Agent
from environments.base import Environment, max_concurrent_episodes
from rlhf.data import Outcome, SamplingParams, Task, Trajectory
from rlhf.inference.engine import RolloutEngine
from rlhf.inference.seeds import stable_seed
from rlhf.rollout.branching import Branch, split_generations
from rlhf.rollout.episode import executor_for, run_episode
from rlhf.rollout.group_structure import GroupStructure, Independent, branches_of, posed
from rlhf.rollout.limits import Limits
from rlhf.rollout.opponent_engine import OpponentSampler
from rlhf.rollout.policy_client import EpisodeMonitor
from rlhf.rollout.progress import Board, OnProgress, reporting
from rlhf.rollout.renderer import Renderer

#: Failures that a fresh try may mend. A timeout is not among them: it has used up its time already.
RETRYABLE = frozenset({Outcome.ENV_ERROR, Outcome.ENGINE_ERROR})

_runs = itertools.count()


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts at one task, when the last of them is over.

    Attributes:
        task: that was attempted.
        trajectories: in order.
        is_last: whether the attempts at all tasks are over.
    """

    task: Task
    trajectories: Sequence[Trajectory]
    is_last: bool


class Journal(Protocol):
    """Attempts that are over and were kept, so that rollouts that were interrupted go on with the others."""

    def held(self, task_id: str, attempt: int, branch: str = "") -> Trajectory | None:
        """Return the attempt of this number at a task; None where it has to be played.

        Args:
            task_id: the task.
            attempt: number of the attempt.
            branch: digest of the branch that it left from; empty where it began where the task does.
        """

    def keep(self, trajectory: Trajectory, branch: str = "") -> None:
        """Keep an attempt in which no part failed; `branch` as in `held`."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Attempt to make: task index, occurrence, attempt number, branch point."""

    index: int
    task: Task
    occurrence: int
    attempt: int
    branch: Branch | None = None

    @property
    def name(self) -> str:
        """For the reader; unique within the rollout."""
        again = f", occurrence {self.occurrence}" if self.occurrence else ""
        return f"{self.task.id}{again}, attempt {self.attempt}"


async def finished_groups(
    tasks: Sequence[Task],
    environment: Environment,
    agent: Agent,
    engine: RolloutEngine,
    renderer: Renderer,
    limits: Limits,
    sampling: SamplingParams,
    *,
    group_size: int,
    seed: int,
    step: int = 0,
    earlier: Sequence[str] = (),
    grouping: GroupStructure = Independent(),  # noqa: B008  it holds nothing
    opponents: OpponentSampler | None = None,
    journal: Journal | None = None,
    on_progress: OnProgress | None = None,
) -> AsyncGenerator[Attempts, None]:
    """Attempt each task `group_size` times, at most `limits.max_concurrent` at once, begun in the order of the tasks.

    Fewer run at once where the environment has not room for so many: none waits for room while its clock runs.

    An attempt in which the environment or the engine failed is made afresh up to `limits.max_retries` times, with the
    same seed, so that a passing failure changes nothing. What fails for good is returned like the rest: a trajectory
    whose outcome says so.

    Args:
        tasks: a task that occurs twice gets two groups, with different seeds.
        environment: shared by all attempts.
        agent: likewise.
        engine: likewise.
        renderer: likewise.
        limits: of episodes and of their number.
        sampling: temperature and the like.
        group_size: attempts per task.
        seed: with step, task and attempt it gives the seed of every generation.
        step: number of the optimiser step.
        earlier: ids of the tasks that this step has attempted already; one that comes again gets other seeds, the same
            as if all of them had been attempted at once.
        grouping: which of the attempts begin where the task does, and which leave from another attempt. A round of
            branches begins when the last of the round before is over.
        opponents: says who has seats of an attempt in the policy's place; None: nobody.
        journal: holds attempts that need not be played, and is given each that is over.
        on_progress: called some times a second, also while everything waits, and at the end.

    Yields:
        The attempts at each task, in the order of the tasks, each as soon as its last attempt and all tasks before it
        are over: `group_size` of them, or fewer where there was nothing to branch from. The others go on meanwhile.
    """
    board = Board(len(tasks) * group_size)
    rollout = _Rollout(environment, agent, engine, renderer, limits, sampling, seed, step, board, opponents, journal)
    jobs = _jobs(tasks, grouping, group_size, earlier)
    n_at_once = min(limits.max_concurrent, max_concurrent_episodes(environment) or limits.max_concurrent)
    ended = [asyncio.Event() for _ in tasks]
    groups: list[list[Trajectory]] = [[] for _ in tasks]

    async def play() -> None:
        try:
            async with reporting(board, on_progress):
                await rollout.play(jobs, groups, grouping, n_at_once, ended)
        finally:
            await rollout.executor.close()

    playing = asyncio.create_task(play(), name="rollouts")
    try:
        for task, event, group in zip(tasks, ended, groups, strict=True):
            await _either(event, playing)
            yield Attempts(task, group, all(other.is_set() for other in ended))
        await playing
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


async def run_groups(
    tasks: Sequence[Task],
    environment: Environment,
    agent: Agent,
    engine: RolloutEngine,
    renderer: Renderer,
    limits: Limits,
    sampling: SamplingParams,
    *,
    group_size: int,
    seed: int,
    **how: Any,
) -> list[list[Trajectory]]:
    """Return `[tasks][group_size]`, what `finished_groups` yields, when all attempts are over."""
    parts = (environment, agent, engine, renderer, limits, sampling)
    async with aclosing(finished_groups(tasks, *parts, group_size=group_size, seed=seed, **how)) as groups:
        return [list(attempts.trajectories) async for attempts in groups]


class _First(asyncio.Future[None]):
    """First result of some tasks; cancelling it cancels `playing` in the same moment."""

    def __init__(self, playing: asyncio.Task[None]) -> None:
        super().__init__()
        self._playing = playing

    def settle(self, task: asyncio.Task[Any]) -> None:
        """Be done, as `task` is."""
        if not self.done():
            self.set_result(None)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the rollouts with those who wait for them."""
        self._playing.cancel(msg)
        return super().cancel(msg)


async def _either(event: asyncio.Event, playing: asyncio.Task[None]) -> None:
    """Wait for `event`; raise what `playing` raises where that comes first."""
    first, waiting = _First(playing), asyncio.create_task(event.wait())
    for task in (waiting, playing):
        task.add_done_callback(first.settle)
    try:
        await first
    finally:
        waiting.cancel()
        playing.remove_done_callback(first.settle)
    if not event.is_set():
        await playing


class _Rollout:
    """Settings that all attempts have in common."""

    def __init__(
        self,
        environment: Environment,
        agent: Agent,
        engine: RolloutEngine,
        renderer: Renderer,
        limits: Limits,
        sampling: SamplingParams,
        seed: int,
        step: int,
        board: Board,
        opponents: OpponentSampler | None,
        journal: Journal | None,
    ) -> None:
        self._parts = (environment, agent, engine, renderer, limits, sampling)
        self._limits, self._seed, self._step = limits, seed, step
        self._number, self._opponents, self._journal = next(_runs), opponents, journal
        self.board, self.executor = board, executor_for(environment)

    async def attempt(self, job: _Job) -> Trajectory:
        """Make one attempt, or take the one that is held."""
        branch = job.branch.digest if job.branch and self._journal else ""
        held = self._journal.held(job.task.id, job.attempt, branch) if self._journal else None
        if held and job.branch:
            held = job.branch.rejoined(held)
        trajectory = held or await self._tried(job)
        self.board.n_done += 1
        self.board.n_solved += trajectory.solved
        self.board.n_failed += trajectory.outcome.is_infrastructure_error
        if self._journal and held is None and not trajectory.outcome.is_infrastructure_error:
            self._journal.keep(trajectory, branch)
        return trajectory

    async def _tried(self, job: _Job) -> Trajectory:
        """Make one attempt, afresh where that may help."""
        retry = 0
        trajectory = await self._once(job, retry)
        while trajectory.outcome in RETRYABLE and retry < self._limits.max_retries:
            retry += 1
            trajectory = await self._once(job, retry)
        return replace(trajectory, n_retries=retry)

    async def play(
        self,
        jobs: list[_Job],
        groups: list[list[Trajectory]],
        grouping: GroupStructure,
        n_at_once: int,
        ended: Sequence[asyncio.Event],
    ) -> None:
        """Play `jobs` and the rounds of branches into `groups`, reporting each group's end."""
        firsts = [job for job in jobs if job.attempt == 0]
        for number in range(1, 1 + grouping.n_rounds):
            await self._round(jobs, groups, n_at_once, [asyncio.Event() for _ in ended])
            jobs = [new for job in firsts for new in await self.branches(job, groups[job.index], grouping, number)]
        await self._round(jobs, groups, n_at_once, ended)

    async def _round(
        self, jobs: Sequence[_Job], groups: list[list[Trajectory]], n_at_once: int, ended: Sequence[asyncio.Event]
    ) -> None:
        left = Counter(job.index for job in jobs)
        made: list[dict[int, Trajectory]] = [{} for _ in groups]

        def end(index: int) -> None:
            groups[index] += [made[index][attempt] for attempt in sorted(made[index])]
            ended[index].set()

        async def work(job: _Job) -> None:
            made[job.index][job.attempt] = await self.attempt(job)
            left[job.index] -= 1
            if not left[job.index]:
                end(job.index)

        for index in range(len(groups)):
            if not left[index]:
                end(index)
        await _in_order(jobs, work, n_at_once)

    async def branches(self, job: _Job, group: list[Trajectory], grouping: GroupStructure, number: int) -> list[_Job]:
        """Jobs of a round of branches at the task of `job`, numbered after those of its group.

        Replies of the group within which one of them leaves are recorded in pieces from then on.
        """
        rng = random.Random(stable_seed(self._seed, self._step, job.task.id, job.occurrence, "branches", number))
        asked = await branches_of(grouping, job.task, group, rng, self._limits.reward_timeout_s)
        group[:], found = split_generations(group, asked)
        return [replace(job, attempt=attempt, branch=branch) for attempt, branch in enumerate(found, start=len(group))]

    async def _once(self, job: _Job, retry: int) -> Trajectory:
        watch = self.board.live[job.name] = EpisodeMonitor()
        seed = stable_seed(self._seed, self._step, job.task.id, job.occurrence)
        try:
            return await run_episode(
                job.task,
                *self._parts,
                attempt=job.attempt,
                branch=job.branch,
                seed=seed,
                session=f"{self._number}/{job.index}/{job.attempt}/{retry}",
                executor=self.executor,
                watch=watch,
                opponents=self._opponents(seed, job.attempt) if self._opponents else {},
            )
        finally:
            del self.board.live[job.name]


def _jobs(tasks: Sequence[Task], grouping: GroupStructure, group_size: int, earlier: Sequence[str]) -> list[_Job]:
    seen = Counter(earlier)
    jobs = []
    for index, task in enumerate(tasks):
        for attempt in range(grouping.n_from_start(group_size)):
            jobs.append(_Job(index, posed(grouping, task, attempt), seen[task.id], attempt))
        seen[task.id] += 1
    return jobs


async def _in_order(jobs: Sequence[_Job], work: Callable[[_Job], Awaitable[None]], max_concurrent: int) -> None:
    """Run all jobs, begun in order; an exception or cancellation cancels and awaits the others."""
    waiting = iter(jobs)

    async def runner() -> None:
        for job in waiting:
            await work(job)

    runners = [asyncio.create_task(runner()) for _ in range(min(max_concurrent, len(jobs)))]
    try:
        await asyncio.gather(*runners)
    finally:
        for task in runners:
            task.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
