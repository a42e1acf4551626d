"""Returns: what is still to come, seen from each turn."""

from __future__ import annotations

from collections.abc import Sequence


def discounted_returns(rewards_K: Sequence[float], gamma: float) -> list[float]:
    """Return `[K]` with D_k = Σ_{l≥k} γ^{l−k} r_l, for the rewards of the K turns of one trajectory.

    The sum ends with the last turn: a trajectory cut by a limit is not bootstrapped. No turns give an empty list.
    """
    returns: list[float] = []
    running = 0.0
    for reward in reversed(rewards_K):
        running = reward + gamma * running
        returns.append(running)
    returns.reverse()
    return returns
