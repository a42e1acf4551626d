"""`tests.training.words` with waiting: some tasks take longer than others, by the clock and not by the processor."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from rlhf.data import Task, Trajectory
from tests.training.words import ON_STEP, Words, WordsEpisode

__all__ = ["ON_STEP", "SlowWords", "varied"]


@dataclass(frozen=True)
class SlowWords(Words):
    """Every tenth task waits `slow_s` in each turn, the others up to `most_s`, drawn from `salt`."""

    slow_s: float = 0.0
    most_s: float = 0.0
    salt: int = 0

    def start(self, task: Task) -> WordsEpisode:
        wait = self.slow_s if task.seed % 10 == 2 else self.most_s * random.Random(f"{self.salt} {task.seed}").random()
        return SlowEpisode(self.words(task.seed), wait)


class SlowEpisode(WordsEpisode):
    def __init__(self, words: Any, wait_s: float) -> None:
        super().__init__(words)
        self.wait_s = wait_s

    async def step(self, action: str) -> Any:
        await asyncio.sleep(self.wait_s)
        return await super().step(action)


def varied(task: Task, trajectory: Trajectory) -> float:
    """A score that differs between attempts, whatever the policy knows: how long its first word is."""
    return len(trajectory.turns[0].action.text) / 8 if trajectory.turns else 0.0
