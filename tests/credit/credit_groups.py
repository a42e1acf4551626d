"""Scored groups with made-up tokens, for tests of credit."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.data import Action, Credit, Finish, Generation, Outcome, Prompt, Score, ScoredGroup, Trajectory, Turn


def turn(n_tokens: int = 2, state: str | None = None) -> Turn:
    """A turn with one generation of that many tokens."""
    generation = Generation(Prompt((1, 2)), (7,) * n_tokens, (-0.5,) * n_tokens, Finish.STOP, 0)
    return Turn(Action("act", (generation,)), "reply", state_key=state)


def trajectory(turns: Sequence[Turn], attempt: int = 0) -> Trajectory:
    return Trajectory("task", attempt, "opening", tuple(turns), Outcome.FAILED)


def group(
    rewards_GK: Sequence[Sequence[float]], states_GK: Sequence[Sequence[str | None]] | None = None
) -> ScoredGroup:
    """A group whose turns earned `rewards_GK` in `states_GK`."""
    states_GK = states_GK or [[None] * len(row) for row in rewards_GK]
    trajectories = [
        trajectory([turn(state=state) for state in states], attempt=i) for i, states in enumerate(states_GK)
    ]
    scores = [Score({}, tuple(row), float(sum(row))) for row in rewards_GK]
    return ScoredGroup("task", tuple(trajectories), tuple(scores))


def outcome_group(returns_G: Sequence[float]) -> ScoredGroup:
    """A group of one-turn trajectories with these returns."""
    return group([[r] for r in returns_G])


def per_turn(credit: Credit) -> list[list[float]]:
    """`[G][K]` the number of each turn of one generation; fails where its tokens differ."""
    numbers = []
    for rows in credit.tokens_GNT:
        assert all(len(set(row)) == 1 for row in rows)
        numbers.append([row[0] for row in rows])
    return numbers


def per_trajectory(credit: Credit) -> list[float]:
    """`[G]` the number of each trajectory; fails where its tokens differ."""
    for row in per_turn(credit):
        assert len(set(row)) == 1
    return [row[0] for row in per_turn(credit)]
