"""Verdict, score, scored group, values and credit: from a trajectory to one number per sampled token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf.data.task import origin_of
from rlhf.data.trajectory import Outcome, Trajectory
from rlhf.data.untrusted import number, shown
from rlhf.errors import DataError

#: `[G][N][T]`: trajectory, generation (all turns in order), sampled token.
TokensGNT = tuple[tuple[tuple[float, ...], ...], ...]
#: Ends of an episode that came from outside: the state it was cut in had a future.
_CUT = frozenset({Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT})


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgement of a reward on one trajectory, or of a verifier on one answer.

    Attributes:
        value: the reward of the whole trajectory.
        why: for the reader of the report.
        per_turn: `[K]` how `value` is spread over the turns, where the reward knows; they sum to `value`.
    """

    value: float
    why: str = ""
    per_turn: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        per_turn = () if self.per_turn is None else self.per_turn
        if not isinstance(per_turn, tuple | list):
            raise DataError(
                "per_turn is no tuple", where="Verdict", got=shown(per_turn), expected="a number for each turn, or None"
            )
        odd = [x for x in (self.value, *per_turn) if number(x) is None]
        if odd:
            raise DataError(
                "a verdict is not a finite number", where="Verdict", got=shown(odd[0]), expected="finite floats"
            )


@dataclass(frozen=True, slots=True)
class Score:
    """The weighted reward parts of one trajectory.

    Attributes:
        parts: the unweighted verdict of each reward, by its name.
        turns: `[K]` weighted reward of each turn; a part without per-turn values counts on the last turn.
        total: weighted sum of the parts; equals the sum of `turns` when there are turns.
        monitored: the verdict of each reward that is only monitored, by its name; nothing is trained or chosen by it.
            Stored records, and their Parquet files, have it as `watched`.
        monitor_errors: what went wrong with those that could not judge, by their names.
    """

    parts: Mapping[str, Verdict]
    turns: tuple[float, ...]
    total: float
    monitored: Mapping[str, Verdict] = field(default_factory=dict)
    monitor_errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt, kept on the group as data.

    Attributes:
        outcome: which part failed.
        message: what happened, for the reader.
        retryable: whether another try may succeed.
        trajectory: what was played before that, for the reader; None where it is not known.
    """

    attempt: int
    outcome: Outcome
    message: str
    retryable: bool = False
    trajectory: Trajectory | None = field(default=None, compare=False, repr=False)


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

    @property
    def origin(self) -> str:
        """Id of the task from its very beginning, where the attempts began in its middle; else that of the task."""
        return origin_of(self.task_id, self.trajectories[0].n_given) if self.trajectories else self.task_id

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
            if trajectory.outcome.is_infrastructure_error:
                raise DataError(
                    "an attempt with an infrastructure error has a score",
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
class Values:
    """Critic's values of a group's states, in units of the reward, before the update.

    Attributes:
        values_GNT: `[G][N][T]` the value of the state before each sampled token; of a critic of turns, that of the
            state before the turn.
        bootstrap_values_G: `[G]` the value of the state in which a limit cut the trajectory; 0.0 where it ended by
            itself, after which nothing can be earned.
        actions_GNT: `[G][N][T]` the value of taking the turn that each sampled token belongs to; None where the critic
            knows states alone.
    """

    values_GNT: TokensGNT
    bootstrap_values_G: tuple[float, ...]
    actions_GNT: TokensGNT | None = None

    def check(self, group: ScoredGroup) -> None:
        """Raise DataError unless there is one finite value for each sampled token and each cut of `group`."""
        for given in (self.values_GNT, *(() if self.actions_GNT is None else (self.actions_GNT,))):
            _check_tokens("values", given, group, hint="look for NaN in the critic's weights")
        if len(self.bootstrap_values_G) != len(group.trajectories) or not all(
            map(math.isfinite, self.bootstrap_values_G)
        ):
            raise DataError(
                "the bootstrap values do not match the trajectories",
                where=group.task_id,
                got=str(self.bootstrap_values_G),
                expected=f"{len(group.trajectories)} finite numbers",
            )
        for trajectory, value in zip(group.trajectories, self.bootstrap_values_G, strict=True):
            if value and trajectory.outcome not in _CUT:
                raise DataError(
                    "a terminated trajectory has a bootstrap value",
                    where=f"{group.task_id}, attempt {trajectory.attempt}, which is {trajectory.outcome}",
                    got=str(value),
                    expected=f"0.0 unless the outcome is {' or '.join(sorted(_CUT))}",
                )


@dataclass(frozen=True, slots=True)
class Credit:
    """One number per sampled token of a group.

    Attributes:
        advantages_GNT: `[G][N][T]`: trajectory, generation (all turns in order), sampled token.
        metrics: counters of the estimator (groups without signal, singletons, ...).
        returns_GNT: `[G][N][T]` what a critic is to be trained on, in units of the reward: the advantage before
            whitening plus the value; None where the estimator uses no critic.
        train_mask_G: `[G]` whether a trajectory is trained on; the others have no row, and so no part in the
            reduction or in KL and entropy terms. None where all are.
    """

    advantages_GNT: TokensGNT
    metrics: Mapping[str, float] = field(default_factory=dict)
    returns_GNT: TokensGNT | None = None
    train_mask_G: tuple[bool, ...] | None = None

    def check(self, group: ScoredGroup) -> None:
        """Raise DataError unless there is one finite number, and return, for each sampled token of `group`."""
        _check_tokens(
            "credit", self.advantages_GNT, group, hint="look for a division by 0, as by the deviation of equal scores"
        )
        if self.returns_GNT is not None:
            _check_tokens("returns of the credit", self.returns_GNT, group, hint="look for NaN in rewards and values")


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Figures of the trainer for each sampled token of a group before the update, nats; NaN where it does not train.

    Attributes:
        entropies_GNT: `[G][N][T]` entropy of the distribution that the token was drawn from.
        gaps_GNT: `[G][N][T]` the trainer's log-prob of the token less the sampler's.
    """

    entropies_GNT: TokensGNT
    gaps_GNT: TokensGNT


def _check_tokens(what: str, tokens_GNT: TokensGNT, group: ScoredGroup, hint: str) -> None:
    is_plural = what != "credit"
    shape = [[g.n_tokens for g in t.generations] for t in group.trajectories]
    got = [[len(row) for row in rows] for rows in tokens_GNT]
    if shape != got:
        raise DataError(
            f"{what} {'do' if is_plural else 'does'} not match the tokens",
            where=group.task_id,
            got=str(got),
            expected=str(shape),
        )
    if not all(all(map(math.isfinite, row)) for rows in tokens_GNT for row in rows):
        raise DataError(f"{what} {'are' if is_plural else 'is'} not finite", where=group.task_id, hint=hint)
