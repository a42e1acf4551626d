"""What worlds drawn by seed share: splits that have no task in common, an episode with a score, words.

Splits are ranges of seeds (`environments.core.seed_splits`). Two seeds may still draw the same content, so a seed
draws again
until the hash of what it drew belongs to its split: half of all hashes are for `train`, a quarter each for `dev` and
`test`. What can be in one split can therefore be in no other, however small a world is.
"""

from __future__ import annotations

import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from environments.base import StepResult, after_end
from environments.core.seed_splits import split_of
from rlhf.errors import EnvError

_QUARTERS: Mapping[str, tuple[int, ...]] = {"train": (0, 1), "dev": (2,), "test": (3,)}
_MOST_DRAWS = 2_000

Drawn = TypeVar("Drawn")


def words(text: str) -> tuple[str, ...]:
    """Split a list of words that is written as one text."""
    return tuple(text.split())


NAMES = words(
    "Ada Alan Amy Ben Bo Cleo Dan Dora Eli Emma Finn Gil Hana Hugo Ida Ivan Jan Jill Kai Kim Lara Leo Lou Max Mia "
    "Nell Nils Noah Olga Otto Pia Rex Rosa Sam Sara Theo Tom Una Vera Will Zoe Zack"
)
PLACES = words("Athens Berlin Cairo Delhi Lima London Madrid Milan Oslo Paris Prague Rome Seoul Tokyo Vienna Zurich")


def belongs_to(content: object) -> str:
    """Name the one split that may hold `content`, by the hash of its `repr`."""
    quarter = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()[0] % 4
    return next(split for split, quarters in _QUARTERS.items() if quarter in quarters)


def draw_for(
    kind: str,
    seed: int,
    draw: Callable[[random.Random], Drawn],
    told: Callable[[Drawn], object] = lambda content: content,
) -> Drawn:
    """Draw the content of a task until the hash of what is told of it belongs to the split of `seed`.

    Args:
        kind: of the environment, so that one seed draws something else in each.
        seed: of the task.
        draw: makes the content.
        told: what the agent reads first, and what solves the task, of a content: contents that agree in both are one
            task to the agent, whatever else they hold. It has to have a `repr` that tells everything; all of the
            content by default.

    Raises:
        EnvError: nothing that was drawn belongs to the split: there are too few different tasks.
    """
    split = split_of(seed)
    for i in range(_MOST_DRAWS):
        content = draw(random.Random(f"{kind}/{seed}/{i}"))
        if belongs_to(told(content)) == split:
            return content
    raise EnvError(
        f"there is no task for the split '{split}'",
        where=kind,
        got=f"{_MOST_DRAWS} draws that all belong to other splits",
        hint="choose settings that allow more different tasks",
    )


def name_of(content: object) -> str:
    """Eight hexadecimal digits that stand for `content` in the keys of states."""
    return hashlib.blake2b(repr(content).encode(), digest_size=4).hexdigest()


def plain(text: str, most: int = 200) -> str:
    """Lower case, with single spaces for white space, quotes and stops; empty where `text` is too long to be meant."""
    if len(text) > most:
        return ""
    return " ".join(re.sub(r"[\s_\-.,:;!?\"'`*()\[\]{}<>]+", " ", text.lower()).split())


def named(text: str, known: Iterable[str]) -> list[str]:
    """Return what `text` names of `known`, as whole words in any case, in the order in which it does."""
    said = f" {plain(text)} "
    found = ((said.find(f" {plain(name)} "), name) for name in known)
    return [name for at, name in sorted(found) if at >= 0]


class Attempt(ABC):
    """An episode with a score from 0 to 1; the reward of a step is the change of the score.

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
    def over(self) -> bool:
        """Whether the episode has ended."""
        return self.done or self.steps_left == 0

    async def step(self, action: str) -> StepResult:
        """Do one action."""
        return self.act(action)

    def act(self, action: str) -> StepResult:
        """Do one action. Raises EnvError where the episode is over."""
        if self.over:
            where = f"{type(self).__name__}.step"
            raise after_end(where, action)
        self.steps_left -= 1
        before = self.score
        said, valid = self.do(action)
        return StepResult(
            said,
            reward=self.score - before,
            terminated=self.done,
            truncated=self.over and not self.done,
            state_key=self.state(),
            success=self.solved if self.over else None,
            valid=valid,
            admissible_actions=() if self.over else self.possible(),
        )

    async def close(self) -> None:  # noqa: B027  it may be overridden, and need not be
        """Nothing is held open."""

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
