"""Returns: discounted reward-to-go per turn."""

from __future__ import annotations

from collections.abc import Sequence


def discounted_returns(rewards_K: Sequence[float], gamma: float) -> list[float]:
    """Discounted returns `[K]` of the K turns of a trajectory: D_k = Σ_{l≥k} γ^{l−k} r_l.

    The sum ends with the last turn: a trajectory cut by a limit is not bootstrapped. No turns give an empty list.
    """
    returns: list[float] = []
    running = 0.0
    for reward in reversed(rewards_K):
        running = reward + gamma * running
        returns.append(running)
    returns.reverse()
    return returns
