"""The contract of a task sampler: which tasks a step attempts.

A sampler in a recipe is a frozen dataclass; what it starts is live and remembers. What it remembers is part of a
checkpoint, so that a resumed run draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rlhf.capabilities import Capability, CapabilityView
from rlhf.data import ScoredGroup, Task, Trajectory


@runtime_checkable
class Stateful(Protocol):
    """A part of a stage that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers: numbers, texts, tensors, and lists and dictionaries of them."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned in an earlier process."""


@runtime_checkable
class TaskSource(Stateful, Protocol):
    """Draws the tasks of a stage. A step may be begun and never finished, so only `learn` changes what it remembers."""

    def draw(self, n: int, already: int = 0) -> list[Task]:
        """Return `n` tasks for the present step, of which `already` have been drawn before in this step."""

    def learn(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """Update on a finished step, once. Returns what is logged of it.

        Args:
            groups: of all tasks drawn in the step, in the order they were drawn in.
        """


@runtime_checkable
class TaskSampler(Protocol):
    """Settings of a task sampler, a frozen dataclass of its recipe keys; `start` gives the sampler, which has state.

    One that draws tasks which begin in the middle has an attribute `replays = True`: the recipe is then checked for an
    environment and an agent that can do this.
    """

    def start(self, tasks: Sequence[Task], seed: int) -> TaskSource:
        """Return the source of a stage that begins.

        Args:
            tasks: all of the stage's split, in the environment's order; at least one.
            seed: of the run; one seed gives one order.
        """


class SamplerCapabilities(CapabilityView):
    """Optional attributes of a sampler, with a default for each that it leaves out."""

    is_stream = Capability(False, bool)
    """True if drawn tasks do not depend on earlier outcomes, so that later ones can be drawn ahead."""


@runtime_checkable
class DemonstratedSampler(TaskSampler, Protocol):
    """A sampler that needs demonstrations: the environment's oracle plays them before the run begins."""

    @property
    def n_demonstrations(self) -> int:
        """Number of demonstrated tasks of the stage's split, from the first on."""

    def shown(self, demonstrations: Sequence[Trajectory]) -> TaskSampler:
        """Return the sampler that has seen `demonstrations`: one of each task, without tokens, maybe unsolved."""
