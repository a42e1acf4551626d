"""Controller of groups that are played ahead: the pipeline, the groups, and the workers that groups are given to.

It is the only writer of the ledger. Workers may be anywhere: tasks of this process, or rollout workers in others. One
that dies gives its groups back under their ordinals, and gets others when it has come back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from rlhf.asynchrony.admission import AdmissionLimit
from rlhf.asynchrony.pipeline import Ledger, Pipeline, Rules
from rlhf.asynchrony.shares import global_ordinal, split_state
from rlhf.data import ScoredGroup, Task
from rlhf.errors import DeliveryError, EngineError, RlhfError, TrainingError
from rlhf.inference.vllm.instance import Load
from rlhf.rollout.counted_engine import tokens_by_version

T = TypeVar("T")

#: Name of the engine among the servers of the pipeline: it delivers to its own replicas, and answers when all have it.
_ENGINE = "engine"
#: Times that a group is begun again because its worker died; the group may be what kills it.
_MAX_BEGUN = 4
#: Times that a group is begun again because its servers were gone, which is no fault of its task.
_MAX_UNSERVED = 16
#: Seconds until a worker that did not come back in time is asked for again.
_AGAIN_S = 5.0


class GroupLostError(EngineError):
    """A group that has to begin again, as the tokens sampled for it are lost."""


class WorkerLostError(GroupLostError):
    """The worker of a group has died."""


class ServersLostError(GroupLostError):
    """No server was left for a group."""


@dataclass(frozen=True)
class Job:
    """A group to play.

    Attributes:
        number: of its step, counted from 0.
        task: to attempt.
        n_before: times that this task comes before in the step.
    """

    number: int
    task: Task
    n_before: int


class WorkerHandle(Protocol):
    """Plays groups."""

    @property
    def name(self) -> str:
        """For messages, and the pipeline."""

    @property
    def places(self) -> int:
        """Groups that it plays at a time."""

    async def play(self, job: Job, count: Callable[[int, int], None]) -> ScoredGroup:
        """Return the group; `count` is called with (version, tokens) of sampled tokens. Raises WorkerLostError."""

    async def wait_ready(self) -> None:
        """Wait until a lost worker can play again. Raises RlhfError where it cannot."""


@dataclass(frozen=True)
class StepGroups:
    """Groups that a step trains on, and their ordinals."""

    ordinals: tuple[int, ...]
    groups: Sequence[ScoredGroup]


@dataclass(frozen=True)
class Counts:
    """Figures of one controller after a step: tokens by staleness, the ledger, counts of groups, seconds without any.

    Attributes:
        n_at_once: groups that may be played at a time; 0 where nothing limits them but the workers.
        lost: workers that do not come back, and why.
    """

    tokens_by_staleness: Mapping[int, int]
    ledger: Ledger
    step: int
    n_stored: int
    n_running: int
    n_given_back: int
    n_begun: int
    idle_s: float
    n_at_once: int = 0
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Controller:
    """Decides by a pipeline what is played, and keeps the groups until they are trained.

    Attributes:
        rules: of the stage, for the share.
        share: of the groups of a step, which it has played.
        n_per_step: B, groups of a step in all.
        workers: that it asks.
        limit: of groups at a time, of all workers; None is as many as they have places.
        groups: that are finished, by their ordinals in the share.
    """

    rules: Rules
    share: slice
    n_per_step: int
    workers: Sequence[WorkerHandle] = ()
    limit: AdmissionLimit | None = None
    groups: dict[int, ScoredGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pipeline = Pipeline(self.rules)
        self._base = 0  # what the engine calls version 0 of the stage
        self._tasks: dict[int, Sequence[Task]] = {}
        self._playing: dict[asyncio.Task[None], WorkerHandle] = {}
        self._lost: dict[str, asyncio.Task[None]] = {}
        self._gone: dict[str, Exception] = {}  # of the lost, those that did not come back in time, or cannot
        self._n_lost: Counter[int] = Counter()  # times that the worker of a group died
        self._n_unserved: Counter[int] = Counter()  # times that its servers were gone
        self._changed = asyncio.Event()
        self._failed: BaseException | None = None
        self._is_closed = False
        self._ages: Mapping[int, int] = {}
        self._idle_since, self._idle_s = time.perf_counter(), 0.0

    # --- snapshots ---

    def snapshot(self) -> tuple[dict[str, Any], dict[int, ScoredGroup]]:
        """Return the state of the pipeline, and the groups by their ordinals in the run."""
        named = {global_ordinal(o, self.share, self.n_per_step): group for o, group in self.groups.items()}
        return self.pipeline.state(), named

    def restore(self, state: Mapping[str, Any], groups: Mapping[int, ScoredGroup], n_controllers: int) -> None:
        """Go on from a snapshot of the run with this share; what ran then begins again."""
        snapshot = split_state(state, self.share, self.n_per_step, n_controllers)
        self.pipeline = Pipeline.restored(self.rules, snapshot)
        self.groups = {o: groups[global_ordinal(o, self.share, self.n_per_step)] for o in self.pipeline.store}

    async def open(self, version: int) -> None:
        """Begin, with the weights of the present step, which the engine calls `version`."""
        self._base = version - self.pipeline.step
        self.pipeline.join(_ENGINE, self.pipeline.step)
        self.pipeline.is_held = True
        self._idle_since, self._idle_s = time.perf_counter(), 0.0

    # --- groups ---

    async def offer(self, tasks: Mapping[int, Sequence[Task]]) -> None:
        """Learn the tasks of steps, and begin what may begin."""
        self._tasks.update(tasks)
        self.pipeline.is_held = False
        self._begin_all()

    async def hold(self) -> None:
        """Begin no new group until tasks are offered again."""
        self.pipeline.is_held = True

    def _begin_all(self) -> None:
        """Begin groups while there is room for them."""
        playing = Counter(worker.name for worker in self._playing.values())
        while not self._is_closed and (self.limit is None or len(self._playing) < self.limit.now):
            free = [p for p in self.workers if p.name not in self._lost and playing[p.name] < p.places]
            worker = min(free, key=lambda p: playing[p.name] / p.places, default=None)
            if worker is None or (ordinal := self.pipeline.begin()) is None:
                break
            task = asyncio.create_task(self._play(worker, ordinal), name=f"group {ordinal}")
            playing[worker.name] += 1
            if not self._playing:
                self._idle_s += time.perf_counter() - self._idle_since
            self._playing[task] = worker
            task.add_done_callback(self._ended)

    def observe(self, loads: Sequence[Load]) -> None:
        """Let the load of the engines limit which groups begin; while none may, nothing is said by it."""
        if self.limit is not None and not self.pipeline.is_held:
            self.limit.observe(loads, len(self._playing))
            self._changed.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._playing[task]
        if not self._playing:
            self._idle_since = time.perf_counter()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = self._failed or error
        elif not task.cancelled() and self._failed is None:
            self._begin_all()
        self._changed.set()

    async def _play(self, worker: WorkerHandle, ordinal: int) -> None:
        def count(version: int, n_tokens: int) -> None:
            try:
                self.pipeline.sampled(ordinal, version - self._base, n_tokens)
            except DeliveryError as error:  # no failure of the attempt: every other group would meet it too
                self._failed = error
                raise

        number, place = divmod(global_ordinal(ordinal, self.share, self.n_per_step), self.n_per_step)
        tasks = self._tasks[number]
        n_before = sum(task.id == tasks[place].id for task in tasks[:place])
        try:
            group = await worker.play(Job(number, tasks[place], n_before), count)
        except GroupLostError as error:
            self.pipeline.give_back(ordinal)
            if worker.name not in self._lost:
                self._lost[worker.name] = asyncio.create_task(self._come_back(worker))
            self._refuse_repeated_loss(ordinal, tasks[place], error)
            return
        self.groups[ordinal] = group
        del self._n_lost[ordinal], self._n_unserved[ordinal]
        kept = {version - self._base: n for version, n in tokens_by_version(group).items()}
        self.pipeline.finish(ordinal, kept)

    def _refuse_repeated_loss(self, ordinal: int, task: Task, error: GroupLostError) -> None:
        """Raise where a group was given back too often: its task may kill workers, or servers come and go."""
        said = f"the last time: {error.what}: {error.got}"
        if isinstance(error, ServersLostError):
            self._n_unserved[ordinal] += 1
            if self._n_unserved[ordinal] >= _MAX_UNSERVED:
                raise EngineError(
                    "the servers were lost before a group was played",
                    where=f"group {ordinal}, {task.id}",
                    got=f"{_MAX_UNSERVED} times; {said}",
                    hint="read the servers' logs in RUN/served for why they exit",
                ) from error
            return
        self._n_lost[ordinal] += 1
        if self._n_lost[ordinal] >= _MAX_BEGUN:
            raise TrainingError(
                "every process that plays this task dies",
                where=task.id,
                got=f"started {_MAX_BEGUN} times; {said}",
                hint="play this task alone with rlhf evaluate, and watch its memory",
            ) from error

    async def _come_back(self, worker: WorkerHandle) -> None:
        """Use a worker again once it is there; where none of them is, the run ends with the reason of each."""
        while True:
            try:
                await worker.wait_ready()
                break
            except Exception as error:
                self._gone[worker.name] = error
                if len(self._gone) == len(self.workers):
                    self._failed = self._failed or _all_gone(self._gone)
                self._changed.set()
                await asyncio.sleep(_AGAIN_S)
        self._gone.pop(worker.name, None)
        del self._lost[worker.name]
        self._begin_all()
        self._changed.set()

    # --- a step; each of these returns after `wait_s`, or as soon as there is something to say ---

    async def due(self, wait_s: float) -> StepGroups | str:
        """Return what the next step trains, or who is waited for."""

        def found() -> StepGroups | None:
            ordinals = self.pipeline.batch()
            return None if ordinals is None else StepGroups(ordinals, [self.groups[ordinal] for ordinal in ordinals])

        return await self._until(found, wait_s)

    async def may_install(self, wait_s: float) -> bool | str:
        """Return True once the next version may be installed, or who is waited for."""
        return await self._until(lambda: self.pipeline.may_install or None, wait_s)

    async def is_drained(self, wait_s: float) -> bool | str:
        """Return True once nothing runs, or who is waited for."""
        return await self._until(lambda: self.pipeline.is_drained or None, wait_s)

    async def train(self, ordinals: Sequence[int]) -> int:
        """Note that a step was trained, and forget its groups; returns how many steps were."""
        self._ages = self.pipeline.train(ordinals)
        for ordinal in ordinals:
            del self.groups[ordinal]
        return self.pipeline.step

    async def install(self, version: int) -> None:
        """Note that the engine has the weights of a version."""
        self.pipeline.install(_ENGINE, version - self._base)

    async def counts(self) -> Counts:
        """Return the figures since the last call, and forget tasks of steps that are over."""
        pipeline, now = self.pipeline, time.perf_counter()
        first = min((*pipeline.running, *pipeline.returned, pipeline.n_begun))
        oldest = first // max(self.rules.n_per_step, 1)
        self._tasks = {number: tasks for number, tasks in self._tasks.items() if number >= oldest}
        if not self._playing:
            self._idle_s, self._idle_since = self._idle_s + now - self._idle_since, now
        idle_s, self._idle_s = self._idle_s, 0.0
        n = (len(pipeline.store), len(pipeline.running), pipeline.n_given_back, pipeline.n_begun)
        most, lost = self.limit.now if self.limit else 0, {name: _said(why) for name, why in self._gone.items()}
        return Counts(self._ages, pipeline.ledger, pipeline.step, *n, idle_s, most, lost)

    async def close(self) -> None:
        """End everything that runs, and begin nothing any more."""
        self._is_closed = True
        tasks = [*self._playing, *self._lost.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until(self, found: Callable[[], T | None], wait_s: float) -> T | str:
        """Return what is found as soon as it is, else after `wait_s` who is waited for. Raises what a group raised."""
        deadline = time.monotonic() + wait_s
        while True:
            if self._failed is not None:
                raise self._failed
            if (value := found()) is not None:
                return value
            self._begin_all()
            self._changed.clear()
            if (left := deadline - time.monotonic()) <= 0:
                return self._waited_for()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _waited_for(self) -> str:
        """Name the task that is waited for."""
        waited, n = self.pipeline.waited_for(), len(self.pipeline.running)
        names = (f"{name} ({_said(self._gone[name])})" if name in self._gone else name for name in sorted(self._lost))
        lost = f"; lost: {', '.join(names)}" if self._lost else ""
        if self.limit is not None and self.limit.reason:
            lost = f"; at most {self.limit.now} at a time, as {self.limit.reason}{lost}"
        if not waited:
            return f"{n} groups that run{lost}"
        first = global_ordinal(waited[0], self.share, self.n_per_step)
        number, place = divmod(first, self.n_per_step)
        task = self._tasks[number][place].id if number in self._tasks else "a task"
        others = f" and {len(waited) - 1} more" if len(waited) > 1 else ""
        return f"{task} (group {first}){others}; {n} run, {len(self.groups)} are stored{lost}"


def _said(error: Exception) -> str:
    """An error in a few words."""
    return f"{error.what}: {error.got}" if isinstance(error, RlhfError) else f"{type(error).__name__}: {error}"


def _all_gone(gone: Mapping[str, Exception]) -> EngineError:
    """Error where no worker is left."""
    first = next(iter(gone.values()))
    return EngineError(
        "no rollout worker is left",
        where=", ".join(gone),
        got="; ".join(dict.fromkeys(map(_said, gone.values()))),
        hint=first.hint if isinstance(first, RlhfError) else "",
    )


def figures(found: Sequence[Counts], n_per_step: int) -> dict[str, float]:
    """Return what is logged of all controllers together."""
    tokens_by_staleness: Counter[int] = sum((Counter(of.tokens_by_staleness) for of in found), Counter())
    ledger = {name: sum(getattr(of.ledger, name) for of in found) for name in asdict(found[0].ledger)}
    n = max(tokens_by_staleness.total(), 1)
    n_trained, n_stored = found[0].step * n_per_step, sum(of.n_stored for of in found)
    finished = (ledger["trained"] + ledger["stored"]) / max(n_trained + n_stored, 1)
    return {
        "asynchrony/staleness_mean": sum(age * count for age, count in tokens_by_staleness.items()) / n,
        "asynchrony/staleness_max": float(max(tokens_by_staleness, default=0)),
        "asynchrony/n_queued_groups": float(n_stored),
        "asynchrony/n_running_groups": float(sum(of.n_running for of in found)),
        "asynchrony/max_concurrent_groups": float(sum(of.n_at_once for of in found)),
        "asynchrony/n_restarted_groups": float(sum(of.n_given_back for of in found)),
        "asynchrony/length_bias": ledger["trained"] / n_trained / finished if n_trained and finished else 1.0,
        **{f"tokens_by_staleness/{age}": count / n for age, count in sorted(tokens_by_staleness.items())},
        "asynchrony/tokens_generated": float(ledger["generated"]),
        "asynchrony/tokens_trained": float(ledger["trained"]),
        "asynchrony/tokens_queued": float(ledger["stored"]),
        "asynchrony/tokens_running": float(ledger["running"]),
        "asynchrony/tokens_discarded": float(ledger["failed"]),
        "time/rollout_idle_s": sum(of.idle_s for of in found) / len(found),
    }
