"""Worker process as its parent sees it: calls, their limits, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from environments.base import CALL_LIMIT_S, CallTimeoutError
from environments.workers.process import Bounds, Process
from environments.workers.protocol import READY, Frames, NotAFrame, decoded, frame
from rlhf.errors import EnvError, RlhfError

#: How long a call that nobody waits for any more may take, before its worker counts as hung.
GRACE_S = 0.5
#: How long a process may take to start, import and load, which does not count for the first call.
READY_S = 120.0

#: How often answers are looked for without having been rung for: a worker that is at work on a slow call has not.
_LOOK_S = 0.005

_READ_BYTES = 1 << 16
_numbers = itertools.count(1)


class WorkerLost(EnvError):
    """The process of an episode is gone."""


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    name: str
    future: asyncio.Future[Any]
    limit_s: float
    began: float = 0.0
    abandoned: bool = False


class Worker:
    """Process that serves episodes; used by one event loop at a time, or by none, with `ask`.

    Args:
        job: the packed environment.
        bounds: of its calls.
        on_lost: called once when it has ended unasked.
    """

    def __init__(self, job: bytes, bounds: Bounds, on_lost: Callable[[Worker], None] = lambda worker: None) -> None:
        self.bounds, self._on_lost = bounds, on_lost
        self.n_begun = self.n_live = 0
        self.memory_mb = 0.0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.lost: str | None = None
        self._process = Process(bounds)
        self._frames, self._calls = Frames(), deque[_Call]()
        self._out, self._is_flushing, self._is_writing = bytearray(frame(0, job)), False, False
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._is_ready, self._is_listening = False, False

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.popen.pid

    @property
    def alive(self) -> bool:
        """True if it takes calls."""
        return self.lost is None and not self._process.closed and self._process.popen.poll() is None

    # --- on an event loop ----------------------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to a loop."""
        self.loop = loop
        loop.add_reader(self._process.bell, self._rung)
        if self._calls:  # one that was abandoned and has not ended
            self._begin_next()

    def detach(self) -> None:
        """Belong to none."""
        loop, self.loop = self.loop, None
        for timer in (self._timer, self._look):
            if timer is not None:
                timer.cancel()
        self._timer = self._look = None
        if loop is not None and not loop.is_closed() and not self._process.closed:
            loop.remove_reader(self._process.bell)
            loop.remove_reader(self._process.channel)
            loop.remove_writer(self._process.channel)
            self._is_writing = self._is_listening = False

    async def call(self, name: str, *arguments: Any) -> Any:
        """Return what the environment returns.

        Raises:
            Raised: the environment raised.
            CallTimeoutError: this call took too long; the process is ended.
            WorkerLost: the process ended, or another call of it took too long.
        """
        if self.lost is not None:
            raise WorkerLost("the worker process of this episode has exited", where=f"worker {self.pid}", got=self.lost)
        loop = self._here()
        call = _Call(next(_numbers), name, loop.create_future(), self._limit_s())
        self._out += frame(call.number, (name, *arguments))  # before it waits: not everything can be pickled
        self._calls.append(call)
        if len(self._calls) == 1:
            self._begin_next()
            self._flush()
        elif self._look is None:
            self._look = loop.call_later(_LOOK_S, self._look_for_answers)
        if len(self._calls) > 1 and not self._is_flushing and not self._is_writing:
            # While the process is at work, calls of several episodes within one turn of the loop go in one piece.
            self._is_flushing = True
            loop.call_soon(self._flush)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    def _here(self) -> asyncio.AbstractEventLoop:
        """Running loop; an episode may outlive its first one, and never has two at a time."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            if self.loop is not None and not self.loop.is_closed():
                raise EnvError("an episode can be used on one event loop at a time", where=f"worker {self.pid}")
            self._calls.clear()
            self._timer = self._look = None
            self._is_flushing = self._is_writing = self._is_listening = False
            self.attach(loop)
        return loop

    def _flush(self) -> None:
        self._is_flushing = False
        if self.loop is None or self._process.closed:
            return
        try:
            n = self._process.channel.send(self._out)
            del self._out[:n]
        except BlockingIOError:
            pass
        except OSError:
            self._ended()
            return
        if self._out and not self._is_writing:
            self._is_writing = True
            self.loop.add_writer(self._process.channel, self._flush)
        elif not self._out and self._is_writing:
            self._is_writing = False
            self.loop.remove_writer(self._process.channel)

    def _rung(self) -> None:
        """The worker has rung, or ended; what it answered before is there in both cases."""
        try:
            is_over = not os.read(self._process.bell, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            is_over = False
        self._read()
        if is_over:
            self._ended()

    def _look_for_answers(self) -> None:
        """Read pending answers without a notification, while calls wait behind another one."""
        self._look = None
        self._read()
        if len(self._calls) > 1 and self.loop is not None:
            self._look = self.loop.call_later(_LOOK_S, self._look_for_answers)

    def _read(self) -> None:
        """Take all answers that are there. The end of the channel is that of the process."""
        while self.loop is not None and not self._process.closed:
            try:
                data = self._process.channel.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._ended()
                return
            try:
                for number, payload in self._frames.feed(data):
                    self._answer(number, payload)
            except NotAFrame as error:
                self.end(f"it answered what is no answer: {error}")
                return
            self._listen(bool(self._frames))
            if len(data) < _READ_BYTES:
                return

    def _listen(self, needed: bool) -> None:
        """Watch the channel itself until the rest of a long answer has come."""
        if needed == self._is_listening or self.loop is None:
            return
        self._is_listening = needed
        if needed:
            self.loop.add_reader(self._process.channel, self._read)
        else:
            self.loop.remove_reader(self._process.channel)

    def _answer(self, number: int, payload: bytes) -> None:
        if number == READY and not self._is_ready:
            self._is_ready = True
            self._begin_next()
            return
        call = self._calls.popleft() if self._calls and self._calls[0].number == number else None
        if call is None:
            raise NotAFrame(f"an answer to call {number}, which no caller waits for")
        self._begin_next()
        if call.future.done():
            return
        try:
            call.future.set_result(self._taken(call.name, payload))
        except RlhfError as error:
            call.future.set_exception(error)
        except NotAFrame as error:
            call.future.set_exception(_unreadable(error))

    def _taken(self, name: str, payload: bytes) -> Any:
        value = decoded(payload)
        if name == "close" and isinstance(value, float):
            self.memory_mb = value
        return value

    def _limit_s(self) -> float:
        return min(CALL_LIMIT_S.get() or self.bounds.call_timeout_s, self.bounds.call_timeout_s)

    def _begin_next(self) -> None:
        """Start the clock of the call that the process now works on."""
        if self._calls and self.loop is not None:
            self._calls[0].began = time.monotonic()
            if self._timer is None or self._timer.when() > self.loop.time() + self._allowed_s(self._calls[0]):
                self._set_timer()

    def _allowed_s(self, call: _Call) -> float:
        if not self._is_ready:
            return READY_S
        return min(GRACE_S, call.limit_s) if call.abandoned else call.limit_s

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._calls and self.loop is not None:
            left = self._allowed_s(self._calls[0]) - (time.monotonic() - self._calls[0].began)
            self._timer = self.loop.call_later(max(0.0, left), self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._timer = None
        self._read()  # an answer that came without ringing moves the clock to the next call
        if not self._calls:
            return
        call = self._calls[0]
        if time.monotonic() - call.began < self._allowed_s(call):
            self._set_timer()
            return
        took = f"no answer to `{call.name}` within {self._allowed_s(call):g} s"
        if not call.future.done():
            call.future.set_exception(self._hung(took))
        self.end(f"another call of this process hung: {took}")

    def _abandon(self, call: _Call) -> None:
        """Abandon this call: if it does not end soon, the process counts as hung."""
        if self.lost is None and call in self._calls:
            call.abandoned = True
            if call is self._calls[0]:
                self._set_timer()

    def _ended(self) -> None:
        """Tell everybody that the process has ended by itself."""
        self.end(None)

    # --- without a loop ------------------------------------------------------------------------------------------

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return what the environment returns, waiting for it here.

        Raises:
            Raised: the environment raised.
            CallTimeoutError: it took too long; the process is ended.
            WorkerLost: the process ended.
        """
        assert self.loop is None
        number, limit_s = next(_numbers), self._limit_s()
        self._out += frame(number, (name, *arguments))
        try:
            payload = self._exchanged(number, limit_s)
        except TimeoutError:
            took = f"no answer to `{name}` within {limit_s if self._is_ready else READY_S:g} s"
            self.end(took)
            raise self._hung(took) from None
        except NotAFrame as error:
            self.end(f"it answered what is no answer: {error}")
            raise self._gone(f"while it worked on `{name}`") from None
        except OSError:
            self.end(None)
            raise self._gone(f"while it worked on `{name}`") from None
        try:
            return decoded(payload)
        except NotAFrame as error:
            raise _unreadable(error) from None

    def _exchanged(self, number: int, limit_s: float) -> bytes:
        """Send pending data, and wait for the answer of a call. Raises TimeoutError, OSError, NotAFrame."""
        channel, deadline = self._process.channel, time.monotonic() + (limit_s if self._is_ready else READY_S)
        try:
            channel.settimeout(max(0.001, deadline - time.monotonic()))
            channel.sendall(self._out)
            self._out.clear()
            while True:
                channel.settimeout(max(0.001, deadline - time.monotonic()))
                data = channel.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError
                for answered, payload in self._frames.feed(data):
                    if answered == READY and not self._is_ready:
                        self._is_ready, deadline = True, time.monotonic() + limit_s
                    elif answered == number:
                        return payload
                    else:
                        raise NotAFrame(f"an answer to call {answered}, which no caller waits for")
        finally:
            if not self._process.closed:
                channel.setblocking(False)

    # --- the end -------------------------------------------------------------------------------------------------

    def end(self, why: str | None) -> None:
        """Kill the process with its children, and fail the calls that wait.

        Args:
            why: what to tell them; None asks how the process ended.
        """
        if self.lost is not None:
            return
        self.detach()
        how = self._process.kill(ended_itself=why is None)
        self.lost = why or how
        waiting, self._calls = list(self._calls), deque()
        for i, call in enumerate(waiting):
            if not call.future.done():
                what = f"while it worked on `{call.name}`" if i == 0 else "while this call waited for another one"
                call.future.set_exception(self._gone(what))
        self._on_lost(self)

    def stop(self) -> None:
        """Ask the process to close what it has open and exit; `is_over` says whether it has."""
        self.detach()
        self._process.note_descendants()
        self.lost = self.lost or "it was stopped"
        with contextlib.suppress(OSError):
            self._process.channel.shutdown(socket.SHUT_RDWR)

    def is_over(self, *, wait_s: float = 0.0) -> bool:
        """True if a released process has ended; frees its resources here. After `wait_s` it is killed."""
        if self._process.closed:
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.popen.wait(wait_s)
        if self._process.popen.poll() is None and not wait_s:
            return False
        self._process.kill()
        return True

    def _hung(self, took: str) -> CallTimeoutError:
        return CallTimeoutError(
            "a call hung, and its worker process was ended",
            where=f"worker {self.pid}",
            got=took,
            hint="raise environment.call_timeout_s if the call needs that long; `rlhf check environment`",
        )

    def _gone(self, when: str) -> WorkerLost:
        return WorkerLost(
            f"the worker process of this episode ended {when}",
            where=f"worker {self.pid}",
            got=self.lost or "",
            hint="a new worker replaces it; `rlhf check environment` plays the environment alone",
        )


def _unreadable(error: NotAFrame) -> EnvError:
    return EnvError("the worker's answer cannot be read here", where="environment", got=str(error))
