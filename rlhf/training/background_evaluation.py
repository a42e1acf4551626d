"""Background evaluation: on servers of its own, while training continues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlhf.processes import current


@dataclass(frozen=True)
class PendingEvaluation:
    """An evaluation that is being played.

    Attributes:
        step: after which its policy was delivered.
        version: of that policy.
        task: that waits for its end, in the first process.
    """

    step: int
    version: int
    task: asyncio.Task[Any] | None


@dataclass(frozen=True)
class FinishedEvaluation:
    """End of an evaluation: what it found, or why there is nothing."""

    result: Any
    fault: str = ""


class BackgroundEvaluation:
    """Plays one evaluation at a time, on servers that nothing else samples from.

    Args:
        deliver: brings the present policy to the servers, with proof; all processes call it together.
        play: attempts the validation tasks there, and returns an `EvaluationResult`; None but in the first process.

    Attributes:
        begun: what is played now.
    """

    def __init__(self, deliver: Callable[[], Awaitable[None]], play: Callable[[], Awaitable[Any]] | None) -> None:
        self._deliver, self._play = deliver, play
        self.begun: PendingEvaluation | None = None

    async def begin(self, step: int, version: int) -> None:
        """Deliver the policy, which is that of `step`, and have it played; the one before has ended."""
        await self._deliver()
        task = asyncio.create_task(_ended(self._play), name=f"evaluation of step {step}") if self._play else None
        self.begun = PendingEvaluation(step, version, task)

    async def ended(self, wait_s: float) -> FinishedEvaluation | None:
        """Return how the one that is played ended, in all processes; None where it has not within `wait_s`."""
        assert self.begun is not None
        task, found = self.begun.task, None
        if task is not None:
            done, _ = await asyncio.wait([task], timeout=wait_s)
            found = task.result() if done else None
        found = await asyncio.to_thread(current().from_main, found, "an evaluation")
        if found is not None:
            self.begun = None
        return found

    async def close(self) -> None:
        """Give up what is played."""
        if self.begun is not None and self.begun.task is not None:
            self.begun.task.cancel()
            await asyncio.wait([self.begun.task])
        self.begun = None


async def _ended(play: Callable[[], Awaitable[Any]]) -> FinishedEvaluation:
    """Play; a failed evaluation does not stop training."""
    try:
        return FinishedEvaluation(await play())
    except Exception as error:
        return FinishedEvaluation(None, f"{type(error).__name__}: {error}".strip().splitlines()[0])
