"""Reward calls with hard limits: in processes killed and replaced on overrun.

A signal can stop a call in the main thread only, and cannot stop one that never comes back to Python at all, such as
9**9**9. A process can always be killed. The limit is on processor time, so that a busy machine does not turn right
answers into wrong ones; a process that sleeps is killed by the clock.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import threading
import time
from typing import Any

from rlhf.child_process import Child, python_command, python_environment
from rlhf.errors import RewardError
from rlhf.extras import missing

#: A process may take so long to be ready, and so much longer on the clock than on the processor.
_START_LIMIT_S = 120.0
_CLOCK_FACTOR, _CLOCK_EXTRA_S = 4.0, 2.0
#: Bytes of one answer.
_MOST_BYTES = 64 * 2**20


class TooSlow(Exception):
    """Overrun of a call's time, memory or answer size; its process is gone."""


class RaisedError(RewardError):
    """Exception of the called function, as apart from trouble with the processes."""


class Pool:
    """Processes that answer calls of one function, `module:name`, of JSON values.

    Any number of threads may call. Processes are started when they are needed, never more than `size`; after a fork the
    child starts its own.

    Args:
        target: what to call, by name, so that nothing has to be pickled.
        size: processes at most; one per processor by default.
    """

    def __init__(self, target: str, size: int | None = None) -> None:
        self.target, self.size = target, size or os.cpu_count() or 1
        self._reset()
        atexit.register(self.close)

    def _reset(self) -> None:
        self._owner, self._n_started = os.getpid(), 0
        self._lock, self._idle = threading.Lock(), queue.LifoQueue[_Process | None]()
        self._all: set[_Process] = set()

    def call(self, *arguments: Any, limit_s: float) -> Any:
        """Return what the function returns.

        Raises:
            TooSlow: it took more than `limit_s` seconds of processor time.
            RewardError: it raised; the message says what.
            MissingPackageError: it needs a package that is not installed.
        """
        process = self._take()
        try:
            kind, value = process.call(arguments, limit_s)
        except BaseException:
            self._end(process)
            raise
        self._idle.put(process)
        if kind == "missing":
            raise missing("rewards", "a package is not installed", self.target, f"no module named {value}")
        if kind == "raised":
            raise RaisedError("raised an exception", where=self.target, got=value)
        return value

    def close(self) -> None:
        """Kill all processes; later calls start new ones."""
        if self._owner != os.getpid():
            return
        for process in list(self._all):
            process.kill()
        self._reset()

    def _take(self) -> _Process:
        if self._owner != os.getpid():
            self._reset()
        while True:
            try:
                process = self._idle.get_nowait()
            except queue.Empty:
                process = self._started() or self._idle.get()
            if process is None:
                continue
            if process.popen.poll() is None:
                return process
            self._end(process)  # it has died while it had nothing to do

    def _started(self) -> _Process | None:
        with self._lock:
            if self._n_started >= self.size:
                return None
            self._n_started += 1
        try:
            process = _Process(self.target)
        except BaseException:
            with self._lock:
                self._n_started -= 1
            self._idle.put(None)  # wakes one that waits, to try for itself
            raise
        self._all.add(process)
        return process

    def _end(self, process: _Process) -> None:
        process.kill()
        self._all.discard(process)
        with self._lock:
            self._n_started -= 1
        self._idle.put(None)


class _Process(Child):
    def __init__(self, target: str) -> None:
        super().__init__(
            python_command("rewards.worker", target),
            stderr=subprocess.DEVNULL,
            env=python_environment(OMP_NUM_THREADS="1", PYTHONHASHSEED="0"),
        )
        if self._answer(time.monotonic() + _START_LIMIT_S) != "ready":
            self.kill()
            raise RewardError("a worker process does not start", where=target, hint="run python -m rewards.worker")

    def call(self, arguments: tuple[Any, ...], limit_s: float) -> tuple[str, Any]:
        assert self.popen.stdin is not None
        deadline = time.monotonic() + limit_s * _CLOCK_FACTOR + _CLOCK_EXTRA_S
        try:
            self.popen.stdin.write(json.dumps([limit_s, *arguments]).encode() + b"\n")
            self.popen.stdin.flush()
            answer = self._answer(deadline)
        except OSError:
            answer = None
        if answer is None:
            raise TooSlow(f"more than {limit_s:g} s of processor time, or too much memory")
        kind, value = answer
        return kind, value

    def _answer(self, deadline: float) -> Any:
        """Return the next answer; None where the process ended or the clock ran out."""
        try:
            return json.loads(self.line(deadline, _MOST_BYTES) or b"null")
        except (ValueError, RecursionError):  # what it answers depends on what a policy wrote
            return None
