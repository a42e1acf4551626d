"""What environments that are made of several others say of themselves: what all of those promise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from environments.base import Environment, Episode, Oracle, Properties, most_at_once, properties_of
from rlhf.data import Task
from rlhf.errors import EnvError


class CompositeEnvironment(ABC):
    """An environment whose tasks are those of others."""

    @abstractmethod
    def members(self) -> Sequence[Environment]:
        """The others."""

    @abstractmethod
    def own(self, task: Task) -> tuple[Environment, Task]:
        """The environment of a task, and the task as that one made it. Raises EnvError for a task of another."""

    @property
    def properties(self) -> Properties:
        """What all of them promise."""
        found = [properties_of(member) for member in self.members()]
        return Properties(
            deterministic=all(p.deterministic for p in found),
            replayable=all(p.replayable for p in found),
            thread_safe=all(p.thread_safe for p in found),
            interleaves=all(p.interleaves or p.thread_safe for p in found),
            inline=all(p.inline for p in found),
            oracle=all(p.oracle for p in found),
            splits=tuple(split for split in found[0].splits if all(split in p.splits for p in found)),
            package=", ".join(dict.fromkeys(p.package for p in found if p.package)),
            isolated=any(p.isolated for p in found),
            seats=tuple(dict.fromkeys(seat for p in found for seat in p.seats)),
            repeats=any(p.repeats for p in found),
            judged_by_rewards=all(p.judged_by_rewards for p in found),
        )

    def fingerprint(self) -> str:
        """Digests of the data that they read."""
        found = (getattr(member, "fingerprint", None) for member in self.members())
        return ", ".join(dict.fromkeys(said() for said in found if callable(said)))

    @property
    def agent_defaults(self) -> Mapping[str, Any]:
        """What all of them suggest for an agent."""
        return _common(self.members(), "agent_defaults")

    @property
    def limits_defaults(self) -> Mapping[str, Any]:
        """What all of them suggest for limits."""
        return _common(self.members(), "limits_defaults")

    @property
    def inline(self) -> bool:
        """Whether calls of every one run on the event loop, or only wait there."""
        return all(properties_of(p).inline or getattr(p, "inline", False) is True for p in self.members())

    @property
    def keeps_limits(self) -> bool:
        """Whether every one limits calls itself."""
        return all(getattr(member, "keeps_limits", False) is True for member in self.members())

    @property
    def max_episodes(self) -> int | None:
        """How many episodes may be alive at a time, if all are of the one that has the least room."""
        return min((n for member in self.members() if (n := most_at_once(member)) is not None), default=None)

    @property
    def max_steps(self) -> int | None:
        """The largest step limit of one that has any."""
        return largest(getattr(member, "max_steps", None) for member in self.members())

    def start(self, task: Task) -> Episode:
        """Begin one attempt."""
        member, own = self.own(task)
        return member.start(own)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give actions that solve `task` after `taken`. Raises EnvError where its environment cannot demonstrate."""
        member, own = self.own(task)
        if not isinstance(member, Oracle):
            raise EnvError(
                "this environment cannot demonstrate",
                where=task.id.partition("/")[0],
                got=type(member).__name__,
                expected="an environment with a method `plan(task, taken)`",
            )
        return member.plan(own, taken)

    def recall(self, task: Task, taken: Sequence[str]) -> str:
        """What is worth remembering, where the environment of the task can say it; else nothing."""
        member, own = self.own(task)
        said = getattr(member, "recall", None)  # what stands for another environment passes its methods on
        return str(said(own, taken)) if callable(said) else ""

    def subgoal(self, task: Task, taken: Sequence[str]) -> str:
        """What the oracle is about, where the environment of the task can say it; else nothing."""
        member, own = self.own(task)
        said = getattr(member, "subgoal", None)
        return str(said(own, taken)) if callable(said) else ""


def largest(found: Iterable[object]) -> int | None:
    """The largest of those that are whole numbers."""
    return max((n for n in found if isinstance(n, int)), default=None)


def _common(members: Iterable[object], name: str) -> Mapping[str, Any]:
    """An attribute that all have alike; nothing where they differ."""
    found: list[Mapping[str, Any]] = [getattr(member, name, None) or {} for member in members]
    return found[0] if all(one == found[0] for one in found) else {}
