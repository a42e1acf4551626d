"""Isolation of engine processes from the run that started them: its signals, and its main module.

Ctrl-C in a terminal, and most batch systems, send a signal to all processes of a group. A run that is told to stop
writes a checkpoint first, and may need its engine until then; an engine that stops looks like one that has crashed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

#: Set, where an engine is started, for its processes.
_VARIABLE = "RLHF_ENGINE_DETACHES"

_SIGNALS = {signal.SIGINT, signal.SIGTERM}

#: Seconds between two looks at whether the run is still there.
_LOOK_S = 1.0


@contextmanager
def detached() -> Iterator[dict[str, str]]:
    """Processes that are started inside get no SIGINT and no SIGTERM until they call `detach`.

    Yields variables that belong into their environment. This process goes on to get both, in another thread.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, name="rlhf-signals", daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield {_VARIABLE: "1"}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that are spawned inside do not import this one's main module.

    They would run a script again that trains at its top level, without `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def detach() -> None:
    """Leave the run's process group, and end whenever the parent process has ended.

    Does nothing in a process that was not started inside `detached`. From then on SIGTERM ends this process again, as
    it does when the engine is closed.
    """
    if os.environ.get(_VARIABLE) != "1":
        return
    with suppress(PermissionError):  # it leads a group already
        os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), name="rlhf-parent", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)
