"""Rollouts that run while the policy is updated: what the learner has to do with the controller of groups.

The update runs in a thread, on the trainer's module, while the engine samples with a copy. What may begin, what a step
trains and when weights are delivered is decided by `rlhf.asynchrony.controller`: one in this process, whose groups are
played on the event loop, or one elsewhere with rollout workers, that the first of several learners alone speaks to.

Of several processes that play for themselves each has a controller, of its share of every step. They meet where a step
has all its groups, before a delivery, and at a cut. They wait in a thread, so that groups are played meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch

from environments.base import most_at_once
from rlhf.asynchrony.controller import Controller, Job, figures
from rlhf.asynchrony.pipeline import Rules
from rlhf.asynchrony.remote import RemoteController
from rlhf.asynchrony.settings import Asynchrony
from rlhf.asynchrony.shares import merged
from rlhf.data import ScoredGroup, Task
from rlhf.processes import current
from rlhf.rollout.counted_engine import CountedEngine
from rlhf.rollout.limits import Limits
from rlhf.rollout.runner import RolloutBatch, RolloutRunner
from rlhf.rollout.scoring import check_failures
from rlhf.tasks.sampler import TaskSource
from rlhf.training.context import LiveStage, RunContext, is_due
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.stages.policy_gradient import PolicyGradient

T = TypeVar("T")

#: A controller here, or in another process.
Controls = Controller | RemoteController
#: Seconds between two lines about what is waited for.
_NOTE_EVERY_S = 0.2


@dataclass(frozen=True)
class Lookahead:
    """Dependencies of asynchronous rollouts.

    Attributes:
        settings: the recipe key.
        pack: makes bytes of groups by their ordinals, for a checkpoint.
        unpack: makes groups of these bytes.
        remote: makes the controller of a stage, by its index, that has rollout workers; None plays in this process.
    """

    settings: Asynchrony
    pack: Callable[[Mapping[int, ScoredGroup]], bytes]
    unpack: Callable[[bytes], dict[int, ScoredGroup]]
    remote: Callable[[Rules, int], Controls] | None = None


class RolloutsAhead(StageHook):
    """Has groups played ahead of the step that is trained.

    Args:
        lookahead: of the run.
        stage: whose groups these are.
        source: of its tasks.
        index: of the stage in the recipe.

    Attributes:
        controller: of this process's groups; None where another process speaks to the one that there is.
    """

    key: ClassVar[str] = "asynchrony"

    def __init__(self, lookahead: Lookahead, stage: PolicyGradient, source: TaskSource, index: int = 0) -> None:
        self.settings, self.stage, self.source = lookahead.settings, stage, source
        self._pack, self._unpack = lookahead.pack, lookahead.unpack
        here, n = current(), stage.tasks_per_step
        alone = [slice(0, n)]
        self._shares = alone if lookahead.remote else [replace(here, rank=rank).share(n) for rank in range(here.n)]
        self.controller: Controls | None = None
        self._player: _Here | None = None
        if lookahead.remote is None:
            share = self._shares[here.rank]
            self._player = _Here(stage)
            rules = self.settings.rules(share.stop - share.start, stage.steps)
            self.controller = Controller(rules, share, n, [self._player])
        elif here.is_main:
            self.controller = lookahead.remote(self.settings.rules(n, stage.steps), index)
        self._run: RunContext | None = None
        self._n_trained = self._n_learned = 0  # steps that are trained, and that the source of tasks has taken in
        self._n_offered: int | None = None
        self._thread = ThreadPoolExecutor(1, "update")
        self._due: tuple[int, ...] = ()
        self._clock = _Clock()

    # --- checkpoints ---

    @property
    def is_incomplete(self) -> bool:  # type: ignore[override]
        """True if a step is trained here and not yet counted by the run."""
        return self._run is not None and self._n_trained != self._run.state.step

    def state_dict(self) -> dict[str, Any]:
        """Return the cut, and the groups that are finished, of all processes, which call this together."""
        own = self.controller.cut() if self.controller else None
        parts = [part for part in current().gather(own, "groups that wait") if part is not None]
        groups = {ordinal: group for _, found in parts for ordinal, group in found.items()}
        packed = torch.frombuffer(bytearray(self._pack(groups)), dtype=torch.uint8)
        states = [state for state, _ in parts]
        return {"pipeline": merged(states, self._shares, self.stage.tasks_per_step), "groups": packed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with this process's share; what ran then begins again."""
        self._n_trained = state["pipeline"]["counts"]["step"]
        if self.controller is not None:
            groups = self._unpack(state["groups"].numpy().tobytes())
            self.controller.restore(state["pipeline"], groups, len(self._shares))

    def open(self, run: RunContext, parts: LiveStage) -> None:
        """Begin with the weights of the present step."""
        self._run, self._n_learned = run, self._n_trained
        if self._player is not None:
            self._player.run = run
        self._clock = _Clock()

    # --- what the loop calls ---

    async def collect(self, run: RunContext, step: Step) -> RolloutBatch:
        """Return the groups of a step as soon as they are finished.

        Raises:
            TrainingError: more than `limits.max_error_fraction` of the attempts failed for no fault of the policy.
        """
        own: Sequence[ScoredGroup] = ()
        if self.controller is not None:
            if self._n_offered is None:
                await self.controller.open(run.policy.version)
            await self.controller.offer(self._new_tasks())
        with self._clock.trainer_waits():
            if self.controller is not None:
                due = await self._said(run, self.controller.due, f"step {step.number + 1} waits for")
                self._due, own = due.ordinals, due.groups
            parts = await self._together(run, own, f"the rollouts of step {step.number + 1}")
        groups = tuple(group for found in parts for group in found)
        check_failures(groups, run.collector.limits)
        return RolloutBatch(groups, self._clock.since_last_batch())

    def _new_tasks(self) -> dict[int, list[Task]]:
        """The tasks of steps that may be played now and were not said yet, by the steps' numbers."""
        begin = self._n_offered
        if begin is None:  # where the first finished go first, some of earlier steps may be left
            behind = 0 if self.settings.order == "in_order" else self.settings.staleness
            begin = max(0, self._n_trained - behind)
        self._n_offered = min(self._n_trained + self.settings.steps_ahead + 1, self.stage.steps)
        n = self.stage.tasks_per_step
        return {k: self.source.draw(n, (k - self._n_learned) * n) for k in range(begin, self._n_offered)}

    async def _said(self, run: RunContext, ask: Callable[[float], Awaitable[T | str]], who: str) -> T:
        """Ask until there is an answer, and say meanwhile who is waited for."""
        while isinstance(found := await ask(_NOTE_EVERY_S), str):
            run.progress.note(f"{who} {found}")
        return found

    async def _together(self, run: RunContext, value: T, what: str) -> list[T]:
        """Return what every process gives, by rank; groups are played while this one waits for the others."""
        if current().n == 1:
            return [value]
        run.progress.note(f"{what} of the other processes are waited for")
        return await self.work(current().gather, value, what)

    async def work(self, function: Callable[..., T], *args: Any) -> T:
        """Return what `function` returns in the thread of the update; cancelled, wait until that has ended."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            with suppress(Exception):
                await asyncio.wait([running])
            raise

    async def publish(self, run: RunContext) -> None:
        """Note that the step is trained, and deliver it when the schedule says so."""
        self._n_trained += 1
        if self.controller is not None:
            await self.controller.train(self._due)
            await self._said(run, self.controller.may_install, "the weights wait for")
        await self._together(run, None, "the groups before a delivery")
        if self.controller is not None:
            await self.controller.hold()  # until what is due between two steps is done
        await run.publish()
        if self.controller is not None:
            await self.controller.install(run.policy.version)

    async def before_cut(self, run: RunContext, *, is_checkpoint: bool) -> None:
        """Wait for what runs, where an evaluation or a checkpoint that drains comes next."""
        is_evaluation = is_due(self.stage.evaluate_every, run.state.step, self.stage.steps)
        if is_evaluation or (is_checkpoint and self.settings.checkpoint == "drain"):
            if self.controller is not None:
                who = "an evaluation waits for" if is_evaluation else "a checkpoint waits for"
                await self._said(run, self.controller.is_quiet, who)
            await self._together(run, None, "the groups before a cut")

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """Log where everything is. The source has just taken in the step."""
        self._n_learned += 1
        own = await self.controller.counts() if self.controller is not None else None
        found = [part for part in await self._together(run, own, "the figures") if part is not None]
        step.metrics |= figures(found, self.stage.tasks_per_step) | self._clock.figures()

    async def close(self) -> None:
        """End everything that runs."""
        if self.controller is not None:
            await self.controller.close()
        self._thread.shutdown()


class _Here:
    """The player of this process, which asks the run's own engine."""

    name = "this process"
    run: RunContext

    def __init__(self, stage: PolicyGradient) -> None:
        self.stage = stage

    @property
    def places(self) -> int:
        """As many groups as there is room for their attempts."""
        return places_of(self.run.collector.environment, self.run.collector.limits, self.stage.group_size)

    async def play(self, job: Job, count: Callable[[int, int], None]) -> ScoredGroup:
        """Play one group, with the seeds that it has in a run without asynchrony."""
        return await played(self.run.collector, self.stage, job, count)

    async def come_back(self) -> None:
        """It is never lost."""


def places_of(environment: Any, limits: Limits, group_size: int, n_workers: int = 1) -> int:
    """Return how many groups there is room for in each of the processes that play."""
    room = most_at_once(environment) or limits.max_concurrent
    return max(1, min(room, limits.max_concurrent) // group_size // n_workers)


async def played(
    collector: RolloutRunner, stage: PolicyGradient, job: Job, count: Callable[[int, int], None]
) -> ScoredGroup:
    """Play one group; `count` hears (version, tokens) of everything sampled."""
    own = replace(collector, engine=CountedEngine(collector.engine, count), on_progress=None)
    how: dict[str, Any] = {"grouping": stage.rollout, "earlier": [task.id for task in job.tasks[: job.place]]}
    sampling = own.limits.sampling(stage.temperature)
    found = own.groups([job.tasks[job.place]], sampling, group_size=stage.group_size, step=job.number, **how)
    async with aclosing(found) as groups:
        [group] = [group async for group in groups]
    return group


class _Clock:
    """Seconds in which the trainer waited."""

    def __init__(self) -> None:
        self._batch_at, self._trainer_s = time.perf_counter(), 0.0

    @contextmanager
    def trainer_waits(self) -> Iterator[None]:
        """Inside, the trainer waits for groups."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._trainer_s += time.perf_counter() - begin

    def since_last_batch(self) -> float:
        """Seconds since the last call."""
        before, self._batch_at = self._batch_at, time.perf_counter()
        return self._batch_at - before

    def figures(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        waited_s, self._trainer_s = self._trainer_s, 0.0
        return {"time/trainer_idle_s": waited_s}
