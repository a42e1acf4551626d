"""Bi-level GAE: turn-level GAE, then token-level GAE within each turn."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.flat_tokens import FlatTokens, Floats, following, scan
from rlhf.credit.value_based import CriticBased
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BiLevelGAE(CriticBased):
    """Bi-level GAE: over turns with γ_H, then over the tokens of each turn with γ.

    A = H_k at the last token of turn k, the turn-level advantage, in which the token-level recursion ends.

        H_k = δ_k + γ_H λ H_{k+1},  δ_k = r_k + γ_H V_{k+1} − V_k      V_k: before the last sampled token of turn k
        A_t = δ_t + γ λ A_{t+1},    δ_t = γ V_{t+1} − V_t              before the last token of a turn

    Whitened. The critic is trained on A_t + V_t. Nothing but H passes from one turn to another. A turn in which nothing
    was sampled does not count as one; its reward goes to the turn before, or after where there is none. V after the
    last turn is that of the state a limit cut the trajectory in, and 0 where the episode ended by itself.

    Turns are known here. The authors' code takes every token with a reward for the end of a turn: it joins turns
    without reward to the next, and cannot do with an episode that earned nothing.

    Source: RAGEN, arXiv 2504.20073; `compute_bi_level_gae_advantage_return`.
    """

    turn_discount: ClassVar[str] = "turn_gamma"

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per sampled token within a turn."""
    turn_gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """γ_H, discount per turn."""

    def estimate(self, line: FlatTokens, values_N: Floats, cut_S: Floats) -> tuple[Floats, Floats]:
        """Return the advantage and the return of each sampled token."""
        values_K = values_N[line.last_K]
        deltas_K = line.rewards_K + self.turn_gamma * following(values_K, line.turns_S, cut_S) - values_K
        deltas_N = self.gamma * following(values_N, line.tokens_K, values_K) - values_N
        deltas_N[line.last_K] = scan(deltas_K, line.turns_S, self.turn_gamma * self.lam)
        advantages_N = scan(deltas_N, line.tokens_K, self.gamma * self.lam)
        return advantages_N, advantages_N + values_N
