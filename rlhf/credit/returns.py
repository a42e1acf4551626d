"""Returns: what is still to come, seen from each turn."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.data import Trajectory


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


def token_returns(trajectory: Trajectory, rewards_K: Sequence[float], gamma: float) -> tuple[tuple[float, ...], ...]:
    """Return `[N][T]` with G_t = r_t + γ G_{t+1} over the sampled tokens of all generations, `rewards_K` on turn ends.

    The reward of a turn is on the last token sampled up to its end. What the policy did not sample takes no time: the
    return is carried through observations unchanged.
    """
    backwards: list[tuple[float, ...]] = []
    running, earned = 0.0, 0.0  # return of the token after; rewards since that token
    for turn, reward in zip(reversed(trajectory.turns), reversed(rewards_K), strict=True):
        earned += reward
        for generation in reversed(turn.generations):
            row = []
            for _ in generation.token_ids:
                running, earned = earned + gamma * running, 0.0
                row.append(running)
            backwards.append(tuple(reversed(row)))
    return tuple(reversed(backwards))
