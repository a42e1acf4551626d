"""Self-play credit: each seat of a game is credited with its own rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from agents.contrib.self_play import SelfPlay
from rlhf.checking import CheckContext, Problem
from rlhf.credit.estimator import AdvantageEstimator, compute_advantages, missing_part, with_nested
from rlhf.credit.groups import turn_rewards
from rlhf.credit.grpo import GRPO
from rlhf.data import Credit, Score, ScoredGroup, Trajectory, Turn, Values
from rlhf.data.trajectory import SEAT
from rlhf.settings import STRICT


@plain_dataclass(frozen=True, slots=True)
class _Side:
    """Attempts of a group, seen from one seat.

    Attributes:
        number: of the group that it was cut from.
        group: the trajectories in which the seat had a turn, cut to these turns.
        places: of each of them, its number in the whole group and those of its generations.
    """

    number: int
    group: ScoredGroup
    places: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Seats:
    """Self-play advantage: `inner` for each seat alone, compared with that seat in the group's other attempts.

    A turn's reward is that of the seat that had the turn. To the others it is worth

        −r where what one wins the others lose (`opposite`), r where they play together (`same`), else 0 (`own`).

    What a seat earns by the turns of others counts on its last turn before them, or on its first turn if there is none
    before. A seat's turns are then an attempt of their own, with these rewards, and the attempts of a group at a
    task are a group for each seat, so that the advantage of moving first is in the baseline and not in the credit.

    A seat that another than the policy had in an attempt, such as an older version, is given no credit there and is
    compared with nobody.

    Who had a turn is in its note `seat`, which an agent of kind `self_play` leaves, or else in the role of what was
    sampled for it. Plain actions without a note are a seat of their own, and where there are no others this is `inner`.
    The outcome stays that of the whole episode.

    Worked: player 0 and player 1 move in turn, two moves each; player 1 wins by its second, which is rewarded with 1.
    `opposite`: player 1 earns (0, 1), player 0 (0, −1); `same`: both (0, 1); `own`: (0, 1) and (0, 0).

    Source: baselines of each role in self-play, SPIRAL, arXiv 2506.24119, whose baseline is a moving average.
    """

    #: True if it needs a critic: never.
    needs_values: ClassVar[bool] = False

    inner: AdvantageEstimator = Field(default_factory=GRPO)
    """Estimator for the turns of one seat."""
    others: Literal["opposite", "same", "own"] = "opposite"
    """Sign of a turn's reward for the other seats."""

    def __post_init__(self) -> None:
        """Refuse an estimator that needs a critic or the success of a seat: both are of the whole episode."""
        if self.inner.needs_values:
            raise ValueError(
                f"inner is {type(self.inner).__name__}, which needs a critic; expected one that compares attempts, "
                "such as grpo: a critic's values are not split by seat"
            )
        for part in with_nested(self.inner):
            if getattr(part, "correct_above", 0.0) is None:
                raise ValueError(
                    f"correct_above of {type(part).__name__} is null, and the success of a game is that of its first "
                    "seat; expected the score above which a seat has won, such as correct_above: 0"
                )

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a single-seat game, except with an agent of kind `self_play`, which measures its seats."""
        opponents = context.stage.opponents
        if opponents is not None and opponents.by == "turn":
            why = "a seat that an older version has for a turn gets no credit in the whole attempt"
            yield missing_part(self, context, why, "use its inner estimator alone, or opponents: {by: seat}")
        if not isinstance(context.recipe.agent, SelfPlay):
            yield from self.check_seats(context)

    def check_seats(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a game with one seat; where older versions have no seat either, they say so."""
        if len(context.recipe.properties.seats) < 2 and context.stage.opponents is None:
            yield Problem(
                "this estimator compares by seats, and the environment has one",
                where=context.at("kind"),
                got="seats",
                expected="an environment whose `properties` name two seats or more",
                do="use its inner estimator alone, or a game with several seats",
            )

    @property
    def min_group(self) -> int:
        """Smallest group size that gives the inner estimator any signal."""
        return self.inner.min_group

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`, which is taken to be the whole step."""
        return self.over_batch([group])[0]

    def over_batch(self, groups: Sequence[ScoredGroup]) -> list[Credit]:
        """Return the credit of each group of a step."""
        sides = [side for number, group in enumerate(groups) for side in self._sides(number, group)]
        rows = [[[(0.0,) * g.n_tokens for g in t.generations] for t in group.trajectories] for group in groups]
        metrics = {"credit/n_seat_groups": float(len(sides))}
        for side, credit in zip(sides, compute_advantages(self.inner, [side.group for side in sides]), strict=True):
            for name, value in credit.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
            for (i, places), found in zip(side.places, credit.advantages_GNT, strict=True):
                for n, row in zip(places, found, strict=True):
                    rows[side.number][i][n] = row
        return [Credit(tuple(map(tuple, of)), metrics if k == 0 else {}) for k, of in enumerate(rows)]

    def _sides(self, number: int, group: ScoredGroup) -> list[_Side]:
        """The group once for each seat, in the order of their first turns."""
        rewards_GK = turn_rewards(group)
        seats_GK = [list(map(seat_of, t.turns)) for t in group.trajectories]
        others_G = list(map(seats_of_others, group.trajectories))
        sides = []
        for seat in dict.fromkeys(seat for seats_K in seats_GK for seat in seats_K):
            of_each = enumerate(zip(seats_GK, others_G, strict=True))
            members = [i for i, (seats_K, others) in of_each if seat in seats_K and seat not in others]
            if not members:
                continue
            trajectories = tuple(_cut(group.trajectories[i], seats_GK[i], seat) for i in members)
            scores = tuple(self._score(group.scores[i], seats_GK[i], rewards_GK[i], seat) for i in members)
            places = tuple((i, _generations(group.trajectories[i], seats_GK[i], seat)) for i in members)
            sides.append(_Side(number, ScoredGroup(group.task_id, trajectories, scores, group.failures), places))
        return sides

    def _score(self, score: Score, seats_K: Sequence[str], rewards_K: Sequence[float], seat: str) -> Score:
        """Score of a seat: rewards of its own turns, and of the other seats' turns that follow each."""
        factor = {"opposite": -1.0, "same": 1.0, "own": 0.0}[self.others]
        earned: list[list[float]] = []
        early: list[float] = []
        for who, reward in zip(seats_K, rewards_K, strict=True):
            if who == seat:
                earned.append([reward])
            else:
                (earned[-1] if earned else early).append(factor * reward)
        earned[0] += early
        turns = tuple(math.fsum(of_turn) for of_turn in earned)
        own = [k for k, who in enumerate(seats_K) if who == seat]
        parts = {
            name: verdict
            if verdict.per_turn is None
            else replace(verdict, per_turn=tuple(verdict.per_turn[k] for k in own))
            for name, verdict in score.parts.items()
        }
        return Score(parts, turns, math.fsum(turns))


def seat_of(turn: Turn) -> str:
    """Seat of a turn, by its note; without one, by the role of its last generation."""
    role = turn.generations[-1].role if turn.generations else ""
    return turn.action.notes.get(SEAT, role)


def seats_of_others(trajectory: Trajectory) -> frozenset[str]:
    """Seats of an attempt that opponents played; see `Generation.opponent`."""
    return frozenset(seat_of(turn) for turn in trajectory.turns if any(g.opponent for g in turn.generations))


def _cut(trajectory: Trajectory, seats_K: Sequence[str], seat: str) -> Trajectory:
    """The turns of one seat as a trajectory of their own."""
    turns = tuple(turn for turn, who in zip(trajectory.turns, seats_K, strict=True) if who == seat)
    return replace(trajectory, turns=turns, n_given=0, n_shared=0, parent=None)


def _generations(trajectory: Trajectory, seats_K: Sequence[str], seat: str) -> tuple[int, ...]:
    """Numbers of the generations of one seat."""
    whose = [who for turn, who in zip(trajectory.turns, seats_K, strict=True) for _ in turn.generations]
    return tuple(n for n, who in enumerate(whose) if who == seat)
