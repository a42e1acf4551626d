"""GAE: generalised advantage estimation per token, with a critic."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.flat_tokens import FlatTokens, Floats, following, scan
from rlhf.credit.value_based import CriticBased
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GAE(CriticBased):
    """Token-level GAE: A_t = δ_t + γ λ A_{t+1}, δ_t = r_t + γ V_{t+1} − V_t, whitened.

    It runs over the sampled tokens of a trajectory.

    The critic is trained on the returns A_t + V_t. What the policy did not sample is not there: observations take no
    time, whatever a critic says of them. The reward of a turn lies on its last sampled token; that of a turn in which
    nothing was sampled goes to the turn before, or after where there is none. V after the last token is that of the
    state a limit cut the trajectory in, and 0 where the episode ended by itself.

    ε is added to the deviation, as everywhere here; verl adds 1e-8 to the variance, and raises for a step of one token
    where this gives 0.

    Source: High-dimensional continuous control using GAE, arXiv 1506.02438; PPO, arXiv 1707.06347; verl,
    `compute_gae_advantage_return`.
    """

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per sampled token."""

    def estimate(self, line: FlatTokens, values_N: Floats, cut_S: Floats) -> tuple[Floats, Floats]:
        """Return the advantage and the return of each sampled token."""
        deltas_N = line.rewards_N + self.gamma * following(values_N, line.tokens_S, cut_S) - values_N
        advantages_N = scan(deltas_N, line.tokens_S, self.gamma * self.lam)
        return advantages_N, advantages_N + values_N
