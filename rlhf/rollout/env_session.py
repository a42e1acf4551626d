"""Environment session of one attempt: started once, stepped under a time limit, closed once on every path."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from environments.base import Environment, EpisodeCapabilities, StepResult, TerminalEnvError
from environments.validation import check_episode, checked_result
from rlhf.data import Outcome, Task
from rlhf.errors import EnvError
from rlhf.rollout.executors import CallError, CallTimeout, Lane
from rlhf.rollout.limits import Limits


class EpisodeEnded(Exception):
    """The episode cannot go on."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(detail)
        self.outcome, self.detail = outcome, detail


class EnvSession:
    """An environment's episode that is closed once, also when its start returns after everybody has left.

    Args:
        environment: `start`, `step` and `close` may be plain or async functions.
        task: what to start.
        limits: time limits of the calls.
        lane: where the calls run; left at the end.
    """

    def __init__(self, environment: Environment, task: Task, limits: Limits, lane: Lane) -> None:
        self._environment, self._task, self._limits, self._lane = environment, task, limits, lane
        self._step: Callable[[str], Any] | None = None
        self._close: Callable[[], Any] | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._late: asyncio.Task[None] | None = None

    async def start(self) -> StepResult:
        """Begin the attempt and return its opening. Raises EpisodeEnded."""
        opening = await self._call("start", self._begin, timeout_s=self._limits.start_timeout_s)
        return checked(opening, "opening", self._environment.start)

    async def step(self, action: str) -> StepResult:
        """Do one action. Raises EpisodeEnded."""
        assert self._step is not None
        result = await self._call("step", self._step, action, timeout_s=self._limits.step_timeout_s)
        return checked(result, "step", self._step)

    async def close(self, notes: list[str]) -> None:
        """Free the episode and its lane; what goes wrong is noted, for the episode is over."""
        with self._lock:
            self._closed, close = True, self._close
        try:
            if close is not None:
                await self._call("close", close, timeout_s=self._limits.step_timeout_s)
        except EpisodeEnded as ended:
            notes.append(ended.detail)
        finally:
            await self._lane.leave()

    async def _begin(self) -> Any:
        """Start the episode in its lane; one that starts too late is closed there."""
        episode: Any = self._environment.start(self._task)
        if inspect.isawaitable(episode):
            episode = await episode
        step, close = (getattr(episode, name, None) for name in ("step", "close"))
        with self._lock:
            late = self._closed
            if not late:
                self._step, self._close = step, close if callable(close) else None
        if late and callable(close):
            # A task of its own: this one has been cancelled and would not get past its next await.
            self._late = asyncio.get_running_loop().create_task(_close(close))
        check_episode(episode, self._environment.start)
        return EpisodeCapabilities(episode).opening

    async def _call(self, name: str, function: Any, *args: Any, timeout_s: float) -> Any:
        try:
            return await self._lane.call(function, *args, timeout_s=timeout_s)
        except CallTimeout as error:
            raise EpisodeEnded(Outcome.TIMEOUT, f"{name}: {error}") from error
        except CallError as error:
            cause = error.__cause__
            outcome = cause.outcome if isinstance(cause, TerminalEnvError) else Outcome.ENV_ERROR
            is_told = isinstance(cause, EnvError) and cause.where.startswith(name)
            raise EpisodeEnded(outcome, str(error) if is_told else f"{name}: {error}") from error
        except EnvError as error:
            raise EpisodeEnded(Outcome.ENV_ERROR, str(error)) from error


async def _close(close: Callable[[], Any]) -> None:
    done = close()
    if inspect.isawaitable(done):
        await done


def checked(result: object, where: str, by: object = None) -> StepResult:
    """Return `result` with plain Python types. Raises EpisodeEnded where an environment answers something else."""
    try:
        return checked_result(result, where, by)
    except EnvError as error:
        raise EpisodeEnded(Outcome.ENV_ERROR, str(error)) from error
