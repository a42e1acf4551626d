"""An environment that goes wrong to order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from environments.base import StepResult
from rlhf.data import Task
from tests.rollout.small_world import THREADS, Corridor, CorridorEpisode


@dataclass(frozen=True)
class Troubled(Corridor):
    """A corridor where `trouble(self)` happens in step `at` of the attempts at tasks whose seed is in `seeds`."""

    trouble: Callable[[Troubled], Any] = lambda environment: None
    at: int = 1
    in_start: bool = False
    seeds: frozenset[int] = frozenset(range(8))
    released: threading.Event = field(default_factory=threading.Event)

    def start(self, task: Task) -> TroubledEpisode:
        if self.in_start and task.seed in self.seeds:
            self.trouble(self)
        return TroubledEpisode(self, task)


class TroubledEpisode(CorridorEpisode):
    environment: Troubled

    def __init__(self, environment: Troubled, task: Task) -> None:
        super().__init__(environment, task)
        self.n_steps = 0

    async def step(self, action: str) -> Any:
        self.n_steps += 1
        environment = self.environment
        if not environment.in_start and self.n_steps - 1 == environment.at and self.task.seed in environment.seeds:
            odd = environment.trouble(environment)
            odd = await odd if asyncio.iscoroutine(odd) else odd
            if odd is not None:
                return odd
        return await super().step(action)


class Synchronous:
    """A corridor of plain functions, without a word of asyncio."""

    properties = THREADS

    def __init__(self) -> None:
        self.n_closed = 0
        self.threads: set[int] = set()

    def tasks(self, split: str) -> list[Task]:
        return [Task("plain/0")]

    def start(self, task: Task) -> Any:
        outer = self

        class Episode:
            opening = StepResult("Room 0.")

            def step(self, action: str) -> StepResult:
                outer.threads.add(threading.get_ident())
                return StepResult("Out.", 1.0, terminated=True, success=True)

            def close(self) -> None:
                outer.threads.add(threading.get_ident())
                outer.n_closed += 1

        outer.threads.add(threading.get_ident())
        return Episode()


def raises(environment: Troubled) -> None:
    raise ValueError("the door is stuck")


def blocks(environment: Troubled) -> None:
    environment.released.wait(30)


async def waits(environment: Troubled) -> None:
    await asyncio.sleep(30)


def is_slow(environment: Troubled) -> None:
    time.sleep(0.05)
