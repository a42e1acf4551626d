"""Episodes of any environment in worker processes, so that what a package does there stays there.

    environment:
      kind: worker_processes
      environment: {kind: textworld_express, game: coin}
      n_workers: 8
      max_memory_mb: 1024

A worker that dies, hangs, or takes too much memory costs the episodes it served, with a typed outcome, and is replaced.
An environment that declares `isolated` is served so without being asked; `n_workers: 0` turns that off.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Capabilities, Environment, Episode, Properties, StepResult, can_demonstrate, properties_of
from environments.workers.process import Bounds
from environments.workers.protocol import packed
from environments.workers.scheduler import Pool, Size
from environments.workers.worker import Worker, WorkerLost
from rlhf import processes
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

#: Episodes alive at a time in one worker of an environment that is thread-safe, or whose episodes interleave.
SHARED = 32

#: Tasks that travel at a time.
_TASKS = 5000

_making, _listing = threading.Lock(), threading.Lock()
_keys = itertools.count()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Processes:
    """An environment whose episodes, tasks and plans are made in worker processes."""

    environment: Environment
    """The environment, with a `kind` and its keys."""
    n_workers: Annotated[int, Field(ge=0)] | None = None
    """Processes at most; null is one per core, 0 serves everything in this process."""
    episodes_at_once: Annotated[int, Field(ge=1)] | None = None
    """Episodes alive at a time in one worker; null is 32 of an environment whose episodes may share one, else 1."""
    episodes_per_worker: Annotated[int, Field(ge=1)] = 1000
    """After so many a worker is replaced, which frees what a package leaks."""
    max_memory_mb: Annotated[int, Field(ge=64)] = 4096
    """Memory of one worker with the processes it starts; one that takes more is ended."""
    call_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """Seconds for one call in a worker; `limits` cut a step and a start before that."""

    def __post_init__(self) -> None:
        if isinstance(self.environment, Processes):
            raise EnvError(
                "kind worker_processes within kind worker_processes",
                where="environment",
                got="processes in processes",
                expected="an environment without its own workers",
                hint="remove one of the two",
            )

    # --- what it says of itself ----------------------------------------------------------------------------------

    @property
    def served(self) -> bool:
        """True if there are workers."""
        return self.n_workers != 0

    @property
    def properties(self) -> Properties:
        """Properties of the environment; with workers, episodes may run anywhere here."""
        own = replace(properties_of(self.environment), isolated=False)
        return replace(own, inline=False, thread_safe=True) if self.served else own

    @property
    def inline(self) -> bool:
        """True if calls run on the event loop; those of workers only wait there, and block nothing."""
        return self.served or Capabilities(self.environment).is_inline

    @property
    def keeps_limits(self) -> bool:
        """True if the workers limit calls: the clock stands while a call waits for others."""
        return self.served

    @property
    def demonstrates(self) -> bool:
        """True if the environment has an oracle."""
        return can_demonstrate(self.environment)

    def demonstrates_for(self, task: Task) -> bool:
        """True if the environment has an oracle for a task."""
        return can_demonstrate(self.environment, task)

    @property
    def max_episodes(self) -> int | None:
        """Maximal number of episodes alive at a time."""
        size = self._size()
        return size.n_workers * size.at_once if self.served else None

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the environment, such as `max_steps` and `tools`; methods run in a worker."""
        if name.startswith("_") or name == "environment":
            raise AttributeError(name)
        found = getattr(self.environment, name)
        return partial(self._ask, name) if self.served and inspect.ismethod(found) else found

    # --- tasks and episodes --------------------------------------------------------------------------------------

    def tasks(self, split: str) -> Iterator[Task]:
        """List the tasks of a split, made once in a worker and kept here."""
        if not self.served:
            yield from self.environment.tasks(split)
            return
        pool, kept = self._pool(), self._kept().setdefault(split, [])
        for i in itertools.count():
            if i >= len(kept):
                with _listing:  # several threads may list at once
                    if i >= len(kept) and len(kept) % _TASKS == 0:
                        kept.extend(pool.ask("tasks", split, len(kept), _TASKS))
                if i >= len(kept):
                    return
            yield kept[i]

    async def start(self, task: Task) -> Episode:
        """Begin one attempt in a worker that has room, waiting for one."""
        if not self.served:
            started: Any = self.environment.start(task)
            episode: Episode = await started if inspect.isawaitable(started) else started
            return episode
        pool = self._pool()
        worker = await pool.acquire()
        was_idle = worker.n_live == 1 and worker.n_begun > 1
        try:
            return await _begun(pool, worker, task)
        except WorkerLost:
            # It may have gone while it was idle, of which nobody had been told yet.
            if not was_idle:
                raise
            return await _begun(pool, await pool.acquire(), task)

    def plan(self, task: Task, taken: Sequence[str]) -> Any:
        """Ask the environment's oracle. Raises EnvError where it has none."""
        if not self.demonstrates:
            raise EnvError(
                "this environment cannot demonstrate",
                where="environment",
                got=type(self.environment).__name__,
                expected="an environment with a method `plan(task, taken)`",
            )
        if self.served:
            return self._ask("plan", task, list(taken))
        planner: Any = self.environment
        return planner.plan(task, taken)

    def close(self) -> None:
        """End all workers; later calls start new ones."""
        pool = self.__dict__.pop("_live", None)
        if pool is not None and pool.owner == os.getpid():
            pool.close()

    # --- the pool ------------------------------------------------------------------------------------------------

    def _pool(self) -> Pool:
        """Worker pool of this object, made on first use; a forked child has its own."""
        with _making:
            pool: Pool | None = self.__dict__.get("_live")
            if pool is None or pool.owner != os.getpid():
                bounds = Bounds(self.call_timeout_s, self.max_memory_mb)
                pool = self.__dict__["_live"] = Pool(packed(self.environment), self._size(), bounds)
            return pool

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._pool().ask("method", name, *arguments)

    def _size(self) -> Size:
        n_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        n_workers = self.n_workers or max(1, n_cores // processes.current().n)
        own = properties_of(self.environment)
        at_once = self.episodes_at_once or (SHARED if own.thread_safe or own.interleaves else 1)
        return Size(n_workers, at_once, self.episodes_per_worker)

    def _kept(self) -> dict[str, list[Task]]:
        kept: dict[str, list[Task]] = self.__dict__.setdefault("_tasks", {})
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what lives in this process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_live", "_tasks")}


class PooledEpisode:
    """Attempt in a worker."""

    def __init__(self, pool: Pool, worker: Worker, key: int, opening: StepResult) -> None:
        self._pool, self._worker, self._key = pool, worker, key
        self._closed = False
        self.opening = opening

    async def step(self, action: str) -> StepResult:
        """Do one action. Raises EnvError, or CallTimeoutError, where the worker does not answer it."""
        if self._closed:
            raise EnvError("the episode is closed", where=f"worker {self._worker.pid}")
        found: StepResult = await self._worker.call("step", self._key, action)
        return found

    async def close(self) -> None:
        """Free the episode and its seat; may be called again."""
        if self._closed:
            return
        self._closed = True
        await _closed(self._pool, self._worker, self._key)


#: Episodes whose start was cancelled, until they are closed.
_late: set[Any] = set()


async def _begun(pool: Pool, worker: Worker, task: Task) -> PooledEpisode:
    """Start an episode in a worker whose seat is taken."""
    key = next(_keys)
    try:
        return PooledEpisode(pool, worker, key, await worker.call("start", key, task))
    except asyncio.CancelledError:
        # It may begin yet. Closing waits behind the start, which is cut before long now that nobody waits for it.
        late = asyncio.ensure_future(_closed(pool, worker, key))
        _late.add(late)
        late.add_done_callback(_late.discard)
        raise
    except BaseException:
        pool.release(worker)
        raise


async def _closed(pool: Pool, worker: Worker, key: int) -> None:
    try:
        if worker.lost is None:
            await worker.call("close", key)
    except WorkerLost:  # and the episode with it
        pass
    finally:
        pool.release(worker)
