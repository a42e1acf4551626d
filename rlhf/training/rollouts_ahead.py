"""Rollouts that run while the policy is updated: what the learner has to do with the controller of groups.

The update runs in a thread, on the trainer's module, while the engine samples with a copy. What may begin, what a step
trains and when weights are delivered is decided by `rlhf.asynchrony.controller`: one in this process, whose groups are
played on the event loop, or one elsewhere with rollout workers, that the first of several learners alone speaks to.

Of several processes that play for themselves each has a controller, of its share of every step. They meet where a step
has all its groups, before a delivery, and at a snapshot. They wait in a thread, so that groups are played meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch

from environments.base import max_concurrent_episodes
from rlhf.asynchrony.controller import Controller, Job, figures
from rlhf.asynchrony.pipeline import Rules
from rlhf.asynchrony.remote import RemoteController
from rlhf.asynchrony.settings import Asynchrony
from rlhf.asynchrony.shares import merged
from rlhf.data import ScoredGroup, Task
from rlhf.given_parts import how_to_resume
from rlhf.inference.engine import RestartableEngine
from rlhf.inference.vllm.instance import NoInstanceError
from rlhf.mapped_gather import gather_mapped
from rlhf.processes import current
from rlhf.rollout.counted_engine import CountedEngine
from rlhf.rollout.limits import Limits
from rlhf.rollout.runner import RolloutBatch, RolloutRunner
from rlhf.rollout.scoring import check_failures
from rlhf.tasks.sampler import TaskSource
from rlhf.training.context import LiveStage, RunContext, is_due
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.shield import shielded
from rlhf.training.stages.policy_gradient import PolicyGradient

T = TypeVar("T")

#: A controller here, or in another process.
Controls = Controller | RemoteController
#: Seconds between two lines about what is waited for.
_NOTE_EVERY_S = 0.2
#: Seconds between two looks at whether a server has the weights.
_LOOK_S = 2.0
#: Share of the tokens by which trained groups may be shorter than finished ones before it is worth a word.
_TOLD_BIAS = 0.03


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
        self._first = 0  # step of the oldest group that is to begin
        self._thread = ThreadPoolExecutor(1, "update")
        self._working: asyncio.Future[Any] | None = None
        self._due: tuple[int, ...] = ()
        self._clock = _Clock()

    # --- checkpoints ---

    @property
    def is_incomplete(self) -> bool:  # type: ignore[override]
        """True if a step is trained here and not yet counted by the run, or the thread of the update is at work."""
        is_working = self._working is not None and not self._working.done()
        return is_working or (self._run is not None and self._n_trained != self._run.state.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshot, and the groups that are finished, of all processes, which call this together."""
        own = self.controller.snapshot() if self.controller else None
        parts = [part for part in current().gather(own, "groups that wait") if part is not None]
        groups = {ordinal: group for _, found in parts for ordinal, group in found.items()}
        packed = torch.frombuffer(bytearray(self._pack(groups)), dtype=torch.uint8)
        states = [state for state, _ in parts]
        return {"pipeline": merged(states, self._shares, self.stage.tasks_per_step), "groups": packed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with this process's share; what ran then begins again."""
        counts = state["pipeline"]["counts"]
        self._n_trained = counts["step"]
        self._first = min((*state["pipeline"]["running"], counts["n_begun"])) // self.stage.tasks_per_step
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
            TrainingError: more than `limits.max_error_fraction` of the attempts ended with infrastructure errors.
        """
        if self.controller is not None:
            if self._n_offered is None:
                await self.controller.open(run.policy.version)
            await self.controller.offer(self._new_tasks())
        with self._clock.trainer_waits():
            ask, who = None if self.controller is None else self.controller.due, f"step {step.number + 1} waits for"
            parts = await self._waited(run, ask, who, f"the rollouts of step {step.number + 1}")
        own, found = parts[current().rank if len(parts) > 1 else 0], [due.groups for due in parts if due is not None]
        self._due = own.ordinals if own is not None else ()
        groups = tuple(group for part in found for group in part)
        check_failures(groups, run.runner.limits)
        seconds = self._clock.since_last_batch()
        return RolloutBatch(groups, seconds, ahead_s=max(seconds - self._clock.trainer_s, 0.0))

    def _new_tasks(self) -> dict[int, list[Task]]:
        """The tasks of steps that may be played now and were not said yet, by the steps' numbers."""
        begin = self._first if self._n_offered is None else self._n_offered
        self._n_offered = min(self._n_trained + self.settings.steps_ahead + 1, self.stage.steps)
        n = self.stage.tasks_per_step
        return {k: self.source.draw(n, (k - self._n_learned) * n) for k in range(begin, self._n_offered)}

    async def _waited(
        self, run: RunContext, ask: Callable[[float], Awaitable[T | str]] | None, who: str, what: str
    ) -> list[T | None]:
        """Return what each process's controller answers in the end; `what` is it, for messages.

        Where servers were started again, and none has the weights any more, all processes deliver those once more.
        """
        while True:
            found, is_lost = (None, False) if ask is None else await self._said(run, ask, who)
            parts = await self._together(run, (found, is_lost), what)
            if not any(is_lost for _, is_lost in parts):
                return [found for found, _ in parts]
            run.progress.note("no server has the weights any more; they are delivered again")
            await run.publish(same_version=True)

    async def _said(
        self, run: RunContext, ask: Callable[[float], Awaitable[T | str]], who: str
    ) -> tuple[T | None, bool]:
        """Ask until there is an answer, and say meanwhile who is waited for; or that no server has the weights."""
        asked, looked_at = run.runner.engine, time.monotonic()
        engine = asked if self._player is None and isinstance(asked, RestartableEngine) else None
        while isinstance(found := await ask(_NOTE_EVERY_S), str):
            run.progress.note(f"{who} {found}")
            if engine is not None and time.monotonic() - looked_at > _LOOK_S:
                if await engine.needs_weights():
                    return None, True
                looked_at = time.monotonic()
        return found, False

    async def _together(self, run: RunContext, value: T, what: str) -> list[T]:
        """Return what every process gives, by rank; groups are played while this one waits for the others."""
        if current().n == 1:
            return [value]
        run.progress.note(f"{what} of the other processes are waited for")
        return await self.work(gather_mapped, value, what)

    async def work(self, function: Callable[..., T], *args: Any) -> T:
        """Return what `function` returns in the thread of the update; cancelled, wait until that has ended."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args))
        self._working = running
        return await shielded(running)

    async def publish(self, run: RunContext) -> None:
        """Note that the step is trained, and deliver it when the schedule says so."""
        self._n_trained += 1
        if self.controller is not None:
            await self.controller.train(self._due)
            _, is_lost = await self._said(run, self.controller.may_install, "the weights wait for")
            if is_lost:
                raise NoInstanceError(
                    "neither a server nor the trainer still has the weights of unfinished groups",
                    where=f"version {run.policy.version}",
                    hint=how_to_resume(run.folder),
                )
        await self._together(run, None, "the groups before a delivery")
        if self.controller is not None:
            await self.controller.hold()  # until what is due between two steps is done
        await run.publish()
        if self.controller is not None:
            await self.controller.install(run.policy.version)

    async def before_snapshot(self, run: RunContext, *, is_checkpoint: bool) -> None:
        """Wait for what runs, where an evaluation or a checkpoint that drains comes next."""
        evaluates = is_due(self.stage.evaluate_every, run.state.step, self.stage.steps)
        is_evaluation = evaluates and run.background_evaluation is None
        is_checkpoint = is_checkpoint or evaluates  # an evaluation in the background begins with one
        if is_evaluation or (is_checkpoint and self.settings.checkpoint == "drain"):
            who = "an evaluation waits for" if is_evaluation else "a checkpoint waits for"
            ask = None if self.controller is None else self.controller.is_drained
            await self._waited(run, ask, who, "the groups before a snapshot")

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """Log where everything is. The source has just taken in the step."""
        self._n_learned += 1
        own = await self.controller.counts() if self.controller is not None else None
        found = [part for part in await self._together(run, own, "the figures") if part is not None]
        lost = {name: why for part in found for name, why in part.lost.items()}
        step.cautions |= {f"lost {name}": f"{name} is lost, the others continue: {why}" for name, why in lost.items()}
        step.metrics |= figures(found, self.stage.tasks_per_step) | self._clock.figures()
        if self.settings.order == "first_finished":
            step.cautions |= length_caution(step.metrics["asynchrony/length_bias"], step.where)

    async def close(self) -> None:
        """End everything that runs."""
        if self.controller is not None:
            await self.controller.close()
        self._thread.shutdown()


class _Here:
    """The worker of this process, which asks the run's own engine."""

    name = "this process"
    run: RunContext

    def __init__(self, stage: PolicyGradient) -> None:
        self.stage = stage

    @property
    def places(self) -> int:
        """As many groups as there is room for their attempts."""
        return places_of(self.run.runner.environment, self.run.runner.limits, self.stage.group_size)

    async def play(self, job: Job, count: Callable[[int, int], None]) -> ScoredGroup:
        """Play one group, with the seeds that it has in a run without asynchrony."""
        runner = self.run.runner
        return await played(replace(runner, engine=CountedEngine(runner.engine, count)), self.stage, job)

    async def wait_ready(self) -> None:
        """It is never lost."""


def length_caution(bias: float, where: str) -> dict[str, str]:
    """Caution where groups that are trained are shorter than those that wait with them."""
    if bias > 1 - _TOLD_BIAS:
        return {}
    text = f"up to {where} a trained group has {1 - bias:.0%} fewer tokens than a finished one (asynchrony/length_bias)"
    return {"length_bias": f"caution: order: first_finished trains short attempts first: {text}"}


def places_of(environment: Any, limits: Limits, group_size: int, n_workers: int = 1) -> int:
    """Return how many groups there is room for in each of the processes that play."""
    room = max_concurrent_episodes(environment) or limits.max_concurrent
    return max(1, min(room, limits.max_concurrent) // group_size // n_workers)


async def played(runner: RolloutRunner, stage: PolicyGradient, job: Job) -> ScoredGroup:
    """Play one group."""
    own = replace(runner, on_progress=None)
    how: dict[str, Any] = {"grouping": stage.rollout, "earlier": [job.task.id] * job.n_before}
    sampling = own.limits.sampling(stage.temperature)
    found = own.groups([job.task], sampling, group_size=stage.group_size, step=job.number, **how)
    async with aclosing(found) as groups:
        [group] = [group async for group in groups]
    return group


class _Clock:
    """Seconds in which the trainer waited.

    Attributes:
        trainer_s: since the last call of `figures`.
    """

    def __init__(self) -> None:
        self._batch_at, self.trainer_s = time.perf_counter(), 0.0

    @contextmanager
    def trainer_waits(self) -> Iterator[None]:
        """Context in which the trainer waits for groups."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.trainer_s += time.perf_counter() - begin

    def since_last_batch(self) -> float:
        """Seconds since the last call."""
        before, self._batch_at = self._batch_at, time.perf_counter()
        return self._batch_at - before

    def figures(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        waited_s, self.trainer_s = self.trainer_s, 0.0
        return {"time/trainer_idle_s": waited_s}
