"""The contract of an advantage estimator, and how one is applied to the groups of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rlhf.data import Credit, ScoredGroup
from rlhf.errors import DataError


@runtime_checkable
class AdvantageEstimator(Protocol):
    """A frozen dataclass whose fields are its recipe keys.

    Where its statistics are over all groups of a step, it also has a method `over_batch` (see `BatchEstimator`).
    """

    @property
    def needs_values(self) -> bool:
        """Whether it needs a critic."""
        ...

    @property
    def min_group(self) -> int:
        """Smallest group size that gives any signal."""
        ...

    def __call__(self, group: ScoredGroup, values: Sequence[object] | None = None) -> Credit:
        """One number per sampled token of `group`, and counters of degenerate cases."""
        ...


@runtime_checkable
class BatchEstimator(Protocol):
    """What an estimator has whose numbers for one group depend on the other groups of the step."""

    def over_batch(self, groups: Sequence[ScoredGroup]) -> list[Credit]:
        """Credit of each of `groups`, in their order. Counters of the whole step stand in the first credit alone."""
        ...


def credit_of(estimator: AdvantageEstimator, groups: Sequence[ScoredGroup]) -> list[Credit]:
    """Return the credit of each group of a step: over all of them at once where the estimator can, else one by one.

    Raises:
        DataError: a score is not finite, or `over_batch` returned another number of credits than there are groups.
    """
    if not isinstance(estimator, BatchEstimator):
        return [estimator(group) for group in groups]
    credits = estimator.over_batch(groups)
    if len(credits) != len(groups):
        raise DataError(
            "credit does not match the groups",
            where=f"{type(estimator).__name__}.over_batch",
            got=f"{len(credits)} credits",
            expected=f"one for each of {len(groups)} groups",
        )
    return credits
