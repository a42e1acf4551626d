"""A thread that writes one checkpoint during training."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Writer:
    """Background writer of one job at a time.

    What fails in it is raised here, by the next call of anything but `join`.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Do `work` in a thread, after what was begun before. An interpreter that ends waits for it."""
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(work,), name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a failed write, once; does not wait for a running one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Return when nothing is being written, or raise what has failed."""
        self.join()
        self.check()

    def join(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
