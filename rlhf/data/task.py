"""Task: a problem to attempt, from its start or from a given state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf.data.messages import Message
from rlhf.data.trajectory import Action, Turn
from rlhf.errors import DataError


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    Attributes:
        id: unique within an environment and stable between runs; names the package version where one generates it.
        messages: opening messages shown before the environment's first observation; often empty.
        reference: the hidden answer a verifier compares with; never shown to the agent.
        seed: seed of the environment's generator.
        info: whatever the environment needs to start the task; plain JSON values.
        prefix: turns that are played before the agent takes over, as they went when they were recorded. They carry no
            generations: they are read, and nothing trains on them. Empty for a task that begins at its beginning.
        origin: id under which the environment knows the task, where it begins in the middle; empty where it does not.
    """

    id: str
    messages: tuple[Message, ...] = ()
    reference: str | None = None
    seed: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)
    prefix: tuple[Turn, ...] = ()
    origin: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            raise DataError("a task needs an id", where="Task.id", got=repr(self.id), expected="a non-empty string")
        if bool(self.prefix) != bool(self.origin) or self.origin == self.id:
            raise DataError(
                "a task that begins in the middle needs an id of its own, and no other task has an origin",
                where=f"Task {self.id}",
                got=f"{len(self.prefix)} turns in the prefix, origin {self.origin!r}",
                hint="make start states with Task.started_after(turns)",
            )
        if any(turn.generations for turn in self.prefix):
            raise DataError(
                "a turn of a prefix has generations, and prefixes are not trained on",
                where=f"Task.prefix of {self.id}",
                hint="make start states with Task.started_after(turns)",
            )

    def started_after(self, turns: Sequence[Turn], *, mark: str = "") -> Task:
        """Return the task begun after `turns`: a task of its own, so that groups and baselines are of one start.

        Its id is `<id>@<number of turns>`, with `-<mark>` behind it where there are several starts of that length.
        Generations are left out. So are turns whose action could not be read, as the environment never heard of them.

        Args:
            turns: of one attempt at this task, from its first on. Without any, the task itself is returned.
            mark: tells apart starts that are equally far on.

        Raises:
            DataError: this task begins in the middle already.
        """
        if self.prefix:
            raise DataError("this task begins in the middle already", where="Task.started_after", got=self.id)
        given = tuple(
            replace(t, action=Action(t.action.text, parts=t.action.parts)) for t in turns if t.action.error is None
        )
        if not given:
            return self
        name = f"{self.id}@{len(given)}" + (f"-{mark}" if mark else "")
        return replace(self, id=name, prefix=given, origin=self.id)

    @property
    def beginning(self) -> Task:
        """The task from its very beginning, as its environment made it."""
        return replace(self, id=self.origin, prefix=(), origin="") if self.prefix else self


def origin_of(task_id: str, n_given: int) -> str:
    """Return the id of the task that a start state with `n_given` turns is of, as `Task.started_after` names those.

    >>> origin_of("w/1@2", 2), origin_of("w/1@2-0a1b2c3d", 2), origin_of("w/1@2", 0), origin_of("w/1@20", 2)
    ('w/1', 'w/1', 'w/1@2', 'w/1@20')
    """
    origin, at, rest = task_id.rpartition("@")
    is_of_one = at and n_given and rest.partition("-")[0] == str(n_given)
    return origin if is_of_one else task_id
