"""Properties of composite environments: the intersection of their members'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from environments.base import Capabilities, Environment, Episode, Oracle, Properties, can_demonstrate, properties_of
from rlhf.data import Task


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
        """Properties that all members promise."""
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
        return ", ".join(dict.fromkeys(own.fingerprint() for own in self._declared() if own.fingerprint))

    @property
    def agent_defaults(self) -> Mapping[str, Any]:
        """Keys that all members suggest for an agent."""
        return _alike([own.agent_defaults for own in self._declared()])

    @property
    def limits_defaults(self) -> Mapping[str, Any]:
        """Keys that all members suggest for limits."""
        return _alike([own.limits_defaults for own in self._declared()])

    @property
    def demonstrates(self) -> bool:
        """True if one of the members can demonstrate; see `demonstrates_for`."""
        return any(can_demonstrate(member) for member in self.members())

    def demonstrates_for(self, task: Task) -> bool:
        """True if the environment of a task can demonstrate."""
        return can_demonstrate(*self.own(task))

    @property
    def inline(self) -> bool:
        """True if the calls of all members run on the event loop, or only wait there."""
        return all(own.is_inline for own in self._declared())

    @property
    def keeps_limits(self) -> bool:
        """True if all members limit calls themselves."""
        return all(own.keeps_limits for own in self._declared())

    @property
    def max_episodes(self) -> int | None:
        """Maximal number of episodes alive at a time, for the most limited member."""
        return min((n for own in self._declared() if (n := own.max_episodes) is not None), default=None)

    @property
    def max_steps(self) -> int | None:
        """The largest step limit of one that has any."""
        return largest(own.max_steps for own in self._declared())

    def start(self, task: Task) -> Episode:
        """Begin one attempt."""
        member, own = self.own(task)
        return member.start(own)

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give actions that solve `task` after `taken`; None where its environment cannot demonstrate."""
        member, own = self.own(task)
        return member.plan(own, taken) if isinstance(member, Oracle) and can_demonstrate(member, own) else None

    def recall(self, task: Task, taken: Sequence[str]) -> str:
        """Recall of the task's environment, where it has that; else nothing."""
        member, own = self.own(task)
        recall = Capabilities(member).recall  # what stands for another environment passes its methods on
        return str(recall(own, taken)) if recall else ""

    def subgoal(self, task: Task, taken: Sequence[str]) -> str:
        """Subgoal of the oracle, where the task's environment has that; else nothing."""
        member, own = self.own(task)
        subgoal = Capabilities(member).subgoal
        return str(subgoal(own, taken)) if subgoal else ""

    def _declared(self) -> list[Capabilities]:
        return [Capabilities(member) for member in self.members()]


def largest(found: Iterable[int | None]) -> int | None:
    """The largest of those that are there."""
    return max((n for n in found if n is not None), default=None)


def _alike(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Values on which all members agree."""
    return found[0] if all(one == found[0] for one in found) else {}
