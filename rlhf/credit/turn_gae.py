"""Turn-level GAE: one advantage per turn, with a critic's value of each turn's state."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.flat_tokens import FlatTokens, Floats, following, scan
from rlhf.credit.value_based import CriticBased
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TurnGAE(CriticBased):
    """Turn-level GAE: A_k = δ_k + γ λ A_{k+1}, δ_k = r_k + γ V_{k+1} − V_k, whitened.

    It is the same for every token of turn k.

    V_k is the critic's value before the first sampled token of turn k; of its other values nothing is used. The critic
    is trained on A_k + V_k at every token of the turn: within a turn no reward falls and no time passes. A turn in
    which nothing was sampled does not count as one; its reward goes to the turn before, or after where there is none.

    Whitening counts tokens, so long turns weigh more in mean and deviation.

    Source: High-dimensional continuous control using GAE, arXiv 1506.02438, with turns for steps; RAGEN, arXiv
    2504.20073.
    """

    turn_discount: ClassVar[str] = "gamma"

    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount per turn."""

    def estimate(self, line: FlatTokens, values_N: Floats, cut_S: Floats) -> tuple[Floats, Floats]:
        """Return the advantage and the return of each sampled token."""
        values_K = values_N[line.first_K]
        deltas_K = line.rewards_K + self.gamma * following(values_K, line.turns_S, cut_S) - values_K
        advantages_K = scan(deltas_K, line.turns_S, self.gamma * self.lam)
        return np.repeat(advantages_K, line.tokens_K), np.repeat(advantages_K + values_K, line.tokens_K)
