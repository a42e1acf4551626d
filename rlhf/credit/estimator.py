"""The contract of an advantage estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from rlhf.data import Credit, ScoredGroup


@runtime_checkable
class AdvantageEstimator(Protocol):
    """A frozen dataclass whose fields are its recipe keys."""

    needs_values: ClassVar[bool]
    min_group: ClassVar[int]
    """Smallest group size that gives any signal."""

    def __call__(self, group: ScoredGroup, values: Sequence[object] | None = None) -> Credit:
        """One number per sampled token of `group`, and counters of degenerate cases."""
        ...
