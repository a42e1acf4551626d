"""Difficulty ladder per task: an easier variant of a task as long as it is failed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from itertools import islice
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem
from rlhf.data import ScoredGroup, Task
from rlhf.settings import STRICT
from rlhf.tasks.contrib.curriculum import Curriculum, Level
from rlhf.tasks.group_metric import measured, unmeasurable
from rlhf.tasks.shuffled import walk


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ladder:
    """Draws the hardest level first; a failed task comes one level easier, until solved.

    Every task of the hardest level has a ladder: the tasks of the same number of each easier level. It begins at the
    top, goes down a rung when no attempt reaches `min_correct`, and up again when `climb_share` of them do. Levels are
    those of `curriculum`: a key of `Task.info`, as `environment: {kind: graded}` writes it. Unlike a curriculum, tasks
    that are solved at once are never made easy, and those that are not are practised by themselves.

    Four attempts of which none, then three and three again reach it, from level 2: levels 2, 1, 2, 2.

    Source: LADDER, arXiv 2503.00735, whose variants are written by the policy, for integrals that are checked by
    numbers; here they are the environment's.
    """

    key: str = "level"
    """Name of the level in `Task.info`, or of a column."""
    levels: Annotated[tuple[Level, ...], Field(min_length=2)] | None = None
    """The levels from easy to hard; by default all that occur, which must be numbers, in rising order."""
    metric: str = "success"
    """Metric of attempts: `success`, `score`, or `reward/<name>`, one unweighted reward."""
    min_correct: float = 1.0
    """Minimum metric of a successful attempt."""
    climb_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of attempts that must reach it for the next harder level."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a metric that the rewards do not have."""
        yield from unmeasurable(self.metric, context)

    def start(self, tasks: Sequence[Task], seed: int) -> LadderTasks:
        """Return a source with every ladder at its top. Raises RecipeError for tasks without levels."""
        by_level = Curriculum(key=self.key, levels=self.levels).start(tasks, seed).by_level
        return LadderTasks(self, by_level, seed)


@plain_dataclass
class LadderTasks:
    """Tasks by level, as a pure function of the seed and of what is remembered.

    Attributes:
        settings: the recipe keys.
        by_level: the tasks of each level, from easy to hard.
        seed: gives the order of the hard tasks.
        n_drawn: tasks that were drawn.
        rungs: level of each hard task that was drawn, by its number; those that are missing are at the top.
    """

    settings: Ladder
    by_level: Sequence[Sequence[Task]]
    seed: int
    n_drawn: int = 0
    rungs: dict[int, int] = field(default_factory=dict)

    @property
    def top(self) -> int:
        """Index of the hardest level."""
        return len(self.by_level) - 1

    def draw(self, n: int, already: int = 0) -> list[Task]:
        """Return the next `n` hard tasks, each as its present rung has it."""
        return [self._variant(i) for i in islice(self._numbers(), already, already + n)]

    def learn(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Go up or down the ladders of the tasks that were drawn."""
        numbers = list(islice(self._numbers(), len(groups)))
        levels = [self.rungs.get(i, self.top) for i in numbers]
        drawn: dict[int, list[bool]] = {}  # a task that was drawn twice was attempted on one rung
        for i, group in zip(numbers, groups, strict=True):
            found = (value >= self.settings.min_correct for value in measured(group, self.settings.metric))
            drawn.setdefault(i, []).extend(found)
        for i, reached in drawn.items():
            rung, n = self.rungs.get(i, self.top), len(reached)
            if n and not any(reached):
                rung = max(rung - 1, 0)
            elif n and sum(reached) >= self.settings.climb_share * n:
                rung = min(rung + 1, self.top)
            self.rungs[i] = rung
        self.n_drawn += len(groups)
        n_top = sum(level == self.top for level in levels)
        return {
            "sampling/level": math.fsum(levels) / max(len(levels), 1),
            "sampling/top_share": n_top / max(len(levels), 1),
        }

    def _numbers(self) -> Iterator[int]:
        return walk(len(self.by_level[-1]), self.seed, self.n_drawn)

    def _variant(self, i: int) -> Task:
        tasks = self.by_level[self.rungs.get(i, self.top)]
        return tasks[i % len(tasks)]

    def state_dict(self) -> dict[str, Any]:
        """State: position in the order, and the rung of each task."""
        return {"n_drawn": self.n_drawn, "rungs": [[i, rung] for i, rung in self.rungs.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.n_drawn = int(state["n_drawn"])
        self.rungs = {int(i): int(rung) for i, rung in state["rungs"]}
