"""Call executors: code that may block or hang runs off the event loop, under a time limit.

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
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from time import monotonic
from types import CoroutineType
from typing import Any
from weakref import WeakSet

from environments.base import CALL_LIMIT_S
from rlhf.data.clock import Clock
from rlhf.data.untrusted import described, is_from_outside
from rlhf.errors import EnvError
from rlhf.rollout.blocking import ON_LOOP

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


class InlineLane:
    """Calls on the present event loop. A call that blocks, blocks everything; one that awaits is limited.

    Args:
        name: of what is called, for the caution about a call that blocks; see `rlhf.rollout.blocking`.
        part: what is called; parts that come along with the toolkit are not named.
    """

    def __init__(self, name: str = "an inline part", part: object = None) -> None:
        self.name, self.part = name, part

    async def call(
        self, function: Callable[..., Any], *args: Any, timeout_s: float | None, clock: Clock | None = None
    ) -> Any:
        """Return what `function` returns or awaits. Raises CallTimeout, CallError.

        A clock is set only where something is waited for: setting it takes as long as a short step. One that is given
        has the same limit, and may stand for a while.
        """
        begun, waiting, waits_for = monotonic(), None, None
        thread = get_ident()
        ON_LOOP[thread] = (self.name, begun, self.part)
        try:
            value = function(*args)
            waiting = _coroutine_of(value)
            if waiting is not None:
                waits_for = waiting.send(None)
        except BaseException as error:
            if waiting is None or type(error) is not StopIteration:
                if is_from_outside(error):
                    raise
                raise CallError(described(error)) from error
            waiting, value = None, error.value
        finally:
            ON_LOOP[thread] = None
        if waiting is None:
            is_late = timeout_s is not None and monotonic() - begun > timeout_s
        else:
            clock = clock or Clock(timeout_s, begun)
            try:
                async with clock.running():
                    value = _unwrap(await _caught(_Begun(waiting, waits_for, self)))
                is_late = clock.is_over()
            except TimeoutError:
                is_late = True
        if is_late:
            raise CallTimeout(f"no answer within {timeout_s:g} s")
        return value

    async def leave(self) -> None:
        """Do nothing: there is no thread."""


def _coroutine_of(value: Any) -> CoroutineType[Any, Any, Any] | None:
    """Coroutine that gives what awaiting `value` gives; None for a plain value."""
    if type(value) is CoroutineType and not value.cr_suspended:
        return value
    if not inspect.isawaitable(value):
        return None

    async def awaits() -> Any:
        return await value

    coroutine = awaits()
    assert isinstance(coroutine, CoroutineType)
    return coroutine


class _Begun:
    """A coroutine that waits for something already; to await this is to go on with it.

    One that is cancelled may await a little longer to clean up, and is left where it does not end.
    """

    def __init__(self, coroutine: CoroutineType[Any, Any, Any], waits_for: Any, lane: InlineLane) -> None:
        self._coroutine, self._waits_for, self._lane = coroutine, waits_for, lane
        self._timer: asyncio.TimerHandle | None = None
        self._is_overdue = False

    def __await__(self) -> Generator[Any, Any, Any]:
        task, thread = asyncio.current_task(), get_ident()
        n_before = task.cancelling() if task is not None else 0
        try:
            while True:
                error: BaseException | None = None
                sent = None
                try:
                    sent = yield self._waits_for
                except BaseException as thrown:
                    error = thrown
                    if task is not None and task.cancelling() > n_before:
                        self._ask_to_end(task, n_before, error)
                ON_LOOP[thread] = (self._lane.name, monotonic(), self._lane.part)
                try:
                    if error is not None:
                        self._waits_for = self._coroutine.throw(error)
                    else:
                        self._waits_for = self._coroutine.send(sent)
                except StopIteration as end:
                    return end.value
                finally:
                    ON_LOOP[thread], error = None, None  # which holds this frame
                if task is not None and task.cancelling() <= n_before:
                    self._disarm()  # it was a limit of its own, which is over
        finally:
            self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask_to_end(self, task: asyncio.Task[Any], n_before: int, error: BaseException) -> None:
        """Bound the time of a cancelled coroutine; abandon it when that is over."""
        if self._is_overdue:
            task.uncancel()
            with suppress(Exception, asyncio.CancelledError, SystemExit):
                self._coroutine.close()
            raise error

        def overdue() -> None:
            self._timer = None
            if task.cancelling() > n_before:  # else it was a limit of its own that ended a part of it
                self._is_overdue = True
                task.cancel()

        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GRACE_S, overdue)


class LimitedLane:
    """Calls on the present event loop that keep their limit themselves."""

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """Return what `function` returns or awaits, told its limit by `CALL_LIMIT_S`. Raises CallError."""
        before = CALL_LIMIT_S.set(timeout_s)
        try:
            return _unwrap(await _caught(_settle(function, args)))
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
    """Episode's view of a shared lane."""

    def __init__(self, lane: ThreadLane) -> None:
        self.call = lane.call

    async def leave(self) -> None:
        """Keep the thread, which the others still need."""


Lane = InlineLane | LimitedLane | ThreadLane | _SharedLane


class CallExecutor:
    """Gives each episode of an environment its lane.

    Args:
        inline: calls are quick and cannot hang.
        shared: the code is not thread-safe.
        limited: calls only wait on the event loop, and keep their limits themselves.
        name: prefix of the threads' names.
        owner: whose code it is: all executors of one owner on one event loop share its thread. None is this executor.
    """

    def __init__(
        self,
        *,
        inline: bool = False,
        shared: bool = True,
        limited: bool = False,
        name: str = "rlhf",
        owner: object | None = None,
    ) -> None:
        self.inline, self.limited, self.name = inline, limited, name
        self._owner, self._is_shared = owner if owner is not None else self, shared and not (inline or limited)
        self._shared: _Held | None = None

    def open(self) -> Lane:
        """Return a lane for one episode, which leaves it at its end."""
        if self.limited:
            return LimitedLane()
        if self.inline:
            return InlineLane(self.name, self._owner)
        if not self._is_shared:
            return ThreadLane(self.name)
        if self._shared is None:
            of = self._owner, asyncio.get_running_loop()
            key = id(of[0]), id(of[1])
            self._shared = _HELD.setdefault(key, _Held(key, of, ThreadLane(self.name)))
            self._shared.n_users += 1
        return _SharedLane(self._shared.lane)

    async def close(self) -> None:
        """End the shared thread if it is unused."""
        held, self._shared = self._shared, None
        if held is None:
            return
        held.n_users -= 1
        if not held.n_users:
            del _HELD[held.key]
            await held.lane.leave()


@dataclass
class _Held:
    """A shared lane, and how many executors use it; it keeps the owner and the event loop whose ids are its key."""

    key: tuple[int, int]
    of: tuple[object, object]
    lane: ThreadLane
    n_users: int = 0


#: Shared lanes that are in use, by owner and event loop.
_HELD: dict[tuple[int, int], _Held] = {}


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

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> _Caught:
        """Run one call in the thread. Raises CallTimeout."""
        future = asyncio.run_coroutine_threadsafe(_caught(_settle(function, args)), self._loop)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise CallTimeout(f"no answer within {timeout_s:g} s") from None

    async def answers(self, within_s: float) -> bool:
        """True if the thread is free to take a call."""
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


_Caught = tuple[Any, CallError | None]


async def _settle(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    value = function(*args)
    return await value if inspect.isawaitable(value) else value


async def _caught(awaited: Awaitable[Any]) -> _Caught:
    """Result or error as a value, so that errors of the called code are distinct from ours.

    The error is put into words where the call ran: its message may take as long as a call.
    """
    try:
        return await awaited, None
    except BaseException as error:
        if is_from_outside(error):
            raise
        failed = CallError(described(error))
        failed.__cause__ = error
        return None, failed


def _unwrap(caught: _Caught) -> Any:
    value, failed = caught
    if failed is not None:
        raise failed
    return value
