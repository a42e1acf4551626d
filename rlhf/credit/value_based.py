"""Base of advantage estimators with a critic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.estimator import compute_advantages, require_values
from rlhf.credit.flat_tokens import FlatTokens, Floats, credits_of, flat, whitened
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CriticBased(ABC):
    """Base of critic-based estimators: advantages and returns of sampled tokens, whitened over the step.

    The value of the state in which a limit cut a trajectory (`Values.bootstrap_values_G`) stands for what would have
    followed; an episode that ended by itself has no future. With `whiten`, equal advantages everywhere, and a step of
    one token, give exactly 0 and count in `credit/n_zero_std_steps`. Returns are never whitened.
    """

    needs_values: ClassVar[bool] = True
    min_group: ClassVar[int] = 1

    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE λ: 1 uses the observed returns, 0 the critic alone; in between, lower variance with more bias."""
    whiten: bool = True
    """Whiten advantages: subtract the mean over the step's tokens and divide by their standard deviation, with n − 1.
    """
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`, which is taken to be the whole step."""
        return compute_advantages(self, [group], [require_values(values, type(self).__name__)])[0]

    def over_batch(self, groups: Sequence[ScoredGroup], values: Sequence[Values] | None = None) -> list[Credit]:
        """Return the credit of each group of a step; `compute_advantages` checks that the values match it."""
        values = require_values(values, type(self).__name__)
        line = FlatTokens.of(groups)
        values_N = flat(of_group.values_GNT for of_group in values)
        cut_S = np.array([x for of_group in values for x in of_group.bootstrap_values_G], np.float64)
        advantages_N, returns_N = self.estimate(line, values_N, cut_S)
        found = whitened(advantages_N, eps=self.eps) if self.whiten else advantages_N
        is_flat = found is None
        return credits_of(groups, np.zeros_like(values_N) if found is None else found, returns_N, is_flat=is_flat)

    @abstractmethod
    def estimate(self, line: FlatTokens, values_N: Floats, cut_S: Floats) -> tuple[Floats, Floats]:
        """Return the advantage and the return of each sampled token, `[N]` and `[N]`.

        Args:
            line: S trajectories with N sampled tokens.
            values_N: the value of the state before each token.
            cut_S: the value of the state each trajectory was cut in, or 0.
        """
