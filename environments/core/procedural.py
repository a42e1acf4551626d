"""Base of the procedural worlds: splits of different instances, drawn by seed, and episodes with a score.

A task is a number; the instance it stands for is drawn from that number alone. Which split an instance belongs to is
told by a hash of what is told of it: half of all are of `train`, a quarter each of `dev` and of `test`. A seed
of a split draws until it meets an instance of that split, so none is ever in two, whatever the sizes. Within a split
a subclass of `Drawn` lists an instance once; other worlds call `draw_for`, and list one task per seed.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from itertools import count
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Episode, StepResult, after_end
from environments.core.seed_splits import FIRST_SEED, Seeded, split_of_seed
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

SplitSize = Annotated[int, Field(ge=1, le=1_000_000)]

#: Draws of one seed, and seeds in a row that bring nothing new, after which there is taken to be no more.
_MOST_DRAWS, _PATIENCE = 2_000, 200
_QUARTERS = ("train", "train", "dev", "test")

Made = TypeVar("Made")


def digest(content: str, size: int = 4) -> str:
    """A short name of `content`, the same in every process: `size` bytes of its hash in hexadecimal."""
    return hashlib.blake2b(content.encode(), digest_size=size).hexdigest()


def word_of(action: str) -> str:
    """Action of one word, in lower case and without a full stop."""
    return action.strip().casefold().rstrip(".")


def split_of(content: str) -> str:
    """Split of an instance by its content: half `train`, a quarter `dev`, a quarter `test`."""
    return _QUARTERS[int(digest(f"split/{content}", 1), 16) // 64]


def belongs_to(content: object) -> str:
    """Split of worlds with one task per seed, which hash the `repr`, so that their tasks stay."""
    return _QUARTERS[int(digest(repr(content), 8)[:2], 16) % 4]


def draw_for(
    kind: str,
    seed: int,
    draw: Callable[[random.Random], Made],
    told: Callable[[Made], object] = lambda made: made,
    split_of: Callable[[Any], str] = belongs_to,
) -> Made:
    """Draw the instance of a seed: the first whose hash belongs to the split of `seed`.

    Args:
        kind: of the environment, so that one seed draws something else in each.
        seed: of the task.
        draw: makes an instance.
        told: what the agent reads first, and what solves the task, of an instance: instances that agree in both are
            one task to the agent, whatever else they hold. It has to have a `repr` that tells everything; all of the
            instance by default.
        split_of: the split of what is told.

    Raises:
        EnvError: nothing that was drawn belongs to the split: there are too few different instances.
    """
    split = split_of_seed(seed)
    for i in range(_MOST_DRAWS):
        made = draw(random.Random(f"{kind}/{seed}/{i}"))
        if split_of(told(made)) == split:
            return made
    raise EnvError(
        f"there is no task for the split '{split}'",
        where=kind,
        got=f"{_MOST_DRAWS} draws, all in other splits",
        hint="choose settings that allow more different tasks",
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SplitByContent(Seeded, ABC):
    """Base of worlds whose splits are decided by a hash of the instance's content."""

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
        """Level: the settings that shape an instance, in short; a part of task ids."""

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
        """Key of an instance; instances with the same one are duplicates."""
        return repr(instance)

    def told(self, instance: Any) -> str:
        """Opening and solution of an instance; instances that agree in both are of one split."""
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DrawnQuestions(Drawn):
    """Base of worlds with one drawn question a task, and several attempts at its answer."""

    @abstractmethod
    def ask(self, instance: Any) -> Attempts:
        """Ask the question of an instance."""

    @abstractmethod
    def answer(self, instance: Any) -> str | None:
        """Answer that solves an instance; None where none is known."""

    def start(self, task: Task) -> Attempts:
        """Begin one attempt at a task."""
        return self.ask(self.instance(task))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give an answer that solves the task; None where no attempt is left."""
        return plan_answer(self.start(task), taken, self.answer(self.instance(task)))


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
    return draw_for(f"{world.name}/{world.level}", seed, world.draw, world.told, split_of)


class Attempt(ABC):
    """Episode with a score; the reward of a step is the change of the score, unless `earned` says otherwise.

    A world says what an action does (`do`), what the state is (`state`) and what is possible (`possible`), and sets
    `opening`, `score`, `done` and `solved`. Every action costs a step.
    """

    opening: StepResult

    def __init__(self, max_steps: int) -> None:
        self.steps_left = max_steps
        self.score = 0.0
        self.done = False
        self.solved = False

    @property
    def where(self) -> str:
        """Place of the episode, for errors."""
        return f"{type(self).__name__}.step"

    @property
    def over(self) -> bool:
        """True if the episode has ended."""
        return self.done or self.steps_left == 0

    async def step(self, action: str) -> StepResult:
        """Do one action."""
        return self.act(action)

    def act(self, action: str) -> StepResult:
        """Do one action. Raises EnvError where the episode is over."""
        if self.over:
            raise after_end(self.where, action)
        self.steps_left -= 1
        before = self.score
        said, valid = self.do(action)
        return StepResult(
            said,
            reward=self.earned(before),
            terminated=self.done,
            truncated=self.over and not self.done,
            state_key=self.state(),
            success=self.solved if self.over else None,
            valid=valid,
            admissible_actions=() if self.over else self.possible(),
        )

    async def close(self) -> None:  # noqa: B027  it may be overridden, and need not be
        """Nothing is held open."""

    def earned(self, before: float) -> float:
        """Return the reward of a step that began with the score `before`."""
        return self.score - before

    def opened(self, said: str) -> StepResult:
        """Return the opening that says `said`."""
        return StepResult(said, state_key=self.state(), admissible_actions=self.possible())

    def after(self, taken: Sequence[str]) -> None:
        """Do `taken`, as far as the episode goes."""
        for action in taken:
            if not self.over:
                self.act(action)

    @abstractmethod
    def do(self, action: str) -> tuple[str, bool]:
        """Do an action; returns the reply, and whether it was understood."""

    @abstractmethod
    def state(self) -> str:
        """Return the key of the present state."""

    @abstractmethod
    def possible(self) -> tuple[str, ...]:
        """Return the sorted actions that are possible now."""


class PlansByReplay(ABC):
    """Mixin of environments whose episodes know their `way_out()` from any state."""

    @abstractmethod
    def start(self, task: Task) -> Any:
        """Begin one attempt."""

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Actions that solve the task after `taken`; None where none do."""
        plan: tuple[str, ...] | None = self._after(task, taken).way_out()
        return plan

    def _after(self, task: Task, taken: Sequence[str]) -> Any:
        episode = self.start(task)
        episode.after(taken)
        return episode


class RecallsByReplay(PlansByReplay):
    """Oracle plans by replaying the episode, with recall of what its `worth_keeping()` says."""

    def recall(self, task: Task, taken: Sequence[str]) -> str:
        """Summary of what was seen until after `taken` and will be needed."""
        return str(self._after(task, taken).worth_keeping())


@plain_dataclass(frozen=True, slots=True)
class Judged:
    """Judgement of a world on one answer.

    Attributes:
        feedback: what the agent reads.
        answer: the answer as it was understood, in one spelling; None where it was not or is no choice.
        solved: whether it solves the task.
    """

    feedback: str
    answer: str | None
    solved: bool = False


class Attempts(Attempt):
    """Episode of a question and several attempts at it, each with feedback; 1 for solving it, else 0.

    It terminates with the right answer or with the last attempt. The key of a state tells the question, which answers
    were given, and how many attempts are left.
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
        super().__init__(max_steps)
        self._judge, self._name, self._unit = judge, name, unit
        self._all, self._answers = tuple(sorted(admissible)), set[str]()
        self.opening = self.opened(f"{question}\n{self._left()}")

    @property
    def where(self) -> str:
        """The question."""
        return self._name

    def do(self, action: str) -> tuple[str, bool]:
        """Judge one answer. What is not understood costs an attempt too."""
        judged = self._judge(action)
        self.solved, self.score = judged.solved, float(judged.solved)
        self.done = judged.solved or self.steps_left == 0  # the last attempt ends it
        if judged.answer is not None:
            self._answers.add(judged.answer)
        said = judged.feedback if judged.solved else f"{judged.feedback}\n{self._left()}"
        return said, judged.answer is not None

    def _left(self) -> str:
        n = self.steps_left
        plural = "es" if self._unit.endswith("s") else "s"
        return f"{n} {self._unit}{'' if n == 1 else plural} left."

    def state(self) -> str:
        """Return the question, the attempts left, and the answers given."""
        return f"{self._name}/{self.steps_left} left/{digest(repr(sorted(self._answers)))}"

    def possible(self) -> tuple[str, ...]:
        """Return all answers, where they are few enough to be listed."""
        return self._all


def plan_answer(episode: Attempts, taken: Sequence[str], answer: str | None) -> tuple[str, ...] | None:
    """Plan where one answer solves a task from any state: that answer, if it is not too late.

    Args:
        episode: a new one.
        taken: answers given so far.
        answer: one that solves the task; None where it cannot be solved.
    """
    episode.after(taken)
    if episode.solved:
        return ()
    return None if episode.over or answer is None else (answer,)
