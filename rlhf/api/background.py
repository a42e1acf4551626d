"""Event loop in a thread of its own, for callers that already run one (notebooks)."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rlhf.build.processes import STOP_REQUEST, StopRequest

T = TypeVar("T")


class Background(Generic[T]):
    """A call in a thread; no signal reaches it, so that it is stopped by `stop`."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._request = work, StopRequest()
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._is_over = threading.Event()  # a thread that is joined when a signal comes looks as if it were over
        context = contextvars.copy_context()
        context.run(STOP_REQUEST.set, self._request)
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
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._is_over.set()


def outside_of_loops(work: Callable[[], T]) -> T:
    """Call `work`, which runs an event loop: here, or in a thread where one is running here."""
    try:
        is_running = bool(asyncio.get_running_loop())
    except RuntimeError:
        is_running = False
    return Background(work).result() if is_running else work()
