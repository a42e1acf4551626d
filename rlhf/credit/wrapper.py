"""Base of advantage wrappers: estimators around another estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.estimator import AdvantageEstimator, compute_advantages
from rlhf.credit.grpo import GRPO
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdvantageWrapper(ABC):
    """Changes the numbers of an inner estimator, which may be a wrapper itself.

    What the inner estimator needs, a critic, a size of group or all groups of a step, the wrapper needs. The returns
    that a critic is trained on stay those of the inner estimator.
    """

    inner: AdvantageEstimator = Field(default_factory=GRPO)
    """The wrapped estimator."""

    @property
    def needs_values(self) -> bool:
        """True if the inner estimator needs a critic."""
        return self.inner.needs_values

    @property
    def min_group(self) -> int:
        """Smallest group size that gives the inner estimator any signal."""
        return self.inner.min_group

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`, which is taken to be the whole step."""
        return self.changed([group], [self.inner(group, values)])[0]

    def over_batch(self, groups: Sequence[ScoredGroup], values: Sequence[Values] | None = None) -> list[Credit]:
        """Return the credit of each group of a step."""
        return self.changed(groups, compute_advantages(self.inner, groups, values))

    @abstractmethod
    def changed(self, groups: Sequence[ScoredGroup], credits: Sequence[Credit]) -> list[Credit]:
        """Return what the wrapper makes of the inner `credits`, one for each of `groups`."""
