"""Tasks in a shuffled order, each once before any comes again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.data import Task
from rlhf.errors import DataError


@dataclass(frozen=True)
class ShuffledTasks:
    """The tasks of a step are a pure function of (seed, step): a resumed run needs no sampler state.

    Attributes:
        tasks: all tasks of a split, in the environment's order.
        seed: one seed gives one order; each pass over the tasks has its own.
    """

    tasks: Sequence[Task]
    seed: int

    def __post_init__(self) -> None:
        if not self.tasks:
            raise DataError("there are no tasks to draw from", where="ShuffledTasks", expected="at least one task")

    def draw(self, step: int, n: int) -> list[Task]:
        """The `n` tasks of step `step`, of `n` each; distinct but for a step that ends one pass and begins the next."""
        total = len(self.tasks)
        drawn: list[Task] = []
        position = step * n
        while len(drawn) < n:
            lap, offset = divmod(position + len(drawn), total)
            order = list(range(total))
            random.Random(f"{self.seed}/{lap}").shuffle(order)
            take = order[offset : offset + n - len(drawn)]
            drawn.extend(self.tasks[i] for i in take)
        return drawn
