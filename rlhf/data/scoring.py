"""Verdict, score, scored group and credit: from a trajectory to one number per sampled token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf.data.trajectory import Outcome, Trajectory
from rlhf.errors import DataError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reward says of one trajectory, or a verifier of one answer.

    Attributes:
        value: the reward of the whole trajectory.
        why: for the reader of the report.
        per_turn: `[K]` how `value` is spread over the turns, where the reward knows; they sum to `value`.
    """

    value: float
    why: str = ""
    per_turn: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        numbers = (self.value, *(self.per_turn or ()))
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
            raise DataError(
                "a verdict is not a finite number", where="Verdict", got=repr(numbers), expected="finite floats"
            )


@dataclass(frozen=True, slots=True)
class Score:
    """The weighted reward parts of one trajectory.

    Attributes:
        parts: the unweighted verdict of each reward, by its name.
        turns: `[K]` weighted reward of each turn; a part without per-turn values counts on the last turn.
        total: weighted sum of the parts; equals the sum of `turns` when there are turns.
    """

    parts: Mapping[str, Verdict]
    turns: tuple[float, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt, kept on the group as data.

    Attributes:
        outcome: which part failed.
        message: what happened, for the reader.
        retryable: whether another try may succeed.
    """

    attempt: int
    outcome: Outcome
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The scored trajectories of one task, and the attempts that failed. Groups are keyed by the task.

    Attributes:
        task_id: the task all of them attempted.
        trajectories: `[G]` records of the policy's doing, failures of parts excluded.
        scores: `[G]` aligned with `trajectories`.
        failures: attempts that say nothing about the policy.
    """

    task_id: str
    trajectories: tuple[Trajectory, ...]
    scores: tuple[Score, ...]
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        if len(self.trajectories) != len(self.scores):
            raise DataError(
                "trajectories and scores differ in number",
                where=f"ScoredGroup {self.task_id}",
                got=f"{len(self.trajectories)} trajectories, {len(self.scores)} scores",
            )
        for trajectory, score in zip(self.trajectories, self.scores, strict=True):
            if trajectory.task_id != self.task_id:
                raise DataError(
                    "a trajectory of another task is in the group",
                    where=f"ScoredGroup {self.task_id}",
                    got=trajectory.task_id,
                    expected=self.task_id,
                )
            if trajectory.outcome.is_failure_of_a_part:
                raise DataError(
                    "a failed attempt is scored",
                    where=f"ScoredGroup {self.task_id}",
                    got=str(trajectory.outcome),
                    expected="the attempt as a Failure",
                )
            if len(score.turns) != len(trajectory.turns):
                raise DataError(
                    "turns and turn rewards differ in number",
                    where=f"ScoredGroup {self.task_id}",
                    got=f"{len(trajectory.turns)} turns, {len(score.turns)} rewards",
                )


@dataclass(frozen=True, slots=True)
class Credit:
    """One number per sampled token of a group.

    Attributes:
        tokens_GNT: `[G][N][T]`: trajectory, generation (all turns in order), sampled token.
        metrics: counters of the estimator (groups without signal, singletons, ...).
    """

    tokens_GNT: tuple[tuple[tuple[float, ...], ...], ...]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def check(self, group: ScoredGroup) -> None:
        """Raise DataError unless there is one finite number for each sampled token of `group`."""
        shape = [[len(g.token_ids) for g in t.generations] for t in group.trajectories]
        got = [[len(row) for row in rows] for rows in self.tokens_GNT]
        if shape != got:
            raise DataError("credit does not match the tokens", where=group.task_id, got=str(got), expected=str(shape))
        if not all(math.isfinite(x) for rows in self.tokens_GNT for row in rows for x in row):
            raise DataError("credit is not finite", where=group.task_id, hint="look for NaN in the rewards")
