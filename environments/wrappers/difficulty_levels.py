"""Difficulty levels: several environments as the levels of one, from easy to hard.

    environment:
      kind: graded
      levels:
        - {kind: babyai, level: GoToObj}
        - {kind: babyai, level: GoToLocal}
        - {kind: babyai, level: PickupLoc}

A task carries the number of its level, from 0, in `Task.info["level"]`, which is what `sampler: {kind: curriculum}`
looks at. Tasks of the levels alternate, so that an evaluation on the first so many of a split measures all levels
evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Environment
from environments.core.composite_properties import CompositeEnvironment
from environments.core.picked_tasks import listed, picked
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

#: Name in `Task.info` of a task's level.
LEVEL = "level"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Graded(CompositeEnvironment):
    """Environments, or one of them with several settings, as levels of growing difficulty."""

    levels: Annotated[tuple[Environment, ...], Field(min_length=2)]
    """Environments from easy to hard, each with a `kind` and its keys."""

    def members(self) -> Sequence[Environment]:
        """The levels."""
        return self.levels

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of all levels, interleaved: the first of each, then the second, and so on.

        Raises:
            EnvError: a level has no such split, or uses the name `level` in its tasks' info itself.
        """
        lists = [listed(level.tasks(split)) for level in self.levels]
        rows = range(max(map(len, lists)))
        order = ((i, row) for row in rows for i, tasks in enumerate(lists) if row < len(tasks))
        return picked(lists, self._graded, order)

    def _graded(self, task: Task, i: int) -> Task:
        if LEVEL in task.info:
            raise EnvError(
                "tasks of this environment have a level already",
                where=f"levels[{i}]",
                got=f"{task.id} with info {dict(task.info)}",
                expected=f"no key {LEVEL!r} in Task.info",
                hint="use the environment directly: sampler: {kind: curriculum} looks at that key",
            )
        return replace(task, id=f"level{i}/{task.id}", info={**task.info, LEVEL: i})

    def own(self, task: Task) -> tuple[Environment, Task]:
        """Return the level of a task, and the task as that one made it. Raises EnvError for a task of another."""
        i = task.info.get(LEVEL)
        if not isinstance(i, int) or not 0 <= i < len(self.levels) or not task.id.startswith(f"level{i}/"):
            raise EnvError("this task is of another environment", where="Graded", got=task.id)
        info = {name: value for name, value in task.info.items() if name != LEVEL}
        return self.levels[i], replace(task, id=task.id.partition("/")[2], info=info)
