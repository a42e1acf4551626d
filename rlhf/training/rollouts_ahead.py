"""Rollouts that run while the policy is updated, in this process: the shell around `rlhf.asynchrony.pipeline`.

Groups are played on the event loop, each on its own; the update runs in a thread beside it, on the trainer's module,
while the engine samples with a copy. What may begin, what a step trains and when weights are delivered is decided by
the pipeline; here are tasks of asyncio, seconds, and the groups themselves.

Of several processes each has a pipeline of its own, of its share of every step, and they meet where a step has all its
groups, before a delivery, and at a cut. They are waited for in a thread, so that groups are played meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch

from environments.base import most_at_once
from rlhf.asynchrony.pipeline import Ledger, Pipeline
from rlhf.asynchrony.settings import Asynchrony
from rlhf.asynchrony.shares import merged, ordinal_of, share_of
from rlhf.data import ScoredGroup, Task
from rlhf.errors import DeliveryError
from rlhf.processes import current
from rlhf.rollout.counted_engine import CountedEngine, tokens_by_version
from rlhf.rollout.runner import RolloutBatch
from rlhf.rollout.scoring import check_failures
from rlhf.tasks.sampler import TaskSource
from rlhf.training.context import LiveStage, RunContext, is_due
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.stages.policy_gradient import PolicyGradient

T = TypeVar("T")

#: Name of the engine among the servers of the pipeline: it delivers to its own replicas, and answers when all have it.
_ENGINE = "engine"
#: Seconds between two lines about what is waited for.
_NOTE_EVERY_S = 0.2


@dataclass(frozen=True)
class Lookahead:
    """Dependencies of asynchronous rollouts.

    Attributes:
        settings: the recipe key.
        pack: makes bytes of groups by their ordinals, for a checkpoint.
        unpack: makes groups of these bytes.
    """

    settings: Asynchrony
    pack: Callable[[Mapping[int, ScoredGroup]], bytes]
    unpack: Callable[[bytes], dict[int, ScoredGroup]]


class RolloutsAhead(StageHook):
    """Plays groups ahead of the step that is trained.

    Args:
        lookahead: of the run.
        stage: whose groups these are.
        source: of its tasks.

    Attributes:
        share: of the groups of a step, which this process plays.
        pipeline: decides about these.
        groups: that are finished, by their ordinals.
    """

    key: ClassVar[str] = "asynchrony"

    def __init__(self, lookahead: Lookahead, stage: PolicyGradient, source: TaskSource) -> None:
        self.settings, self.stage, self.source = lookahead.settings, stage, source
        self.share = current().share(stage.tasks_per_step)
        self.pipeline = Pipeline(self.settings.rules(self.share.stop - self.share.start, stage.steps))
        self.groups: dict[int, ScoredGroup] = {}
        self._pack, self._unpack = lookahead.pack, lookahead.unpack
        self._run: RunContext | None = None
        self._base = 0  # what the engine calls version 0 of the stage
        self._tasks: dict[int, list[Task]] = {}
        self._playing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failed: BaseException | None = None
        self._thread = ThreadPoolExecutor(1, "update")
        self._due: tuple[int, ...] = ()
        self._ages: Mapping[int, int] = {}
        self._clock = _Clock()
        self._n_learned = 0  # steps that the source of tasks has taken in

    # --- checkpoints ---

    @property
    def is_incomplete(self) -> bool:  # type: ignore[override]
        """Whether a step is trained here and not yet counted by the run."""
        return self._run is not None and self.pipeline.step != self._run.state.step

    def state_dict(self) -> dict[str, Any]:
        """Return the cut, and the groups that are finished, of all processes, which call this together."""
        here, n = current(), self.stage.tasks_per_step
        own = (self.pipeline.state(), {ordinal_of(o, self.share, n): group for o, group in self.groups.items()})
        parts = here.gather(own, "groups that wait")
        shares = [replace(here, rank=rank).share(n) for rank in range(here.n)]
        groups = {ordinal: group for _, found in parts for ordinal, group in found.items()}
        packed = torch.frombuffer(bytearray(self._pack(groups)), dtype=torch.uint8)
        return {"pipeline": merged([state for state, _ in parts], shares, n), "groups": packed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there with this process's share; what ran then begins again."""
        n = self.stage.tasks_per_step
        cut = share_of(state["pipeline"], self.share, n, current().n)
        self.pipeline = Pipeline.restored(self.pipeline.rules, cut)
        groups = self._unpack(state["groups"].numpy().tobytes())
        self.groups = {ordinal: groups[ordinal_of(ordinal, self.share, n)] for ordinal in self.pipeline.store}

    def open(self, run: RunContext, parts: LiveStage) -> None:
        """Begin with the weights of the present step."""
        self._run = run
        self._base, self._n_learned = run.policy.version - self.pipeline.step, self.pipeline.step
        self.pipeline.join(_ENGINE, self.pipeline.step)
        self.pipeline.is_held = True
        self._clock = _Clock()

    # --- groups ---

    def _begin_all(self, run: RunContext) -> None:
        """Begin groups while there is room for their attempts."""
        room = most_at_once(run.collector.environment) or run.collector.limits.max_concurrent
        places = max(1, min(room, run.collector.limits.max_concurrent) // self.stage.group_size)
        while len(self._playing) < places and (ordinal := self.pipeline.begin()) is not None:
            task = asyncio.create_task(self._play(run, ordinal), name=f"group {ordinal}")
            self._playing.add(task)
            task.add_done_callback(self._ended)
        self._clock.is_playing(bool(self._playing))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._playing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = self._failed or error
        elif not task.cancelled() and self._run is not None and self._failed is None:
            self._begin_all(self._run)
        self._clock.is_playing(bool(self._playing))
        self._changed.set()

    async def _play(self, run: RunContext, ordinal: int) -> None:
        """Play one group, with the seeds that it has in a run without asynchrony."""
        number, place = divmod(ordinal_of(ordinal, self.share, self.stage.tasks_per_step), self.stage.tasks_per_step)
        tasks = self._tasks_of(number)

        def count(version: int, n_tokens: int) -> None:
            try:
                self.pipeline.sampled(ordinal, version - self._base, n_tokens)
            except DeliveryError as error:  # no failure of the attempt: every other group would meet it too
                self._failed = error
                raise

        own = replace(run.collector, engine=CountedEngine(run.collector.engine, count), on_progress=None)
        sampling = own.limits.sampling(self.stage.temperature)
        how: dict[str, Any] = {"grouping": self.stage.rollout, "earlier": [task.id for task in tasks[:place]]}
        played = own.groups([tasks[place]], sampling, group_size=self.stage.group_size, step=number, **how)
        async with aclosing(played) as found:
            [group] = [group async for group in found]
        self.groups[ordinal] = group
        kept = {version - self._base: n for version, n in tokens_by_version(group).items()}
        self.pipeline.finish(ordinal, kept)

    def _tasks_of(self, number: int) -> list[Task]:
        """The tasks of a step, counted from 0."""
        if number not in self._tasks:
            n = self.stage.tasks_per_step
            self._tasks[number] = self.source.draw(n, (number - self._n_learned) * n)
        return self._tasks[number]

    # --- what the loop calls ---

    async def collect(self, run: RunContext, step: Step) -> RolloutBatch:
        """Return the groups of a step as soon as they are finished.

        Raises:
            TrainingError: more than `limits.max_error_fraction` of the attempts failed for no fault of the policy.
        """
        self.pipeline.is_held = False
        self._begin_all(run)
        with self._clock.trainer_waits():
            while (due := self.pipeline.batch()) is None:
                await self._change(run, f"step {step.number + 1} waits for")
            self._due, own = due, [self.groups[ordinal] for ordinal in due]
            parts = await self._together(run, own, f"the rollouts of step {step.number + 1}")
        groups = tuple(group for found in parts for group in found)
        check_failures(groups, run.collector.limits)
        return RolloutBatch(groups, self._clock.since_last_batch())

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
        self._ages = self.pipeline.train(self._due)
        while not self.pipeline.may_install:
            await self._change(run, "the weights wait for")
        await self._together(run, None, "the groups before a delivery")
        self.pipeline.is_held = True  # until what is due between two steps is done
        await run.publish()
        self.pipeline.install(_ENGINE, run.policy.version - self._base)

    async def before_cut(self, run: RunContext, *, is_checkpoint: bool) -> None:
        """Wait for what runs, where an evaluation or a checkpoint that drains comes next."""
        is_evaluation = is_due(self.stage.evaluate_every, run.state.step, self.stage.steps)
        if is_evaluation or (is_checkpoint and self.settings.checkpoint == "drain"):
            while not self.pipeline.is_quiet:
                await self._change(run, "an evaluation waits for" if is_evaluation else "a checkpoint waits for")
            await self._together(run, None, "the groups before a cut")

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """Forget the groups of the step, and log where everything is. The source has just taken in the step."""
        self._n_learned += 1
        for ordinal in self._due:
            del self.groups[ordinal]
        pipeline = self.pipeline
        oldest = min((*pipeline.running, *pipeline.returned, pipeline.n_begun)) // pipeline.rules.n_per_step
        self._tasks = {number: tasks for number, tasks in self._tasks.items() if number >= oldest}
        found = await self._together(run, self._counts(), "the figures")
        step.metrics |= _figures(found, self.stage.tasks_per_step) | self._clock.figures()

    async def close(self) -> None:
        """End everything that runs."""
        playing = list(self._playing)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        self._thread.shutdown()

    async def _change(self, run: RunContext, who: str) -> None:
        """Wait until a group has ended, and say meanwhile for whom. Raises what a group raised."""
        self._changed.clear()
        if self._failed is None:
            self._begin_all(run)
            run.progress.note(f"{who} {self._waited_for()}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _NOTE_EVERY_S)
        if self._failed is not None:
            raise self._failed

    def _waited_for(self) -> str:
        """Name the task that is waited for."""
        waited, n = self.pipeline.waited_for(), len(self.pipeline.running)
        if not waited:
            return f"{n} groups that run"
        n_step = self.stage.tasks_per_step
        first = ordinal_of(waited[0], self.share, n_step)
        number, place = divmod(first, n_step)
        others = f" and {len(waited) - 1} more" if len(waited) > 1 else ""
        return f"{self._tasks_of(number)[place].id} (group {first}){others}; {n} run, {len(self.groups)} are stored"

    def _counts(self) -> _Counts:
        pipeline = self.pipeline
        counts = (len(pipeline.store), len(pipeline.running), pipeline.n_given_back, pipeline.n_begun)
        return _Counts(self._ages, pipeline.ledger, pipeline.step, *counts)


@dataclass(frozen=True)
class _Counts:
    """Figures of one process after a step: tokens by age, the ledger, and counts of groups."""

    ages: Mapping[int, int]
    ledger: Ledger
    step: int
    n_stored: int
    n_running: int
    n_given_back: int
    n_begun: int


def _figures(found: Sequence[_Counts], n_per_step: int) -> dict[str, float]:
    """Return what is logged of all processes together."""
    ages: Counter[int] = sum((Counter(of.ages) for of in found), Counter())
    ledger = {name: sum(getattr(of.ledger, name) for of in found) for name in asdict(found[0].ledger)}
    n = max(ages.total(), 1)
    begun = (ledger["trained"] + ledger["stored"] + ledger["running"]) / sum(of.n_begun for of in found)
    return {
        "asynchrony/age_mean": sum(age * count for age, count in ages.items()) / n,
        "asynchrony/age_max": float(max(ages, default=0)),
        "asynchrony/n_stored": float(sum(of.n_stored for of in found)),
        "asynchrony/n_running": float(sum(of.n_running for of in found)),
        "asynchrony/n_given_back": float(sum(of.n_given_back for of in found)),
        "asynchrony/length_bias": ledger["trained"] / (found[0].step * n_per_step) / begun if begun else 1.0,
        **{f"tokens_of_age/{age}": count / n for age, count in sorted(ages.items())},
        **{f"ledger/{name}": float(value) for name, value in ledger.items()},
    }


class _Clock:
    """Seconds in which one side waited for the other."""

    def __init__(self) -> None:
        self._idle_since = self._batch_at = time.perf_counter()
        self._is_playing = False
        self._trainer_s = self._rollout_s = 0.0

    def is_playing(self, now: bool) -> None:
        """Note whether any group runs."""
        if now and not self._is_playing:
            self._rollout_s += time.perf_counter() - self._idle_since
        elif self._is_playing and not now:
            self._idle_since = time.perf_counter()
        self._is_playing = now

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
        if not self._is_playing:
            now = time.perf_counter()
            self._rollout_s, self._idle_since = self._rollout_s + now - self._idle_since, now
        found = {"time/trainer_idle_s": self._trainer_s, "time/rollout_idle_s": self._rollout_s}
        self._trainer_s = self._rollout_s = 0.0
        return found
