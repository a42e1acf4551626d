"""Duration-aware credit: a turn that took longer weighs more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.groups import with_counters
from rlhf.credit.wrapper import Wrapper
from rlhf.data import Credit, ScoredGroup
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DurationAware(Wrapper):
    """Ã = min(Δt / mean Δt, `max_weight`) · A, with Δt the seconds of a turn, its mean over all turns of the step.

    Where attempts are collected as they end, quick actions are sampled more often, in proportion to 1 / Δt; the weight
    undoes it. Where a step waits for all of its attempts nothing needs undoing.

    A trajectory records its own seconds and not those of its turns: Δt is their mean, the same for every turn of it. A
    trajectory whose seconds are not known, or which has no turns, has weight 1 and stays out of the mean.

    Source: Reinforcement Learning for Machine Learning Engineering Agents, arXiv 2509.01684.
    """

    max_weight: Annotated[float, Field(gt=0)] = 5.0
    """Largest weight: one hanging call must not make the step. .inf is no bound."""

    def changed(self, groups: Sequence[ScoredGroup], credits: Sequence[Credit]) -> list[Credit]:
        """Return `credits`, each trajectory's times its weight."""
        timed = [
            (t.duration_s, len(t.turns)) for group in groups for t in group.trajectories if _is_known(t.duration_s)
        ]
        seconds, n_turns = math.fsum(s for s, n in timed if n), sum(n for _, n in timed)
        mean = seconds / n_turns if n_turns else 1.0
        n_untimed = sum(len(group.trajectories) for group in groups) - len(timed)
        changed = [
            replace(
                credit,
                tokens_GNT=tuple(
                    tuple(tuple(weight * x for x in row) for row in rows)
                    for weight, rows in zip(self._weights(group, mean), credit.tokens_GNT, strict=True)
                ),
            )
            for group, credit in zip(groups, credits, strict=True)
        ]
        return with_counters(changed, {"credit/n_untimed_trajectories": float(n_untimed)})

    def _weights(self, group: ScoredGroup, mean: float) -> list[float]:
        return [
            min(t.duration_s / len(t.turns) / mean, self.max_weight) if t.turns and _is_known(t.duration_s) else 1.0
            for t in group.trajectories
        ]


def _is_known(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
