"""Several settings of environments as the levels of one, from easy to hard.

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
from itertools import zip_longest
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Environment, Episode, Oracle, Properties, most_at_once, properties_of
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

#: Name in `Task.info` of a task's level.
LEVEL = "level"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Graded:
    """Environments, or one of them with several settings, as levels of growing difficulty."""

    levels: Annotated[tuple[Environment, ...], Field(min_length=2)]
    """Environments from easy to hard, each with a `kind` and its keys."""

    @property
    def properties(self) -> Properties:
        """What all levels promise."""
        found = [properties_of(level) for level in self.levels]
        return Properties(
            deterministic=all(p.deterministic for p in found),
            replayable=all(p.replayable for p in found),
            thread_safe=all(p.thread_safe for p in found),
            inline=all(p.inline for p in found),
            oracle=all(p.oracle for p in found),
            splits=tuple(split for split in found[0].splits if all(split in p.splits for p in found)),
            package=", ".join(dict.fromkeys(p.package for p in found if p.package)),
            isolated=any(p.isolated for p in found),
        )

    @property
    def inline(self) -> bool:
        """Whether calls of every level run on the event loop, or only wait there."""
        return all(properties_of(p).inline or getattr(p, "inline", False) is True for p in self.levels)

    @property
    def keeps_limits(self) -> bool:
        """Whether every level limits calls itself."""
        return all(getattr(level, "keeps_limits", False) is True for level in self.levels)

    @property
    def max_episodes(self) -> int | None:
        """How many episodes may be alive at a time, if all are of the level that has the least room."""
        return min((n for level in self.levels if (n := most_at_once(level)) is not None), default=None)

    @property
    def max_steps(self) -> int | None:
        """The largest step limit of a level that has one."""
        found = [getattr(level, "max_steps", None) for level in self.levels]
        return max((n for n in found if isinstance(n, int)), default=None)

    def tasks(self, split: str) -> Sequence[Task]:
        """List the tasks of all levels: the first of each, then the second of each, and so on.

        Raises:
            EnvError: a level has no such split, or uses the name `level` in its tasks' info itself.
        """
        listed = [[self._graded(task, i) for task in level.tasks(split)] for i, level in enumerate(self.levels)]
        return [task for row in zip_longest(*listed) for task in row if task is not None]

    def start(self, task: Task) -> Episode:
        """Begin one attempt."""
        level, own = self._own(task)
        return level.start(own)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give actions that solve `task` after `taken`. Raises EnvError where its level cannot demonstrate."""
        level, own = self._own(task)
        if not isinstance(level, Oracle):
            raise EnvError(
                "this level cannot demonstrate",
                where=f"levels[{task.info[LEVEL]}]",
                got=type(level).__name__,
                expected="an environment with a method `plan(task, taken)`",
            )
        return level.plan(own, taken)

    def _graded(self, task: Task, i: int) -> Task:
        if LEVEL in task.info:
            raise EnvError(
                "tasks of this environment have a level already",
                where=f"levels[{i}]",
                got=f"{task.id} with info {dict(task.info)}",
                expected=f"no key {LEVEL!r} in Task.info",
                hint="use the environment by itself: sampler: {kind: curriculum} looks at that key",
            )
        return replace(task, id=f"level{i}/{task.id}", info={**task.info, LEVEL: i})

    def _own(self, task: Task) -> tuple[Environment, Task]:
        """Return the environment of a task, and the task as that one made it."""
        i = task.info.get(LEVEL)
        if not isinstance(i, int) or not 0 <= i < len(self.levels) or not task.id.startswith(f"level{i}/"):
            raise EnvError("this task is of another environment", where="Graded", got=task.id)
        info = {name: value for name, value in task.info.items() if name != LEVEL}
        return self.levels[i], replace(task, id=task.id.partition("/")[2], info=info)
