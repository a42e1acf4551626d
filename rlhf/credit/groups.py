"""Group statistics, and how a number per trajectory or per turn becomes a number per token.

Everything here is pure Python on short lists: a group has a handful of trajectories and a step has tens of thousands of
state groups, where the fixed cost of an array library would dominate; what looks at every token is in
`rlhf.credit.flat_tokens`. Sums are exact (`math.fsum`), so the order of a group's trajectories does not matter, not
even in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from rlhf.data import Credit, Score, ScoredGroup, Trajectory
from rlhf.data.generation import calls_of
from rlhf.data.scoring import TokensGNT
from rlhf.errors import DataError

#: Values closer than this, relative to the largest of them and 1, differ by rounding alone.
_ROUNDING = 1e-12


class CriticFree:
    """Base of estimators without a critic that compare the attempts at a task."""

    needs_values: ClassVar[bool] = False
    min_group: ClassVar[int] = 2


def group_returns(group: ScoredGroup) -> list[float]:
    """Return `[G]`, the total score of each trajectory.

    Raises:
        DataError: a total is not finite.
    """
    returns = [score.total for score in group.scores]
    if not all(math.isfinite(x) for x in returns):
        raise DataError(
            "a trajectory's score is not finite",
            where=f"group {group.task_id}",
            got=str(returns),
            expected="finite numbers",
            hint="a reward returned NaN or infinity: fix it, or let it raise so that the attempt is excluded",
        )
    return returns


def turn_rewards(group: ScoredGroup) -> list[tuple[float, ...]]:
    """Return `[G][K]`, the score of each turn of each trajectory.

    Raises:
        DataError: one of them is not finite.
    """
    rewards = [score.turns for score in group.scores]
    if not all(math.isfinite(x) for row in rewards for x in row):
        raise DataError("a turn's score is not finite", where=f"group {group.task_id}", got=str(rewards))
    return rewards


def call_numbers(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Generation numbers of each call of a trajectory: one, or several of a call that is recorded in pieces."""
    found: list[tuple[int, ...]] = []
    number = 0
    for turn in trajectory.turns:
        for call in calls_of(turn.generations):
            found.append(tuple(range(number, number + len(call))))
            number += len(call)
    return found


def per_turn(score: Score, reward: str, group: ScoredGroup) -> tuple[float, ...]:
    """Unweighted per-turn values of one reward. Raises DataError where it has no values per turn."""
    verdict = score.parts.get(reward)
    if verdict is None or verdict.per_turn is None:
        raise DataError(
            f"the reward '{reward}' has no values per turn",
            where=f"group {group.task_id}",
            got="no values per turn" if verdict else f"rewards {', '.join(score.parts) or 'without parts'}",
            expected="a Verdict with per_turn",
            hint="name a reward that judges each turn, such as environment, invalid_action or turn_cost",
        )
    return verdict.per_turn


def correct(group: ScoredGroup, above: float | None) -> list[bool]:
    """Correctness `[G]` of each trajectory: solved or, if `above` is given, a total score above it."""
    if above is None:
        return [trajectory.solved for trajectory in group.trajectories]
    return [score.total > above for score in group.scores]


def is_constant(values: Sequence[float]) -> bool:
    """True if all values are equal up to rounding; also for one value and for none."""
    if len(values) < 2:
        return True
    low, high = min(values), max(values)
    return high - low <= _ROUNDING * max(1.0, abs(low), abs(high))


def mean_and_std(values: Sequence[float], ddof: int = 1) -> tuple[float, float]:
    """Return the mean and the standard deviation sqrt(Σ (x − mean)² / (n − ddof)).

    Values that are equal up to rounding have a deviation of exactly 0; no values have mean 0.
    """
    if not values:
        return 0.0, 0.0
    mean = math.fsum(values) / len(values)
    if is_constant(values):
        return mean, 0.0
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - ddof))


def normalise(
    values: Sequence[float],
    *,
    by_std: bool,
    ddof: int = 1,
    eps: float = 1e-6,
    population: Sequence[float] | None = None,
) -> list[float]:
    """Normalised values (x − mean) / (std + ε), or x − mean where `by_std` is False.

    Mean and deviation are those of `population`, by default of `values` themselves. Where the population is constant,
    has one member or none, every result is exactly 0: there is nothing to compare with.
    """
    population = values if population is None else population
    if is_constant(population):
        return [0.0] * len(values)
    mean, std = mean_and_std(population, ddof)
    scale = std + eps if by_std else 1.0
    return [(x - mean) / scale for x in values]


def broadcast_turns(group: ScoredGroup, per_turn_GK: Sequence[Sequence[float]]) -> TokensGNT:
    """Give each sampled token the number of its turn.

    Args:
        group: G trajectories.
        per_turn_GK: `[G][K]`, one number for each turn of each trajectory.

    Returns:
        `[G][N][T]`: trajectory, generation (all turns in order), sampled token.

    Raises:
        DataError: the numbers do not match the turns.
    """
    got, expected = [len(row) for row in per_turn_GK], [len(t.turns) for t in group.trajectories]
    if got != expected:
        raise DataError(
            "numbers per turn do not match the turns",
            where=f"group {group.task_id}",
            got=str(got),
            expected=str(expected),
        )
    rows: dict[tuple[int, int], tuple[float, ...]] = {}  # by the very number and its count: equal rows are one tuple
    return tuple(
        tuple(
            rows.setdefault((id(value), n), (value,) * n)
            for turn, value in zip(trajectory.turns, row, strict=True)
            for n in (generation.n_tokens for generation in turn.generations)
        )
        for trajectory, row in zip(group.trajectories, per_turn_GK, strict=True)
    )


def broadcast_trajectories(group: ScoredGroup, values_G: Sequence[float]) -> TokensGNT:
    """Give each sampled token the number of its trajectory; `[G]` to `[G][N][T]`."""
    return broadcast_turns(
        group, [[value] * len(t.turns) for t, value in zip(group.trajectories, values_G, strict=True)]
    )


def group_counters(returns_G: Sequence[float]) -> dict[str, float]:
    """Counters of degenerate groups; they add up over the groups of a step.

    A group whose attempts all failed has no trajectories and counts nowhere.
    """
    return {
        "credit/n_groups": float(len(returns_G) > 0),
        "credit/n_singleton_groups": float(len(returns_G) == 1),
        "credit/n_zero_std_groups": float(len(returns_G) > 1 and is_constant(returns_G)),
    }


def with_counters(credits: Sequence[Credit], counters: Mapping[str, float]) -> list[Credit]:
    """Return `credits`, the first of which also has the counters of the whole step."""
    return [replace(c, metrics={**c.metrics, **counters}) if i == 0 else c for i, c in enumerate(credits)]
