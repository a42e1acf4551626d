"""The environment's side of one attempt: started once, stepped under a limit, closed once on every path."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from dataclasses import replace
from numbers import Real
from typing import Any

from environments.base import CallHung, Environment, StepResult
from rlhf.data import Outcome, Task
from rlhf.errors import EnvError
from rlhf.rollout.limits import Limits
from rlhf.rollout.workers import CallError, CallTimeout, Lane


class Ended(Exception):
    """The episode cannot go on."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(detail)
        self.outcome, self.detail = outcome, detail


class LiveEpisode:
    """An environment's episode that is closed once, also when its start returns after everybody has left.

    Args:
        environment: `start`, `step` and `close` may be plain or async functions.
        task: what to start.
        limits: time limits of the calls.
        lane: where the calls run; left at the end.
    """

    def __init__(self, environment: Environment, task: Task, limits: Limits, lane: Lane) -> None:
        self._environment, self._task, self._limits, self._lane = environment, task, limits, lane
        self._episode: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._late: asyncio.Task[None] | None = None

    async def start(self) -> StepResult:
        """Begin the attempt and return its opening. Raises Ended."""
        opening = await self._call("start", self._begin, timeout_s=self._limits.start_timeout_s)
        missing = [name for name in ("step", "close") if not callable(getattr(self._episode, name, None))]
        if missing:
            got = f"{type(self._episode).__name__} without {' and '.join(missing)}"
            raise Ended(Outcome.ENV_ERROR, f"start: returned {got}; an episode has opening, step and close")
        return checked(opening, "opening")

    async def step(self, action: str) -> StepResult:
        """Do one action. Raises Ended."""
        result = await self._call("step", self._episode.step, action, timeout_s=self._limits.step_timeout_s)
        return checked(result, "step")

    async def close(self, notes: list[str]) -> None:
        """Free the episode and its lane; what goes wrong is noted, for the episode is over."""
        with self._lock:
            self._closed = True
        try:
            close = getattr(self._episode, "close", None)
            if callable(close):
                await self._call("close", close, timeout_s=self._limits.step_timeout_s)
        except Ended as ended:
            notes.append(ended.detail)
        finally:
            await self._lane.leave()

    async def _begin(self) -> Any:
        """Start, in the lane; an episode that comes too late is closed there, as nobody else knows of it."""
        episode: Any = self._environment.start(self._task)
        if inspect.isawaitable(episode):
            episode = await episode
        with self._lock:
            late = self._closed
            if not late:
                self._episode = episode
        if late and callable(getattr(episode, "close", None)):
            # A task of its own: this one has been cancelled and would not get past its next await.
            self._late = asyncio.get_running_loop().create_task(_close(episode))
        return getattr(episode, "opening", None)

    async def _call(self, name: str, function: Any, *args: Any, timeout_s: float) -> Any:
        try:
            return await self._lane.call(function, *args, timeout_s=timeout_s)
        except CallTimeout as error:
            raise Ended(Outcome.TIMEOUT, f"{name}: {error}") from error
        except CallError as error:
            hung = isinstance(error.__cause__, CallHung)
            raise Ended(Outcome.TIMEOUT if hung else Outcome.ENV_ERROR, f"{name}: {error}") from error
        except EnvError as error:
            raise Ended(Outcome.ENV_ERROR, str(error)) from error


async def _close(episode: Any) -> None:
    done = episode.close()
    if inspect.isawaitable(done):
        await done


def checked(result: object, where: str) -> StepResult:
    """Return `result` with plain Python numbers. Raises Ended where an environment answers something else."""
    if not isinstance(result, StepResult):
        got = type(result).__name__
        raise Ended(Outcome.ENV_ERROR, f"{where}: got {got}, expected environments.base.StepResult")
    actions = result.admissible_actions
    problems = {
        "reply is no text": not isinstance(result.reply, str),
        "reward is no finite number": not _is_finite(result.reward),
        "state_key is neither text nor None": not isinstance(result.state_key, str | None),
        "seat is no text": not isinstance(result.seat, str),
        "admissible_actions is no tuple of texts": not isinstance(actions, tuple | list)
        or not all(isinstance(a, str) for a in actions),
    }
    found = [problem for problem, is_so in problems.items() if is_so]
    if found:
        raise Ended(Outcome.ENV_ERROR, f"{where}: {'; '.join(found)}: {str(result)[:300]}")
    return replace(
        result,
        reward=float(result.reward),
        terminated=bool(result.terminated),
        truncated=bool(result.truncated),
        admissible_actions=tuple(actions),
    )


def _is_finite(number: object) -> bool:
    return isinstance(number, Real) and math.isfinite(number)
