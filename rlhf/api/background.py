"""Event loop in a thread of its own, for callers that already run one (notebooks)."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from rlhf.build.processes import STOP_REQUEST, StopRequest

T = TypeVar("T")


#: Calls that SIGTERM stops; those of a process that is forked run in its parent.
_STOPPED: list[Background[Any]] = []
os.register_at_fork(after_in_child=_STOPPED.clear)


class Background(Generic[T]):
    """A call in a thread, stopped by `stop`; and by SIGTERM where the main thread makes it and has no handler."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._request = work, StopRequest()
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._is_over = threading.Event()  # a thread that is joined when a signal comes looks as if it were over
        context = contextvars.copy_context()
        context.run(STOP_REQUEST.set, self._request)
        self._hear_term()
        threading.Thread(target=context.run, args=(self._run,), name="rlhf", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """True until the call has returned."""
        return not self._is_over.is_set()

    @property
    def is_stopped(self) -> bool:
        """True if its end was asked for."""
        return self._request.is_made

    def stop(self) -> None:
        """Ask for the end; what runs on its event loop is cancelled as by Ctrl-C."""
        self._request.make()

    def result(self) -> T:
        """Wait, and return or raise what the call did; KeyboardInterrupt meanwhile stops it first."""
        try:
            # Not for ever: a signal that another thread was handed is heard once this one wakes.
            while not self._is_over.wait(0.2):
                pass
        except KeyboardInterrupt:
            self.stop()
            self._is_over.wait()
        self._forget_term()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _hear_term(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _stop_all):
            _STOPPED[:] = [*(one for one in _STOPPED if one.is_running), self]
            signal.signal(signal.SIGTERM, _stop_all)

    def _forget_term(self) -> None:
        """Restore what SIGTERM does once no call is left to stop; the main thread alone may."""
        if threading.current_thread() is not threading.main_thread():
            return
        _STOPPED[:] = [one for one in _STOPPED if one.is_running]
        if not _STOPPED and signal.getsignal(signal.SIGTERM) is _stop_all:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _run(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._is_over.set()


def _stop_all(number: int, frame: FrameType | None) -> None:
    """Stop all calls on SIGTERM; without any the signal does what it did before."""
    running = [one for one in _STOPPED if one.is_running]
    if not running:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for one in running:
        if not one.is_stopped:  # a second request would cancel the checkpoint that the first one writes
            one.stop()


def outside_of_loops(work: Callable[[], T]) -> T:
    """Call `work`, which runs an event loop: here, or in a thread where one is running here."""
    try:
        is_running = bool(asyncio.get_running_loop())
    except RuntimeError:
        is_running = False
    return Background(work).result() if is_running else work()
