"""The contract of rewards: from (task, trajectory) to a verdict, and from (answer, reference) to a verdict."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rlhf.data import Task, Trajectory, Verdict


@runtime_checkable
class Verifier(Protocol):
    """A deterministic reward: whether an answer matches a reference."""

    def __call__(self, answer: str, reference: str) -> Verdict | float:
        """Judge `answer`; never raises on any text."""
        ...


@runtime_checkable
class Reward(Protocol):
    """A function of a task and a finished trajectory. A plain function, sync or async, is enough."""

    async def __call__(self, task: Task, trajectory: Trajectory) -> Verdict | float:
        """Judge `trajectory`; a number is a verdict without a reason."""
        ...
