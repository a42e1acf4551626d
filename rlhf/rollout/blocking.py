"""Watchdog of the event loop: a thread that names the inline part which blocks it.

Inline parts run on the event loop, where nothing can cut them while they compute; whoever waits for anything else waits
for them. The loop cannot say so itself, so a thread looks at what runs on it.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Self

from rewards.combinators.parts import with_parts

#: Seconds without a break from which on an inline part is named.
BLOCKED_S = 1.0

#: Packages whose parts are inline because they are quick: one of these stands still where the machine does.
_SHIPPED = ("agents", "environments", "rewards", "rlhf")

#: By the number of a thread: name of the inline part that computes there, since when, and the part.
ON_LOOP: dict[int, tuple[str, float, object] | None] = {}

#: By the number of a thread: the call there that was named last, by whichever watchdog looks at it.
_NAMED: dict[int, tuple[str, float]] = {}


def warn(text: str) -> None:
    """Give the caution as a warning of Python's."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _is_shipped(part: object) -> bool:
    """True if a part, and all that is nested in its keys, comes along with the toolkit."""
    nested = (inner for _, inner in with_parts("", part))
    of = (one if inspect.isroutine(one) else type(one) for one in (part, *nested))
    return all(one.__module__.partition(".")[0] in _SHIPPED for one in of)


class Watchdog:
    """Watchdog for inline parts of the user's own that block the event loop of the present thread.

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
                and running[:2] != _NAMED.get(self._watched)
                and monotonic() - running[1] > self._blocked_s
            ):
                _NAMED[self._watched] = running[:2]
                if _is_shipped(running[2]):
                    continue
                self._say(
                    f"{running[0]} blocks the event loop: it has not come back for {self._blocked_s:g} s, and every "
                    "other attempt waits for it. A part that says `inline` has to answer within milliseconds; "
                    "without that word it runs in a thread, under a time limit"
                )
