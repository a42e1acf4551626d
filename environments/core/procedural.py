"""What worlds drawn by a seed have in common: splits of different instances, and answers with feedback.

A task is a number; the instance it stands for is drawn from that number alone. Which split an instance belongs to is
told by a hash of what is told of it: half of all are of `train`, a quarter each of `dev` and of `test`. A seed
of a split draws until it meets an instance of that split, so none is ever in two, whatever the sizes; within a split
an instance is listed once.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from itertools import count
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Episode, StepResult, after_end
from environments.core.seed_splits import FIRST_SEED, Seeded
from environments.core.seed_splits import split_of as split_of_seed
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

SplitSize = Annotated[int, Field(ge=1, le=1_000_000)]

#: Draws of one seed, and seeds in a row that bring nothing new, after which there is taken to be no more.
_MOST_DRAWS, _PATIENCE = 2_000, 200


def digest(content: str, size: int = 4) -> str:
    """A short name of `content`, the same in every process: `size` bytes of its hash in hexadecimal."""
    return hashlib.blake2b(content.encode(), digest_size=size).hexdigest()


def split_of(content: str) -> str:
    """The split that an instance with this content belongs to: half `train`, a quarter `dev`, a quarter `test`."""
    number = int(digest(f"split/{content}", 1), 16)
    return "train" if number < 128 else "dev" if number < 192 else "test"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SplitByContent(Seeded, ABC):
    """Base of the worlds in which a hash of its content says which split an instance belongs to."""

    n_train: SplitSize = 1_000
    """Tasks of the split `train`, all different; fewer where the world has fewer."""
    n_dev: SplitSize = 1_000
    """The same for `dev`."""
    n_test: SplitSize = 1_000
    """The same for `test`."""

    name: ClassVar[str]
    """Name in the catalogue, with which the ids of tasks begin."""
    edition: ClassVar[str] = ""
    """Stands behind it where seeds drew other instances once, so that nobody takes one for the other."""

    @property
    @abstractmethod
    def level(self) -> str:
        """Whatever shapes an instance, in short: a part of the ids of tasks."""

    @abstractmethod
    def start(self, task: Task) -> Episode:
        """Begin one attempt."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Drawn(SplitByContent):
    """Base of the worlds whose tasks are drawn by seed. A subclass says what is drawn, and plays it."""

    @abstractmethod
    def draw(self, rng: random.Random) -> Any:
        """Draw an instance; it must be hashable, and the same in every process."""

    def content(self, instance: Any) -> str:
        """What makes an instance the problem it is; instances of the same content are duplicates."""
        return repr(instance)

    def told(self, instance: Any) -> str:
        """What the agent is told first and what solves it: instances of which both are the same are of one split."""
        return self.content(instance)

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of `train`, `dev` or `test`: different instances, none of them in another split.

        Raises:
            EnvError: no such split, or this level has no instance for it.
        """
        seeds = _seeds(self, split, self.n_in(split))
        return [Task(id=f"{self.name}{self.edition}/{self.level}/{split}/{seed}", seed=seed) for seed in seeds]

    def instance(self, task: Task) -> Any:
        """The instance of a task."""
        return _drawn(self, task.seed)


@lru_cache(maxsize=64)
def _seeds(world: Drawn, split: str, n: int) -> tuple[int, ...]:
    """The first `n` seeds of a split that bring an instance not met before."""
    seen: set[str] = set()
    found: list[int] = []
    fruitless = 0
    for seed in count(FIRST_SEED[split]):
        if len(found) == n or fruitless == _PATIENCE:
            return tuple(found)
        content = world.content(_drawn(world, seed))
        fruitless = fruitless + 1 if content in seen else 0
        if not fruitless:
            seen.add(content)
            found.append(seed)
    raise AssertionError("seeds have no end")


@lru_cache(maxsize=16_384)
def _drawn(world: Drawn, seed: int) -> Any:
    split = split_of_seed(seed)
    for i in range(_MOST_DRAWS):
        instance = world.draw(random.Random(f"{world.name}/{world.level}/{seed}/{i}"))
        if split_of(world.told(instance)) == split:
            return instance
    raise EnvError(
        f"this level has no instance for the split {split!r}",
        where=f"{world.name}/{world.level}",
        got=f"{_MOST_DRAWS} draws, all of other splits",
        hint="choose a larger level",
    )


@plain_dataclass(frozen=True, slots=True)
class Judged:
    """What a world says of one answer.

    Attributes:
        feedback: what the agent reads.
        answer: the answer as it was understood, in one spelling; None where it was not.
        solved: whether it solves the task.
    """

    feedback: str
    answer: str | None
    solved: bool = False


class Attempts:
    """An episode of a question and several attempts at it, each answered with feedback; 1 for solving it, else 0.

    The key of a state tells the question, which answers were given, and how many attempts are left.
    """

    def __init__(
        self,
        question: str,
        judge: Callable[[str], Judged],
        *,
        name: str,
        max_steps: int,
        admissible: Sequence[str] = (),
        unit: str = "attempt",
    ) -> None:
        self._judge, self._name, self._unit = judge, name, unit
        self._all, self._answers = tuple(sorted(admissible)), set[str]()
        self.steps_left = max_steps
        self.solved = False
        self.opening = StepResult(
            f"{question}\n{self._left()}", state_key=self._state_key(), admissible_actions=self._all
        )

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        return self.solved or self.steps_left == 0

    async def step(self, action: str) -> StepResult:
        """Judge one answer. What is not understood costs an attempt too."""
        if self.over:
            raise after_end(self._name, action)
        judged = self.do(action)
        return StepResult(
            judged.feedback if self.solved else f"{judged.feedback}\n{self._left()}",
            reward=float(self.solved),
            terminated=self.solved,
            truncated=self.over and not self.solved,
            state_key=self._state_key(),
            success=self.solved if self.over else None,
            valid=judged.answer is not None,
            admissible_actions=() if self.over else self._all,
        )

    def do(self, action: str) -> Judged:
        """Judge one answer without waiting."""
        judged = self._judge(action)
        self.steps_left -= 1
        self.solved = judged.solved
        if judged.answer is not None:
            self._answers.add(judged.answer)
        return judged

    async def close(self) -> None:
        """Nothing is held open."""

    def _left(self) -> str:
        n = self.steps_left
        plural = "es" if self._unit.endswith("s") else "s"
        return f"{n} {self._unit}{'' if n == 1 else plural} left."

    def _state_key(self) -> str:
        return f"{self._name}/{self.steps_left} left/{digest(repr(sorted(self._answers)))}"


def plan_answer(episode: Attempts, taken: Sequence[str], answer: str | None) -> tuple[str, ...] | None:
    """The plan where one answer solves a task from any state: that answer, if it is not too late.

    Args:
        episode: a new one.
        taken: answers given so far.
        answer: one that solves the task; None where it cannot be solved.
    """
    for text in taken:
        if not episode.over:
            episode.do(text)
    if episode.solved:
        return ()
    return None if episode.over or answer is None else (answer,)
