"""Mixture of environments: each has a share of the tasks.

    environment:
      kind: mixed
      parts:
        rooms: {environment: {kind: keyhole, rows: 3, columns: 3}, weight: 2}
        sums: {environment: {kind: countdown}, max_steps: 4}

A task's id begins with the name of its part, and `Task.info["part"]` holds it: success is kept for each part
(`success_of/rooms`), `advantage: {kind: task_normalised}` puts the parts on one scale, and
`rewards: {x: {kind: of_part, part: rooms, reward: ...}}` judges one part alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import count
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from environments.base import Capabilities, Environment, StepResult, after_end
from environments.core.composite_properties import CompositeEnvironment, largest
from environments.core.picked_tasks import listed, picked
from environments.transcript import awaited
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.settings import STRICT

#: Name in `Task.info` of the part that a task is of.
PART = "part"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Share:
    """Member environment with its share."""

    environment: Environment
    """The environment, with a `kind` and its keys."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the tasks is this over the sum of all weights."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Its episodes are cut after so many actions, where it has no lower limit itself."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mixed(CompositeEnvironment):
    """Tasks of several environments, in turn and in given shares."""

    parts: Annotated[Mapping[str, Share], Field(min_length=2)]
    """The environments by their names, which are of letters, digits and `_`."""

    def __post_init__(self) -> None:
        """Refuse names that could not stand in ids and metrics."""
        for name in self.parts:
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"'{name}' is no name of a part: use letters, digits and _")

    def members(self) -> Sequence[Environment]:
        """The environments of all parts."""
        return [share.environment for share in self.parts.values()]

    @property
    def max_steps(self) -> int | None:
        """The largest step limit of the parts; that of a part is the lower of its own and its environment's."""
        limits = ((share.max_steps, Capabilities(share.environment).max_steps) for share in self.parts.values())
        return largest(min((limit for limit in both if limit is not None), default=None) for both in limits)

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of all parts, every prefix of the list as near to their shares as can be.

        The list ends where a part has no task left; tasks that a part reads on demand are read so here too. Raises
        EnvError where a part has no such split.
        """
        names, lists = list(self.parts), [listed(member.tasks(split)) for member in self.members()]
        return picked(lists, lambda task, i: self._named(task, names[i]), self._order([len(tasks) for tasks in lists]))

    def _order(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the number of a part and the place in its list of each task, given the lengths of the lists."""
        total = sum(Fraction(share.weight) for share in self.parts.values())
        shares = [Fraction(share.weight) / total for share in self.parts.values()]
        taken = [0] * len(sizes)
        for n in count(1):
            # The part that lags furthest behind its share comes next.
            part = max(range(len(sizes)), key=lambda i: shares[i] * n - taken[i])
            if taken[part] == sizes[part]:
                return
            yield part, taken[part]
            taken[part] += 1

    def start(self, task: Task) -> Any:
        """Begin one attempt; awaitable where the part's own `start` is."""
        episode: Any = super().start(task)
        limit = self.parts[task.info[PART]].max_steps
        if limit is None:
            return episode
        return _cut_later(episode, limit) if inspect.isawaitable(episode) else _Cut(episode, limit)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give actions that solve `task` after `taken`; None where none are known, or the part's limit cuts them."""
        path, limit = super().plan(task, taken), self.parts[task.info[PART]].max_steps
        return None if path is not None and limit is not None and len(taken) + len(path) > limit else path

    def own(self, task: Task) -> tuple[Environment, Task]:
        """Return the environment of a task, and the task as that one made it. Raises EnvError for a task of another."""
        name = str(task.info.get(PART))
        if name not in self.parts or not task.id.startswith(f"{name}/"):
            raise EnvError("this task is of another environment", where="Mixed", got=task.id)
        info = {key: value for key, value in task.info.items() if key != PART}
        return self.parts[name].environment, replace(task, id=task.id.partition("/")[2], info=info)

    @staticmethod
    def _named(task: Task, name: str) -> Task:
        if PART in task.info:
            raise EnvError(
                "tasks of this environment have a part already",
                where=f"parts.{name}",
                got=f"{task.id} with info {dict(task.info)}",
                expected=f"no key {PART!r} in Task.info",
                hint="list the environments of an inner mixture among the parts of the outer one",
            )
        return replace(task, id=f"{name}/{task.id}", info={**task.info, PART: name})


async def _cut_later(episode: Awaitable[Any], limit: int) -> _Cut:
    return _Cut(await episode, limit)


class _Cut:
    """An episode with a limit on its steps."""

    def __init__(self, episode: Any, limit: int) -> None:
        self._episode, self._left = episode, limit
        self.opening: StepResult = episode.opening

    async def step(self, action: str) -> StepResult:
        """Do one action; the last that is allowed cuts the episode unless it ends it. Raises EnvError after it."""
        if self._left == 0:
            raise after_end("Mixed step", action)
        result: StepResult = await awaited(self._episode.step(action))
        self._left -= 1
        if self._left > 0 or result.terminated or result.truncated:
            return result
        return replace(result, truncated=True, success=bool(result.success))

    async def close(self) -> None:
        """Free the episode."""
        await awaited(self._episode.close())
