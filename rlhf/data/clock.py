"""Time limit of a call; paused while the call waits for a shared resource."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from time import monotonic


class Clock:
    """A stop-watch with a limit.

    Args:
        limit_s: seconds; None is without a limit.
        begun: `time.monotonic()` at the start; None is now.
    """

    def __init__(self, limit_s: float | None, begun: float | None = None) -> None:
        self.limit_s = limit_s
        self._begun = monotonic() if begun is None else begun
        self._stood_s, self._n_waiting, self._since = 0.0, 0, 0.0
        self._timeout: asyncio.Timeout | None = None

    def used_s(self) -> float:
        """Seconds that have gone by, those of waiting left out."""
        now = self._since if self._n_waiting else monotonic()
        return now - self._begun - self._stood_s

    def left_s(self, share: float = 1.0) -> float | None:
        """Seconds until a share of the limit is reached, at least 0; None without a limit."""
        return None if self.limit_s is None else max(0.0, share * self.limit_s - self.used_s())

    def is_over(self) -> bool:
        """True if the limit is exceeded."""
        return self.limit_s is not None and self.used_s() > self.limit_s

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End what is awaited inside when the limit is reached. Raises TimeoutError."""
        async with asyncio.timeout(self._delay_s()) as self._timeout:
            try:
                yield
            finally:
                self._timeout = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Pause the clock while at least one caller is inside."""
        if not self._n_waiting:
            self._since = monotonic()
        self._n_waiting += 1
        self._reset()
        try:
            yield
        finally:
            self._n_waiting -= 1
            if not self._n_waiting:
                self._stood_s += monotonic() - self._since
            self._reset()

    def _delay_s(self) -> float | None:
        return None if self.limit_s is None or self._n_waiting else self.limit_s - self.used_s()

    def _reset(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            delay_s = self._delay_s()
            when = None if delay_s is None else asyncio.get_running_loop().time() + delay_s
            self._timeout.reschedule(when)


#: The clock of the present call of a reward.
CALL_CLOCK: ContextVar[Clock | None] = ContextVar("CALL_CLOCK", default=None)


@contextmanager
def waiting_for_turn() -> Iterator[None]:
    """Let the clock of the present call, if it has one, stand."""
    clock = CALL_CLOCK.get()
    if clock is None:
        yield
    else:
        with clock.waiting():
            yield
