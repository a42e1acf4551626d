"""Say the words that are shown, one per turn: an environment that a tiny model learns in seconds.

Tests of whole runs copy this file out of the repository and name it in a recipe as `./words.py:Words`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.base import Properties, StepResult
from rlhf.data import Task
from rlhf.recipe import load

WORDS = ("red", "green", "blue", "white")
FIRST_SEED = {"train": 0, "dev": 1000, "test": 2000}

#: Called in every step of every episode; for tests that stop a run at a certain one.
ON_STEP: list[Callable[[], object]] = []


@dataclass(frozen=True)
class Words:
    """`n_turns` words are shown one after the other; the episode is lost with the first wrong answer."""

    n_turns: int = 2
    n_tasks: int = 128

    @property
    def properties(self) -> Properties:
        return Properties(
            True, True, True, inline=True, oracle=True, splits=tuple(FIRST_SEED), package="words 1", repeats=True
        )

    def tasks(self, split: str) -> list[Task]:
        seeds = range(FIRST_SEED[split], FIRST_SEED[split] + self.n_tasks)
        return [Task(f"words/{seed}", seed=seed, reference=" ".join(self.words(seed))) for seed in seeds]

    def start(self, task: Task) -> WordsEpisode:
        return WordsEpisode(self.words(task.seed))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        words = self.words(task.seed)
        return words[len(taken) :] if list(taken) == words[: len(taken)] else None

    def words(self, seed: int) -> list[str]:
        return random.Random(seed).choices(WORDS, k=self.n_turns)


class WordsEpisode:
    """One attempt; the state is what is left to say."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.n_said = words, 0
        self.opening = self.told()

    async def step(self, action: str) -> Any:
        for call in ON_STEP:
            call()
        right = action == self.words[self.n_said]
        self.n_said += 1
        if right and self.n_said < len(self.words):
            return self.told(reward=1.0)
        return StepResult("Right." if right else "Wrong.", float(right), True, success=right, valid=action in WORDS)

    async def close(self) -> None:
        pass

    def told(self, reward: float = 0.0) -> StepResult:
        left = self.words[self.n_said :]
        return StepResult(f"Say {left[0]}.", reward, state_key=" ".join(left), admissible_actions=tuple(sorted(WORDS)))


@contextmanager
def on_every_step(recipe: Path, call: Callable[[], object]) -> Iterator[None]:
    """Let the environment of `recipe`, a copy of this file, make a call in each step."""
    calls: list[Callable[[], object]] = sys.modules[type(load(recipe).environment).__module__].ON_STEP
    calls.append(call)
    try:
        yield
    finally:
        calls.remove(call)
