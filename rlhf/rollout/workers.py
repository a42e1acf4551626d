"""Calls into code that may block or hang, kept off the event loop.

One rule for plain and async functions: a call runs as a coroutine in the event loop of a worker thread. A plain
function simply runs there; what an async one awaits, it awaits there. So neither a blocking `step` nor a blocking
`async step` holds up anything else, and a call that outlives its time limit can be left behind.

A lane is where the calls of one episode run, one after another:

- inline: on the caller's event loop, without a thread;
- limited: the same for code that keeps time limits itself, because it knows when a call only waits for others;
- own: in a thread that belongs to the episode, so that an object bound to a thread or an event loop works;
- shared: in one thread for all episodes of the environment, one call at a time, for code that is not thread-safe.

A hung thread cannot be killed in Python. It is a daemon, so it does not keep the process from ending; its lane goes on
in a new thread; and there is a bound on how many may hang.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from time import monotonic
from types import CoroutineType
from typing import Any
from weakref import WeakSet

from environments.base import CALL_LIMIT_S
from rlhf.errors import EnvError, RlhfError

#: How long a thread whose call was cancelled may take to show that it is free.
GRACE_S = 0.5
#: Threads of this process that may hang at a time.
MAX_HUNG = 64
#: How long a left thread may take to end what it does.
_LEAVE_S = 10.0

_hung: WeakSet[threading.Thread] = WeakSet()
_numbers = itertools.count()


class CallTimeout(Exception):
    """A call took longer than it may."""


class CallError(Exception):
    """A call raised; the message says what and where, the cause is what was raised."""


def describe(error: BaseException) -> str:
    """Kind, message and place of an exception, on as few lines as it has."""
    if isinstance(error, RlhfError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


class InlineLane:
    """Calls on the present event loop. A call that blocks, blocks everything; one that awaits is limited."""

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """Return what `function` returns or awaits. Raises CallTimeout, CallError.

        A clock is set only where something is waited for: setting it takes as long as a short step.
        """
        begun = monotonic()
        try:
            value = function(*args)
            if type(value) is CoroutineType and not value.cr_suspended:
                try:
                    waits_for = value.send(None)
                except StopIteration as end:
                    return end.value
                value = _Begun(value, waits_for)
            elif not inspect.isawaitable(value):
                return value
        except (Exception, SystemExit) as error:
            raise CallError(describe(error)) from error
        try:
            async with asyncio.timeout(begun + timeout_s - monotonic()):
                return _unwrap(await _settle(lambda: value, (), (Exception, SystemExit)))
        except TimeoutError:
            raise CallTimeout(f"no answer within {timeout_s:g} s") from None

    async def leave(self) -> None:
        """Do nothing: there is no thread."""


class _Begun:
    """A coroutine that waits for something already; to await this is to go on with it."""

    def __init__(self, coroutine: CoroutineType[Any, Any, Any], waits_for: Any) -> None:
        self._coroutine, self._waits_for = coroutine, waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            try:
                try:
                    sent = yield self._waits_for
                except BaseException as error:
                    self._waits_for = self._coroutine.throw(error)
                else:
                    self._waits_for = self._coroutine.send(sent)
            except StopIteration as end:
                return end.value


class LimitedLane:
    """Calls on the present event loop that keep their limit themselves."""

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """Return what `function` returns or awaits, told its limit by `CALL_LIMIT_S`. Raises CallError."""
        before = CALL_LIMIT_S.set(timeout_s)
        try:
            return _unwrap(await _settle(function, args, (Exception, SystemExit)))
        finally:
            CALL_LIMIT_S.reset(before)

    async def leave(self) -> None:
        """Do nothing: there is no thread."""


class ThreadLane:
    """Calls in a worker thread, which is replaced if it hangs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._worker: _Worker | None = None
        self._turn = asyncio.Lock()

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """Return what `function` returns or awaits; time spent queueing for the thread does not count.

        Raises:
            CallTimeout: no answer in time; the call is cancelled, or left behind where it does not react.
            CallError: the function raised anything.
            EnvError: too many threads hang already.
        """
        async with self._turn:
            worker = self._worker = self._worker or _Worker(self.name)
            try:
                return _unwrap(await worker.run(function, args, timeout_s))
            except (CallTimeout, asyncio.CancelledError):
                if not await worker.answers(GRACE_S):
                    self._worker = None
                    worker.leave(hung=True)
                raise

    async def leave(self) -> None:
        """Let the thread end; returns at once."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.leave()


class _SharedLane:
    """One episode's view of a lane that others use too."""

    def __init__(self, lane: ThreadLane) -> None:
        self.call = lane.call

    async def leave(self) -> None:
        """Keep the thread, which the others still need."""


Lane = InlineLane | LimitedLane | ThreadLane | _SharedLane


class Lanes:
    """Gives each episode of an environment its lane.

    Args:
        inline: calls are quick and cannot hang.
        shared: the code is not thread-safe.
        limited: calls only wait on the event loop, and keep their limits themselves.
        name: prefix of the threads' names.
    """

    def __init__(self, *, inline: bool = False, shared: bool = True, limited: bool = False, name: str = "rlhf") -> None:
        self.inline, self.limited, self.name = inline, limited, name
        self._shared = ThreadLane(name) if shared and not (inline or limited) else None

    def open(self) -> Lane:
        """Return a lane for one episode, which leaves it at its end."""
        if self.limited:
            return LimitedLane()
        if self.inline:
            return InlineLane()
        return _SharedLane(self._shared) if self._shared is not None else ThreadLane(self.name)

    async def close(self) -> None:
        """Let the shared thread end."""
        if self._shared is not None:
            await self._shared.leave()


class _Worker:
    """A daemon thread with an event loop."""

    def __init__(self, name: str) -> None:
        if sum(thread.is_alive() for thread in _hung) >= MAX_HUNG:
            raise EnvError(
                "too many calls hang",
                where=name,
                got=f"{MAX_HUNG} threads that never returned",
                hint="find out why `start`, `step` or `close` hangs: `rlhf check environment`",
            )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"{name}-{next(_numbers)}", daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> _Settled:
        """Run one call in the thread. Raises CallTimeout."""
        future = asyncio.run_coroutine_threadsafe(_settle(function, args, (BaseException,)), self._loop)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise CallTimeout(f"no answer within {timeout_s:g} s") from None

    async def answers(self, within_s: float) -> bool:
        """Whether the thread is free to take a call."""
        try:
            await self.run(int, (), within_s)
        except CallTimeout:
            return False
        return True

    def leave(self, *, hung: bool = False) -> None:
        """End the thread once it has done what it does."""
        if hung:
            _hung.add(self._thread)
        self._loop.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        self._end = self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        others = asyncio.all_tasks() - {self._end}
        if others:
            await asyncio.wait(others, timeout=_LEAVE_S)
        self._loop.stop()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            # What ignores its cancellation dies with the loop, and asyncio need not say so at exit.
            self._loop.set_exception_handler(lambda loop, context: None)
            self._loop.close()


_Settled = tuple[Any, BaseException | None]


async def _settle(
    function: Callable[..., Any], args: tuple[Any, ...], caught: tuple[type[BaseException], ...]
) -> _Settled:
    """Return result and error as values, so that an error of the called code is never taken for one of ours."""
    try:
        value = function(*args)
        return (await value if inspect.isawaitable(value) else value), None
    except caught as error:
        return None, error


def _unwrap(settled: _Settled) -> Any:
    value, error = settled
    if error is not None:
        raise CallError(describe(error)) from error
    return value
