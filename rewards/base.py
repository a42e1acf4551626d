"""Contracts of rewards (of a trajectory or a group) and verifiers (of an answer)."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from rlhf.capabilities import Capability, CapabilityView
from rlhf.data import Task, Trajectory, Verdict


@runtime_checkable
class Verifier(Protocol):
    """A deterministic reward: whether an answer matches a reference. A plain function, sync or async, is enough."""

    def __call__(self, answer: str, reference: str) -> Verdict | float | Awaitable[Verdict | float]:
        """Judge `answer`, between 0 and 1; never raises on any text."""


@runtime_checkable
class Reward(Protocol):
    """A function of a task and a finished trajectory. A plain function, sync or async, is enough."""

    def __call__(self, task: Task, trajectory: Trajectory) -> Verdict | float | Awaitable[Verdict | float]:
        """Judge `trajectory`; a number is a verdict without a reason."""


def reads_tokens(reward: object) -> bool:
    """True if the reward reads sampled token ids (attribute `reads_tokens`)."""
    return bool(Capabilities(reward).reads_tokens)


def is_penalty(reward: object) -> bool:
    """True if the reward is never above 0 (attribute `is_penalty`)."""
    return bool(Capabilities(reward).is_penalty)


@runtime_checkable
class GroupReward(Protocol):
    """A reward that looks at all attempts at a task together, such as a vote. Sync or async; it needs no `__call__`.

    Where there is no group, as in an evaluation that attempts each task once, it is shown a group of one.
    """

    def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> Sequence[Verdict | float]:
        """Verdicts on every trajectory of a group, in order; attempts with a failed part are left out."""


class Capabilities(CapabilityView):
    """Optional members of a reward or a verifier, with their defaults."""

    inline = Capability(False, bool)
    """True if it is quick and cannot hang, so that it is called on the event loop."""
    over_group = Capability[Any](None)
    """See `GroupReward`."""
    reads_tokens = Capability[object](False)
    """True if it scores what was sampled, and may refuse an attempt in which nothing was."""
    is_penalty = Capability[object](False)
    """True if it is never above 0."""
    marks_solved = Capability[object](True)
    """A value of 1 says that the attempt is solved; False where only a `success_threshold` can say so, as of values on
    a scale of their own or relative to the group's."""
    reads_reply = Capability(False, bool)
    """Of a verifier: it is given the whole reply, without thoughts, in place of the answer in it."""
    needs_reference = Capability[object](None)
    """True if it compares with the task's reference; False says of all that its keys hold too that they do not."""
    check_policy = Capability[Callable[[Any], object]](lambda tokenizer: None, Callable)
    """Is called once with the policy's tokenizer, to load models and refuse what does not fit."""
    examples = Capability[Sequence[tuple[str, str]]](())
    """(answer, reference) pairs that deserve full marks."""
    slow_s = Capability[Any](1.0)
    """Seconds that one call may take."""
    weight = Capability[object](1.0)
    """Weight of a plug-in reward."""
    name = Capability[object]("reward")
    """Name of a plug-in reward."""


def name_of(reward: Any) -> str:
    """Name of a function, or of the class of a reward, for messages."""
    return str(reward.__name__) if inspect.isroutine(reward) or inspect.isclass(reward) else type(reward).__name__
