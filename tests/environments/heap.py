"""Take one or two of a heap, by turns; whoever takes the last wins. A game for two that a tiny model learns in seconds.

Tests of whole runs copy this file out of the repository and name it in a recipe as `./heap.py:Heap`. With four things
the first player wins by taking one, and whoever is left three loses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from environments.base import Properties, StepResult
from rlhf.data import Task

SEATS = ("first", "second")
ACTIONS = ("one", "two")
FIRST_SEED = {"train": 0, "dev": 1000, "test": 2000}

#: Called in every step of every episode; see `tests.training.words.on_every_step`.
ON_STEP: list[Callable[[], object]] = []


@dataclass(frozen=True)
class Heap:
    """The other seat is played too, or by chance; then it begins in every second task."""

    n_things: int = 4
    opponent: str = "self"
    n_tasks: int = 128

    @property
    def properties(self) -> Properties:
        seats = SEATS if self.opponent == "self" else ()
        splits = tuple(FIRST_SEED)
        return Properties(True, True, True, inline=True, oracle=True, splits=splits, package="heap 1", seats=seats)

    def tasks(self, split: str) -> list[Task]:
        seeds = range(FIRST_SEED[split], FIRST_SEED[split] + self.n_tasks)
        return [Task(f"heap/{seed}", seed=seed) for seed in seeds]

    def start(self, task: Task) -> HeapEpisode:
        return HeapEpisode(self, task.seed)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """The last ones, where they can be taken; else chance decides."""
        left = self.n_things - sum(ACTIONS.index(word) + 1 for word in taken if word in ACTIONS)
        return [ACTIONS[left - 1] if left in (1, 2) else random.Random(f"{task.seed}/{left}").choice(ACTIONS)]


class HeapEpisode:
    """One game. Taking more than there is, or saying anything else, loses."""

    def __init__(self, settings: Heap, seed: int) -> None:
        self.settings, self.left, self.turn = settings, settings.n_things, 0
        self.luck = random.Random(seed)
        self.own = None if settings.opponent == "self" else seed % 2
        if self.own == 1:
            self.move(self.luck.choice(ACTIONS))
        self.opening = self.result(0.0)

    async def step(self, action: str) -> StepResult:
        for call in ON_STEP:
            call()
        mover = self.turn
        earned = self.move(action)
        if self.own is not None and self.left > 0:
            earned = -self.move(self.luck.choice(ACTIONS[: self.left]))
        won = (earned > 0) == (mover == 0 or self.own is not None)
        return self.result(earned, won if self.left <= 0 else None, valid=action in ACTIONS)

    def move(self, action: str) -> float:
        """What it earns who moves."""
        n = ACTIONS.index(action) + 1 if action in ACTIONS else self.left + 1
        self.left -= n
        self.turn = 1 - self.turn
        return 0.0 if self.left > 0 else 1.0 if self.left == 0 else -1.0

    def result(self, reward: float, won: bool | None = None, valid: bool = True) -> StepResult:
        over = self.left <= 0
        return StepResult(
            "over" if over else f"{self.left} left",
            reward=reward,
            terminated=over,
            state_key=f"{self.left}/{self.turn}",
            success=won,
            valid=valid,
            admissible_actions=ACTIONS,
            seat=SEATS[self.turn] if self.own is None else "",
        )

    async def close(self) -> None: ...
