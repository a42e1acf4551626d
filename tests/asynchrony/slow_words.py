"""`tests.training.words` with waiting: some tasks take longer than others, by the clock and not by the processor."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

from rlhf.data import Task, Trajectory
from tests.training.words import ON_STEP, Words, WordsEpisode

__all__ = ["ON_STEP", "SlowWords", "varied"]


@dataclass(frozen=True)
class SlowWords(Words):
    """Every tenth task waits `slow_s` in each turn, the others up to `most_s`, drawn from `salt`.

    Those of `until`, seeds, wait for a file that matches a pattern, and write the file `<seed>` of `marks` before; what
    is tried before there is a file `after` does not.
    """

    slow_s: float = 0.0
    most_s: float = 0.0
    salt: int = 0
    until: dict[str, str] = field(default_factory=dict)
    marks: str = ""
    after: str = ""

    def start(self, task: Task) -> WordsEpisode:
        wait = self.slow_s if task.seed % 10 == 2 else self.most_s * random.Random(f"{self.salt} {task.seed}").random()
        made = SlowEpisode(self.words(task.seed), wait)
        if str(task.seed) in self.until and Path(self.after).exists():
            made.mark, made.until = Path(self.marks) / str(task.seed), self.until[str(task.seed)]
        return made


class SlowEpisode(WordsEpisode):
    def __init__(self, words: Any, wait_s: float) -> None:
        super().__init__(words)
        self.wait_s = wait_s

    mark: Path | None = None
    until: str = ""

    async def step(self, action: str) -> Any:
        await asyncio.sleep(self.wait_s)
        if self.mark is not None:
            self.mark.touch()
            while not glob(self.until):
                await asyncio.sleep(0.01)
        return await super().step(action)


def varied(task: Task, trajectory: Trajectory) -> float:
    """A score that differs between attempts, whatever the policy knows: how long its first word is."""
    return len(trajectory.turns[0].action.text) / 8 if trajectory.turns else 0.0
