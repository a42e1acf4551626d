"""The contract of rewards: from a task and a trajectory, or a whole group, to verdicts; from an answer to a verdict."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, runtime_checkable

from rlhf.data import Task, Trajectory, Verdict


@runtime_checkable
class Verifier(Protocol):
    """A deterministic reward: whether an answer matches a reference. A plain function, sync or async, is enough."""

    def __call__(self, answer: str, reference: str) -> Verdict | float | Awaitable[Verdict | float]:
        """Judge `answer`, between 0 and 1; never raises on any text."""
        ...


@runtime_checkable
class Reward(Protocol):
    """A function of a task and a finished trajectory. A plain function, sync or async, is enough."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict | float | Awaitable[Verdict | float]:
        """Judge `trajectory`; a number is a verdict without a reason."""
        ...


def reads_tokens(reward: object) -> bool:
    """True if the reward reads sampled token ids (attribute `reads_tokens`)."""
    return bool(getattr(reward, "reads_tokens", False))


def is_penalty(reward: object) -> bool:
    """True if the reward is never above 0 (attribute `is_penalty`)."""
    return bool(getattr(reward, "is_penalty", False))


@runtime_checkable
class GroupReward(Protocol):
    """A reward that looks at all attempts at a task together, such as a vote. Sync or async; it needs no `__call__`.

    Where there is no group, as in an evaluation that attempts each task once, it is shown a group of one.
    """

    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> Sequence[Verdict | float]:
        """Judge every trajectory, in their order; attempts that ended by the failure of a part are not among them."""
        ...
