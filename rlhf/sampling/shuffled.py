"""Tasks in a shuffled order, each once before any comes again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Any

from pydantic.dataclasses import dataclass

from rlhf.data import ScoredGroup, Task
from rlhf.errors import DataError
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Shuffled:
    """Every task once, in an order drawn from the seed; then every task again, in another."""

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
        total = len(self.tasks)
        position = self.n_drawn + already
        drawn: list[Task] = []
        while len(drawn) < n:
            lap, offset = divmod(position + len(drawn), total)
            order = list(range(total))
            random.Random(f"{self.seed}/{lap}").shuffle(order)
            take = order[offset : offset + n - len(drawn)]
            drawn.extend(self.tasks[i] for i in take)
        return drawn

    def learn(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Go on behind the tasks that were drawn."""
        self.n_drawn += len(groups)
        return {}

    def state_dict(self) -> dict[str, Any]:
        """How far it is."""
        return {"n_drawn": self.n_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.n_drawn = int(state["n_drawn"])
