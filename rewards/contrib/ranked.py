"""Several weak signals in order of importance: the first that tells two attempts apart decides."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rewards.base import Reward
from rewards.combinators.ask import ask
from rlhf.data import Task, Trajectory, Verdict
from rlhf.settings import STRICT

_Margin = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Factor:
    """Ranking signal with the smallest meaningful difference."""

    reward: Reward
    """A reward or a verifier, with its kind and keys; more is better."""
    margin: _Margin = 0.0
    """Differences up to this are none."""
    margin_std: _Margin = 0.0
    """And up to this many standard deviations of the signal in the group (ddof 0)."""


def decided_at(a: Sequence[float], b: Sequence[float], margins: Sequence[float]) -> int:
    """Index from 0 of the first factor with |a_i − b_i| > δ_i; −1 where there is none.

    a = (.5, .9), b = (.52, .1), δ = .05: the first is a tie, so the second decides, for a.
    """
    return next((i for i, (x, y, d) in enumerate(zip(a, b, margins, strict=True)) if abs(x - y) > d), -1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ranked:
    """Hierarchical comparison: ½ + the mean over the group's others of ±½ · `decay`^level, 0 for a tie.

    Each attempt is compared with every other by the first factor that tells them apart by more than its margin; level
    counts from 0. With `decay` 1 it is the share of comparisons won, ties counting half. An attempt alone earns ½.

    Source: HERON, arXiv 2309.02632, which makes preference pairs of such comparisons to train a reward model; here they
    are the reward. Comparisons need not be transitive.
    """

    factors: tuple[Factor, ...]
    """The signals, the most important first."""
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Decay of a comparison with each undecided level (HERON's code has .5)."""

    def __post_init__(self) -> None:
        if not self.factors:
            raise ValueError("factors: at least one signal to compare by")

    async def over_group(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Judge a group; raises what the factors raise."""
        signals = [[(await ask(f.reward, task, t)).value for f in self.factors] for t in trajectories]
        return self.compare(signals)

    def compare(self, signals_GF: Sequence[Sequence[float]]) -> list[Verdict]:
        """Judge attempts by their signals `[G][F]`."""
        columns = list(zip(*signals_GF, strict=True))
        margins = [
            f.margin + f.margin_std * statistics.pstdev(column)
            for f, column in zip(self.factors, columns, strict=False)
        ]
        verdicts = []
        for i, mine in enumerate(signals_GF):
            marks = [self._mark(mine, other, margins) for j, other in enumerate(signals_GF) if j != i]
            value = 0.5 + (statistics.fmean(marks) / 2 if marks else 0.0)
            won, lost = sum(m > 0 for m in marks), sum(m < 0 for m in marks)
            verdicts.append(Verdict(value, why=f"better than {won}, worse than {lost} of {len(marks)}"))
        return verdicts

    def _mark(self, mine: Sequence[float], other: Sequence[float], margins: Sequence[float]) -> float:
        level = decided_at(mine, other, margins)
        return 0.0 if level < 0 else self.decay**level * (1 if mine[level] > other[level] else -1)
