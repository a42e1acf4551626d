"""Tasks that any policy solves by chance, but for some that it always solves and some that it never does.

Tests of whole runs copy this file out of the repository and name it in a recipe as `./odds.py:Odds`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from environments.base import Properties, StepResult
from rlhf.data import Task
from rlhf.tasks.selection import Selection

#: Called in every step of every episode; for tests that stop a run at a certain one.
ON_STEP: list[Callable[[], object]] = []


@dataclass(frozen=True)
class Odds:
    """Say anything: it is right if its characters add up to an even number. One turn in five is always, or never."""

    n_tasks: int = 10

    properties = Properties(True, True, True, inline=True, oracle=True, splits=("train", "test"), package="odds 1")

    def tasks(self, split: str) -> list[Task]:
        first = {"train": 0, "test": 1000}[split]
        return [Task(f"odds/{i}", seed=i, info={"grade": i % 2}) for i in range(first, first + self.n_tasks)]

    def start(self, task: Task) -> OddsEpisode:
        return OddsEpisode(task.seed)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str]:
        return () if taken else ("right",)


class OddsEpisode:
    """One attempt, of one turn."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.opening = StepResult(f"Say a word, {seed}.", state_key="start", admissible_actions=("left", "right"))

    async def step(self, action: str) -> StepResult:
        for call in ON_STEP:
            call()
        solved = {0: True, 1: False}.get(self.seed % 5, sum(map(ord, action)) % 2 == 0)
        return StepResult("Right." if solved else "Wrong.", float(solved), True, state_key="end", success=solved)

    async def close(self) -> None:
        pass


def nothing(task: Any, trajectory: Any) -> float:
    """A reward that never differs."""
    return 0.0


class EverySecond:
    """Keeps every second group of two rounds."""

    def __call__(self, groups: Sequence[Any], n_tasks: int, n_rounds: int) -> Selection:
        return Selection(tuple(range(1, len(groups), 2)), n_more=n_tasks if n_rounds < 2 else 0)


class Broken:
    """Raises."""

    def __call__(self, groups: Sequence[Any], n_tasks: int, n_rounds: int) -> Selection:
        return Selection(tuple(groups[n_tasks + n_rounds]))
