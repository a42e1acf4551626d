"""Curriculum: from level to level as success rises."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from itertools import islice
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.data import ScoredGroup, Task
from rlhf.errors import RecipeError, nearest
from rlhf.settings import STRICT
from rlhf.tasks.group_metric import measured, unmeasurable
from rlhf.tasks.shuffled import walk

Level = int | float | str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Curriculum:
    """Curriculum of levels, advancing when the policy succeeds on the last `window` tasks of one.

    A task's level is what its environment wrote into `Task.info` under `key`, or its row's column of that name.
    `environment: {kind: graded}` makes an environment with levels out of several settings of any other. Levels only
    go up. Within a level tasks come in a shuffled order, each once before any comes again; a share of each step
    goes back over earlier levels, drawn evenly.

    The level is judged by training attempts, all those drawn in a step, whether or not they were trained on.

    Source: the loop of Liu et al., SATURN, arXiv 2505.16368, which judges by validation instead. Its measure of
    difficulty is of SAT problems alone, so it is for an environment that has them to write into its tasks.
    """

    key: str = "level"
    """Name of the level in `Task.info`, or of a column."""
    levels: Annotated[tuple[Level, ...], Field(min_length=2)] | None = None
    """The levels from easy to hard; tasks of other levels are excluded. By default all that occur, which must be
    numbers, in ascending order."""
    metric: str = "success"
    """Promotion metric: `success`, `score`, or `reward/<name>`, one unweighted reward."""
    threshold: float = 0.75
    """Promotion threshold: mean of the metric over tasks of the level."""
    window: Annotated[int, Field(ge=1)] = 32
    """Number of last tasks of the level that the mean is over, and the minimum needed."""
    review: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of tasks from earlier levels, against forgetting."""

    def __post_init__(self) -> None:
        if self.levels is not None and len(set(self.levels)) < len(self.levels):
            raise ValueError(f"a level is named twice in levels: {list(self.levels)}")

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a metric that the rewards do not have."""
        yield from unmeasurable(self.metric, context)

    def start(self, tasks: Sequence[Task], seed: int) -> CurriculumTasks:
        """Return a source that stands at the first level.

        Raises:
            RecipeError: tasks have no such key, or a level no tasks, or there are fewer than two levels.
        """
        by_level = [[t for t in tasks if self._level(t) == level] for level in self._levels(tasks)]
        return CurriculumTasks(self, by_level, seed, n_drawn=[0] * len(by_level))

    def _level(self, task: Task) -> Any:
        """Level of a task in its info, or its row's columns; None where absent."""
        return task.info.get(self.key, task.info.get("columns", {}).get(self.key))

    def _levels(self, tasks: Sequence[Task]) -> Sequence[Level]:
        """Return the levels from easy to hard, each of which some task has."""
        found: list[Any] = []
        known: set[str] = set()
        n_without = 0
        for task in tasks:
            level = self._level(task)
            n_without += level is None
            if level is not None and level not in found:
                found.append(level)
            known |= {*task.info, *task.info.get("columns", ())}
        names = sorted(known)
        if not found or (n_without and self.levels is None):
            raise RecipeError(
                "the tasks have no level" if not found else "some tasks have no level",
                where="sampler.key",
                got=f"{n_without} of {len(tasks)} without {self.key!r}; their info has {', '.join(names) or 'nothing'}",
                expected="a key of Task.info, or a column of the data set, that holds the level",
                hint=nearest(self.key, names) or "use environment: {kind: graded, levels: [...]}, or name another key",
            )
        if self.levels is None and not all(isinstance(level, int | float) for level in found):
            raise RecipeError(
                "the levels are not numbers, and their order of difficulty is not declared",
                where="sampler.levels",
                got=", ".join(map(repr, found)),
                expected="the levels, from easy to hard",
                hint=f"set levels: [{', '.join(map(str, found))}] in the right order",
            )
        levels = sorted(found) if self.levels is None else self.levels
        missing = [level for level in levels if level not in found]
        if missing or len(levels) < 2:
            raise RecipeError(
                "no task has this level" if missing else "all tasks have the same level",
                where="sampler.levels",
                got=", ".join(map(repr, missing or levels)),
                expected="levels among " + ", ".join(map(repr, found)) if missing else "at least two levels",
                hint="name levels that the split has" if missing else "use sampler: {kind: shuffled}",
            )
        return levels


@plain_dataclass
class CurriculumTasks:
    """Tasks by level, as a pure function of the seed and of what is remembered.

    Attributes:
        settings: the recipe keys.
        by_level: the tasks of each level, from easy to hard.
        seed: gives the order within a level, and the levels that are gone over again.
        n_drawn: tasks of each level that were drawn.
        level: index of the present one.
        lately: the metric's mean over the attempts at each of the last tasks of the present level, in order.
    """

    settings: Curriculum
    by_level: Sequence[Sequence[Task]]
    seed: int
    n_drawn: list[int]
    level: int = 0
    lately: list[float] = field(default_factory=list)

    def draw(self, n: int, already: int = 0) -> list[Task]:
        """Return the next `n` tasks: of the present level, and some of earlier ones."""
        return [task for _, task in islice(self._drawn(), already, already + n)]

    def learn(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Advance past the tasks that were drawn, and to the next level where that is due."""
        levels = [level for level, _ in islice(self._drawn(), len(groups))]
        for level, group in zip(levels, groups, strict=True):
            self.n_drawn[level] += 1
            values = measured(group, self.settings.metric)
            if level == self.level and values:
                self.lately.append(math.fsum(values) / len(values))
        self.lately = self.lately[-self.settings.window :]
        n_review = float(sum(level < self.level for level in levels))
        logged = {"sampling/level": float(self.level), "sampling/n_review_tasks": n_review}
        mean = math.fsum(self.lately) / max(len(self.lately), 1)
        if self.lately:
            logged["sampling/level_mean"] = mean
        is_mastered = len(self.lately) == self.settings.window and mean >= self.settings.threshold
        if is_mastered and self.level + 1 < len(self.by_level):
            self.level, self.lately = self.level + 1, []
        return logged

    def state_dict(self) -> dict[str, Any]:
        """Level, places and what was reached lately."""
        return {"level": self.level, "n_drawn": list(self.n_drawn), "lately": list(self.lately)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError for the state of another number of levels."""
        if len(state["n_drawn"]) != len(self.by_level):
            raise ValueError(
                f"a curriculum of {len(state['n_drawn'])} levels, and these tasks have {len(self.by_level)}"
            )
        self.level = int(state["level"])
        self.n_drawn = [int(n) for n in state["n_drawn"]]
        self.lately = [float(x) for x in state["lately"]]

    def _drawn(self) -> Iterator[tuple[int, Task]]:
        """Yield the tasks to come, each with the index of its level."""
        begin = sum(self.n_drawn)
        orders = [walk(len(t), f"{self.seed}/{i}", self.n_drawn[i]) for i, t in enumerate(self.by_level)]
        place, share = begin, self.settings.review
        while True:
            # As evenly as a share allows: every fifth for .2, wherever a step begins.
            again = self.level > 0 and math.floor((place + 1) * share + 1e-9) > math.floor(place * share + 1e-9)
            level = random.Random(f"{self.seed}/review/{place}").randrange(self.level) if again else self.level
            yield level, self.by_level[level][next(orders[level])]
            place += 1
