"""Watchdog of the event loop: a thread that names the inline part which blocks it.

Inline parts run on the event loop, where nothing can cut them while they compute; whoever waits for anything else waits
for them. The loop cannot say so itself, so a thread looks at what runs on it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Self

#: Seconds without a break from which on an inline part is named.
BLOCKED_S = 1.0

#: By the number of a thread: name of the inline part that computes there, and since when.
ON_LOOP: dict[int, tuple[str, float] | None] = {}

#: By the number of a thread: the call there that was named last, by whichever watchdog looks at it.
_NAMED: dict[int, tuple[str, float]] = {}


def warn(text: str) -> None:
    """Give the caution as a warning of Python's."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)


class Watchdog:
    """Watchdog for inline parts that block the event loop of the present thread.

    Args:
        say: called with the caution, in the watchdog's thread, once for each call that blocks.
        blocked_s: from when on.
    """

    def __init__(self, say: Callable[[str], None] = warn, blocked_s: float = BLOCKED_S) -> None:
        self._say, self._blocked_s, self._watched = say, blocked_s, threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(self._blocked_s / 4):
            running = ON_LOOP.get(self._watched)
            if (
                running is not None
                and running is not _NAMED.get(self._watched)
                and monotonic() - running[1] > self._blocked_s
            ):
                _NAMED[self._watched] = running
                self._say(
                    f"{running[0]} blocks the event loop: it has not come back for {self._blocked_s:g} s, and every "
                    "other attempt waits for it. A part that says `inline` has to answer within milliseconds; "
                    "without that word it runs in a thread, under a time limit"
                )
