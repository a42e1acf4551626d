"""Worlds and an agent in which what a credit or a loss is about really acts; small enough to be learnt in seconds.

Tests of whole runs copy this file out of the repository, and name its parts in a recipe as `./errands.py:Errands`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agents.contrib.critic import ACCEPT, CRITIC, REVISE, ActorCritic
from agents.memory.base import DemonstrationInputs
from environments.base import StepResult
from rlhf.data import Task
from tests.training.words import WORDS, Words, WordsEpisode

#: What the critic of `Doubter` says in demonstrations.
LUCK = random.Random(0)


@dataclass(frozen=True)
class Errands(Words):
    """All words are shown at first and never again: who acts later has only what a planner makes of them.

    Demonstrations name a random word as the subgoal in a share of their turns.
    """

    random_subgoals: float = 0.5

    def start(self, task: Task) -> WordsEpisode:
        return Errand(self.words(task.seed))

    def subgoal(self, task: Task, taken: Sequence[str]) -> str:
        rng = random.Random(f"{task.seed}/{len(taken)}")
        word = rng.choice(WORDS)
        return word if rng.random() < self.random_subgoals else self.words(task.seed)[len(taken)]


class Errand(WordsEpisode):
    """One attempt at an errand."""

    def told(self, reward: float = 0.0) -> StepResult:
        reply = "Go on." if self.n_said else f"Say {', then '.join(self.words)}."
        return replace(super().told(reward), reply=reply)


@dataclass(frozen=True)
class Scales(Words):
    """Tasks of two types, with rewards that differ by `scale`."""

    scale: float = 100.0

    def tasks(self, split: str) -> list[Task]:
        return [replace(task, id=f"words/{task.seed % 2}/{task.seed}") for task in super().tasks(split)]

    def start(self, task: Task) -> WordsEpisode:
        return Scaled(self.words(task.seed), self.scale if task.seed % 2 else 1.0)


class Scaled(WordsEpisode):
    """One attempt with rewards on a scale."""

    def __init__(self, words: Sequence[str], scale: float) -> None:
        super().__init__(words)
        self.scale = scale

    async def step(self, action: str) -> StepResult:
        result: StepResult = await super().step(action)
        return replace(result, reward=self.scale * result.reward)


@dataclass(frozen=True)
class Slow(Words):
    """Every second task takes its time in each turn."""

    seconds: float = 0.05

    def start(self, task: Task) -> WordsEpisode:
        return Sluggish(self.words(task.seed), self.seconds * (task.seed % 2))


class Sluggish(WordsEpisode):
    """One attempt that is waited for."""

    def __init__(self, words: Sequence[str], seconds: float) -> None:
        super().__init__(words)
        self.seconds = seconds

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self.seconds)
        result: StepResult = await super().step(action)
        return result


class Doubter(ActorCritic):
    """An actor and a critic; in demonstrations the critic accepts or sends back by chance."""

    def write(self, shown: DemonstrationInputs) -> str:
        """Write the reply that a demonstration gives."""
        return LUCK.choice((ACCEPT, REVISE)) if shown.role == CRITIC else super().write(shown)
