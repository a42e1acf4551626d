"""Trajectories for tests of rewards: what was said, and what was replied."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.data import Action, Finish, Generation, Outcome, Prompt, Task, Trajectory, Turn


def played(
    *said: str | tuple[str, str],
    n_tokens: Sequence[int] = (),
    version: int = 0,
    outcome: Outcome = Outcome.FAILED,
    attempt: int = 0,
) -> Trajectory:
    """An attempt: texts of actions, or pairs of action and reply; the tokens of each turn, 1 by default."""
    turns = []
    for i, one in enumerate(said):
        action, reply = (one, "") if isinstance(one, str) else one
        n = n_tokens[i] if n_tokens else 1
        generation = Generation(Prompt((1,)), (2,) * n, (-1.0,) * n, Finish.STOP, version)
        turns.append(Turn(Action(action, (generation,)), reply))
    return Trajectory("t", attempt, "", tuple(turns), outcome)


def task(reference: str | None = None) -> Task:
    """A task with a reference."""
    return Task("t", reference=reference)
