"""Duration-aware credit: a turn that took longer weighs more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.groups import with_counters
from rlhf.credit.wrapper import AdvantageWrapper
from rlhf.data import Credit, ScoredGroup, Trajectory
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DurationAware(AdvantageWrapper):
    """Advantage weighted by turn duration: Ã = min(Δt / mean Δt, `max_weight`) · A.

    Δt is the seconds of a turn, its mean over all turns of the step.

    Where attempts are collected as they end, quick actions are sampled more often, in proportion to 1 / Δt; the weight
    undoes it. Where a step waits for all of its attempts nothing needs undoing.

    Seconds are those of each turn; where a turn's are not known, as in attempts that older versions stored, it counts
    with the mean of its trajectory. A trajectory of which neither is known, or which has no turns, has weight 1 and
    stays out of the mean.

    Source: Reinforcement Learning for Machine Learning Engineering Agents, arXiv 2509.01684.
    """

    max_weight: Annotated[float, Field(gt=0)] = 5.0
    """Maximum weight, so that one slow call does not dominate the step; .inf is no bound."""

    def changed(self, groups: Sequence[ScoredGroup], credits: Sequence[Credit]) -> list[Credit]:
        """Return `credits`, each trajectory's times its weight."""
        known = [seconds for group in groups for t in group.trajectories for seconds in seconds_of(t)]
        mean = math.fsum(known) / len(known) if known else 1.0
        n_untimed = sum(not seconds_of(t) for group in groups for t in group.trajectories if t.turns)
        n_untimed += sum(not _is_known(t.duration_s) for group in groups for t in group.trajectories if not t.turns)
        changed = [
            replace(
                credit,
                advantages_GNT=tuple(
                    tuple(tuple(weight * x for x in row) for weight, row in zip(weights, rows, strict=True))
                    for weights, rows in zip(self._weights(group, mean), credit.advantages_GNT, strict=True)
                ),
            )
            for group, credit in zip(groups, credits, strict=True)
        ]
        return with_counters(changed, {"credit/n_untimed_trajectories": float(n_untimed)})

    def _weights(self, group: ScoredGroup, mean: float) -> list[list[float]]:
        """Return `[G][N]`, the weight of each generation."""
        found = []
        for t in group.trajectories:
            weights = [min(s / mean, self.max_weight) for s in seconds_of(t)] or [1.0] * len(t.turns)
            found.append([w for w, turn in zip(weights, t.turns, strict=True) for _ in turn.generations])
        return found


def seconds_of(trajectory: Trajectory) -> list[float]:
    """Return `[K]`, the seconds of each turn; nothing where they are not known."""
    own = [turn.duration_s for turn in trajectory.turns]
    if all(map(_is_known, own)):
        return own
    each = trajectory.duration_s / len(own)
    return [each] * len(own) if _is_known(each) else []


def _is_known(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
