"""Tasks in a shuffled order, each once before any comes again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from itertools import islice
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from rlhf.data import ScoredGroup, Task
from rlhf.errors import DataError
from rlhf.settings import STRICT


def walk(total: int, seed: int | str, begin: int = 0) -> Iterator[int]:
    """Yield indices below `total` without end, each once before any comes again, from the place `begin` on.

    The order is a pure function of the seed, and each pass has its own.
    """
    lap, offset = divmod(begin, total)
    while True:
        order = list(range(total))
        random.Random(f"{seed}/{lap}").shuffle(order)
        yield from order[offset:]
        lap, offset = lap + 1, 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Shuffled:
    """Every task once, in an order drawn from the seed; then every task again, in another."""

    is_stream: ClassVar[bool] = True

    def start(self, tasks: Sequence[Task], seed: int) -> ShuffledTasks:
        """Return a source that stands before the first task."""
        return ShuffledTasks(tasks, seed)


@plain_dataclass
class ShuffledTasks:
    """The order is a pure function of the seed; remembered is only how many tasks were drawn.

    Attributes:
        tasks: all tasks of a split, in the environment's order.
        seed: one seed gives one order; each pass over the tasks has its own.
        n_drawn: in finished steps.
    """

    tasks: Sequence[Task]
    seed: int
    n_drawn: int = 0

    def __post_init__(self) -> None:
        if not self.tasks:
            raise DataError("there are no tasks to draw from", where="ShuffledTasks", expected="at least one task")

    def draw(self, n: int, already: int = 0) -> list[Task]:
        """Return the next `n` tasks; distinct but where one pass ends and the next begins."""
        return [self.tasks[i] for i in islice(walk(len(self.tasks), self.seed, self.n_drawn + already), n)]

    def learn(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Go on behind the tasks that were drawn."""
        self.n_drawn += len(groups)
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Progress of the sampler."""
        return {"n_drawn": self.n_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.n_drawn = int(state["n_drawn"])
