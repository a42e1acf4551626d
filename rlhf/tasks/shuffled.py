"""Shuffled task sampler: every task once per epoch."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from rlhf.data import ScoredGroup, Task
from rlhf.errors import DataError, RecipeError
from rlhf.settings import STRICT


def walk(total: int, seed: int | str, begin: int = 0) -> Iterator[int]:
    """Yield indices below `total` without end, each once before any comes again, from the place `begin` on.

    The order is a pure function of the seed, and each pass has its own.
    """
    lap, offset = divmod(begin, total)
    while True:
        order = _order(total, seed, lap)
        yield from (order[i] for i in range(offset, total))
        lap, offset = lap + 1, 0


def drawn_apart(total: int, seed: int | str, n: int, number: int) -> list[int]:
    """Return the indices below `total` of draw `number`, from 0, of `n` each: none twice, and none before all others.

    Draws take their indices from `walk`. Where a pass ends within a draw, those that the draw has come later in the
    next pass. With fewer than `n` indices each draw has them all.
    """
    n, order = min(n, total), walk(total, seed)
    drawn, left = list[int](), list[int]()
    for _ in range(number + 1):
        drawn, left = left[:n], left[n:]
        if len(drawn) < n:
            following, there = list(islice(order, total)), set(drawn)
            drawn += [i for i in following if i not in there][: n - len(drawn)]
            taken = set(drawn) - there
            left = [i for i in following if i not in taken]
    return drawn


@lru_cache(maxsize=4)
def _order(total: int, seed: int | str, lap: int) -> array[int]:
    """Order of a pass, in 8 bytes a task; each step asks for it again."""
    order = array("Q", range(total))
    random.Random(f"{seed}/{lap}").shuffle(order)
    return order


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Shuffled:
    """Every task once, in an order drawn from the seed; then every task again, in another.

    With `only`, stages of one recipe go through the parts of a mixture one after the other, as in Nemotron-Cascade,
    arXiv 2512.13607.
    """

    is_stream: ClassVar[bool] = True

    only: str = "*"
    """Glob pattern of task ids to draw: `maths/*` is the part `maths` of a mixture."""

    def start(self, tasks: Sequence[Task], seed: int) -> ShuffledTasks:
        """Return a source that stands before the first task. Raises RecipeError where no task is drawn."""
        found = tasks if self.only == "*" else [task for task in tasks if fnmatchcase(task.id, self.only)]
        if tasks and not found:
            raise RecipeError(
                "no task id matches this pattern",
                where="sampler.only",
                got=self.only,
                expected=f"ids such as {tasks[0].id}",
                hint="end it with *, as in maths/*",
            )
        return ShuffledTasks(found, seed)


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
        """Advance past the tasks that were drawn."""
        self.n_drawn += len(groups)
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Progress of the sampler."""
        return {"n_drawn": self.n_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.n_drawn = int(state["n_drawn"])
