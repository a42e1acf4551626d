"""Scheduler of worker processes: assignment of episodes and replacement of workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from environments.workers.process import EXIT_S, Bounds
from environments.workers.worker import Worker, WorkerLost

#: Share of the memory bound from which on a worker gets no new episodes.
_FULL = 0.75


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a pool.

    Attributes:
        n_workers: processes at most, beside the one that lists tasks and plans.
        at_once: episodes of one worker that are alive at a time.
        per_worker: episodes after which a worker is replaced.
    """

    n_workers: int
    at_once: int
    per_worker: int


class Pool:
    """Workers of one environment. Any event loop, and any thread, may use it.

    Args:
        job: the packed environment.
        size: of the pool.
        bounds: of each worker.
    """

    def __init__(self, job: bytes, size: Size, bounds: Bounds) -> None:
        self.owner, self.size = os.getpid(), size
        self._job, self._bounds = job, bounds
        self._lock, self._desk_lock = threading.RLock(), threading.Lock()
        self._workers: list[Worker] = []
        self._leaving: list[tuple[Worker, float]] = []
        self._desk: list[Worker] = []  # one at most: lists tasks and plans
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        # Weakly, so that a pool that nobody holds any more ends its workers.
        dropped = weakref.WeakMethod(self._drop)
        self._on_lost = lambda worker: (dropped() or _ignore)(worker)
        weakref.finalize(self, _end_all, self.owner, self._workers, self._desk, self._leaving)

    # --- seats ---------------------------------------------------------------------------------------------------

    async def acquire(self) -> Worker:
        """Reserve a seat for an episode, waiting while all are taken; given back with `release`."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                worker = self._free(loop)
                if worker is not None:
                    worker.n_begun += 1
                    worker.n_live += 1
                    if worker.loop is None:
                        worker.attach(loop)
                    return worker
                future: asyncio.Future[None] = loop.create_future()
                self._waiting.append((loop, future))
            try:
                await future
            except asyncio.CancelledError:
                self._wake()  # the seat that it was woken for is another's
                raise

    def release(self, worker: Worker) -> None:
        """Give a seat back. A worker that reached its episode limit or uses much memory is stopped."""
        with self._lock:
            worker.n_live -= 1
            if worker.n_live == 0 and worker.lost is None:
                worker.detach()
                if worker.n_begun >= self.size.per_worker or self._is_full(worker):
                    self._stop(worker)
            self._reap()
        self._wake()

    def _free(self, loop: asyncio.AbstractEventLoop) -> Worker | None:
        """Idle worker, else a new one, else this loop's worker with most room."""
        for worker in list(self._workers):
            if (worker.loop is not None and worker.loop.is_closed()) or (worker.n_live == 0 and not worker.alive):
                worker.end("its event loop is closed" if worker.loop else None)
        idle = next((w for w in self._workers if w.n_live == 0), None)
        if idle is not None:
            return idle
        if len(self._workers) < self.size.n_workers:
            worker = Worker(self._job, self._bounds, self._on_lost)
            self._workers.append(worker)
            return worker
        shared = [w for w in self._workers if w.loop is loop and w.n_live < self.size.at_once and not self._is_done(w)]
        return min(shared, key=lambda w: w.n_live, default=None)

    def _is_done(self, worker: Worker) -> bool:
        return worker.n_begun >= self.size.per_worker or self._is_full(worker)

    def _is_full(self, worker: Worker) -> bool:
        return worker.memory_mb > _FULL * self._bounds.max_memory_mb

    def _drop(self, worker: Worker) -> None:
        """Forget a worker that has ended; its place is free at once."""
        with self._lock, contextlib.suppress(ValueError):
            self._workers.remove(worker)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            for loop, future in self._waiting:
                with contextlib.suppress(RuntimeError):  # its loop is closed, and nobody waits any more
                    loop.call_soon_threadsafe(_settle, future)
            self._waiting.clear()

    # --- calls that are no episode's -----------------------------------------------------------------------------

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call `tasks` or `plan` in a worker without episodes and wait; a lost one is retried."""
        with self._desk_lock:
            for is_last in (False, True):
                desk = self._at_desk()
                try:
                    return desk.ask(name, *arguments)
                except WorkerLost:
                    # An idle process may have gone for reasons of its own; one that goes in two runs is at fault.
                    if is_last:
                        raise
        raise AssertionError("unreachable")

    def _at_desk(self) -> Worker:
        with self._lock:
            for desk in list(self._desk):
                if not desk.alive:
                    self._desk.remove(desk)
                    desk.end(None)
                elif desk.n_begun >= self.size.per_worker:
                    self._desk.remove(desk)
                    self._stop(desk)
            if not self._desk:
                self._desk.append(Worker(self._job, self._bounds))
            self._desk[0].n_begun += 1
            return self._desk[0]

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process; waits for those that have something to close."""
        with self._lock:
            for worker in list(self._workers):
                if worker.n_live:
                    worker.end("the pool is closed")
            _end_all(self.owner, self._workers, self._desk, self._leaving)
        self._wake()

    def pids(self) -> list[int]:
        """Numbers of the processes that serve, the one for tasks and plans last."""
        with self._lock:
            return [worker.pid for worker in [*self._workers, *self._desk] if worker.lost is None]

    def _stop(self, worker: Worker) -> None:
        worker.stop()
        with contextlib.suppress(ValueError):
            self._workers.remove(worker)
        self._leaving.append((worker, time.monotonic() + EXIT_S))

    def _reap(self) -> None:
        for entry in list(self._leaving):
            worker, deadline = entry
            if worker.is_over(wait_s=0.01 if time.monotonic() > deadline else 0.0):
                self._leaving.remove(entry)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _ignore(worker: Worker) -> None:
    pass


def _end_all(owner: int, workers: list[Worker], desk: list[Worker], leaving: list[tuple[Worker, float]]) -> None:
    """End the remains of a closed or collected pool; nothing in the child of a fork."""
    if os.getpid() != owner:
        return
    for worker in [*workers, *desk]:
        if worker.lost is None:
            worker.stop()
    deadline = time.monotonic() + EXIT_S
    for worker in [*workers, *desk, *(one for one, _ in leaving)]:
        worker.is_over(wait_s=max(0.01, deadline - time.monotonic()))
    for emptied in (workers, desk, leaving):
        emptied.clear()
