"""Group selection: which groups of a step are trained on, and whether to draw more.

A step draws `tasks_per_step` tasks and shows the groups to the selection. It keeps some of them, or asks for another
round of tasks and is shown all groups again. What it leaves out is still recorded and counted; it has no advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Protocol, runtime_checkable

from pydantic.dataclasses import dataclass

from rlhf.capabilities import Capability, CapabilityView
from rlhf.data import ScoredGroup
from rlhf.errors import DataError
from rlhf.settings import STRICT


@plain_dataclass(frozen=True, slots=True)
class Selection:
    """Sampled groups to train on, and whether more tasks are to be sampled.

    Attributes:
        kept: indices of the groups to train on, ascending. Groups are kept whole: their baselines need all attempts.
        n_more: tasks to draw in another round before anything is trained; 0 is none, and then `kept` holds.
        factors: `[len(kept)]`, at least 0: what the advantages of each group are multiplied with; None is 1.
    """

    kept: tuple[int, ...]
    n_more: int = 0
    factors: tuple[float, ...] | None = None

    def check(self, n_groups: int, where: str) -> None:
        """Raise DataError unless this can be said of `n_groups` groups."""
        is_ascending = list(self.kept) == sorted(set(self.kept))
        if not is_ascending or (self.kept and not 0 <= self.kept[0] <= self.kept[-1] < n_groups):
            raise DataError(
                "a selection names groups that were not drawn, or one twice, or not in order",
                where=where,
                got=str(self.kept),
                expected=f"ascending indices below {n_groups}",
            )
        if self.factors is not None and (len(self.factors) != len(self.kept) or not all(f >= 0 for f in self.factors)):
            raise DataError(
                "the factors of a selection do not fit its groups",
                where=where,
                got=str(self.factors),
                expected=f"{len(self.kept)} numbers, at least 0",
            )
        if self.n_more < 0:
            raise DataError("a selection asks for a negative number of tasks", where=where, got=str(self.n_more))


@runtime_checkable
class GroupSelection(Protocol):
    """Group selection (dynamic sampling, variance filters): a frozen dataclass of its recipe keys, without state.

    One that has an attribute `max_empty_steps` ends the run after so many steps in a row that had nothing to train on.
    """

    def __call__(self, groups: Sequence[ScoredGroup], n_tasks: int, n_rounds: int) -> Selection:
        """Return which of `groups` are trained on, or that more are to be drawn.

        Args:
            groups: all that were drawn in this step, in the order of drawing.
            n_tasks: `tasks_per_step`: how many groups a step is meant to train on.
            n_rounds: rounds drawn so far, at least 1.

        Raises:
            TrainingError: training is not to go on with these.
        """


class SelectionCapabilities(CapabilityView):
    """Optional attributes of a selection, with a default for each that it leaves out."""

    max_rounds = Capability(1, int)
    """Most rounds of one step."""
    max_empty_steps = Capability[int | None](None, int)
    """See `GroupSelection`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class All:
    """Selection of every group of a single round."""

    def __call__(self, groups: Sequence[ScoredGroup], n_tasks: int, n_rounds: int) -> Selection:
        """Keep all."""
        return Selection(tuple(range(len(groups))))
