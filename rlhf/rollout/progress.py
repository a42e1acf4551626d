"""Progress of a rollout: counts of attempts, reported while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rlhf.rollout.blocking import Watchdog
from rlhf.rollout.policy_client import EpisodeMonitor, EpisodeStatus

_REPORT_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a rollout.

    Attributes:
        n_episodes: attempts to make.
        n_done: attempts that are over, failed ones included.
        n_solved: of these, solved.
        n_failed: attempts in which a part failed for good.
        n_running: attempts now alive.
        n_waiting_environment: of these, waiting for the environment.
        n_waiting_engine: of these, waiting for the engine.
        longest_wait_s: seconds for which one attempt has been waiting for the same thing.
        waits_for: that attempt, and what it waits for.
    """

    n_episodes: int
    n_done: int = 0
    n_solved: int = 0
    n_failed: int = 0
    n_running: int = 0
    n_waiting_environment: int = 0
    n_waiting_engine: int = 0
    longest_wait_s: float = 0.0
    waits_for: str = ""

    def __str__(self) -> str:
        parts = [f"{self.n_done}/{self.n_episodes} episodes"]
        parts += [f"{self.n_failed} failed"] * bool(self.n_failed)
        parts += [f"{self.n_waiting_engine} at the engine"] * bool(self.n_waiting_engine)
        parts += [f"{self.n_waiting_environment} at the environment"] * bool(self.n_waiting_environment)
        parts += [f"{self.longest_wait_s:.0f} s for {self.waits_for}"] * (self.longest_wait_s >= 5)
        return ", ".join(parts)


OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class Board:
    """Counts of a rollout in progress."""

    n_episodes: int
    n_done: int = 0
    n_solved: int = 0
    n_failed: int = 0
    live: dict[str, EpisodeMonitor] = field(default_factory=dict)

    def progress(self) -> Progress:
        """Counts of the present moment."""
        phases = [w.phase for w in self.live.values()]
        name, oldest = min(self.live.items(), key=lambda item: item[1].since, default=("", EpisodeMonitor()))
        return Progress(
            n_episodes=self.n_episodes,
            n_done=self.n_done,
            n_solved=self.n_solved,
            n_failed=self.n_failed,
            n_running=len(phases),
            n_waiting_environment=phases.count(EpisodeStatus.ENVIRONMENT),
            n_waiting_engine=phases.count(EpisodeStatus.ENGINE),
            longest_wait_s=time.monotonic() - oldest.since if name else 0.0,
            waits_for=f"the {oldest.phase} of {name}" if name else "",
        )


@asynccontextmanager
async def reporting(board: Board, on_progress: OnProgress | None) -> AsyncIterator[None]:
    """Report progress several times per second, and what blocks the event loop."""
    if on_progress is None:
        with Watchdog():
            yield
        return

    async def report() -> None:
        while True:
            on_progress(board.progress())
            await asyncio.sleep(_REPORT_EVERY_S)

    reporter = asyncio.create_task(report())
    try:
        with Watchdog():
            yield
    finally:
        reporter.cancel()
        await asyncio.gather(reporter, return_exceptions=True)
    on_progress(board.progress())
