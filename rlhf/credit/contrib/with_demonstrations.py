"""Advantages of mixed groups of rollouts and demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, IgnoredKeys, Problem, no_effect
from rlhf.credit.estimator import missing_part
from rlhf.credit.groups import (
    CriticFree,
    broadcast_trajectories,
    group_counters,
    group_returns,
    is_constant,
    mean_and_std,
)
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Guided(CriticFree):
    """Advantage of groups with demonstrations: A_i = (R_i − mean R) / F, F = 1 or std R + ε.

    It is the same for every token of trajectory i.

    Mean and deviation are over the whole group, as in the paper, or with `baseline: own` over the policy's own attempts
    alone, as in its code: a demonstration does then not lower what the attempts get. R = (0, 0, 1) and a demonstration
    of 1: (−.5, −.5, .5, .5), or with the own baseline (−.333333, −.333333, .666667, .666667).

    Degenerate groups: equal scores of all give exactly 0, the demonstration included, so that nothing is imitated where
    everything is right. Own attempts of equal score have the deviation 0, and F is then 1: where all are wrong the
    demonstration alone has an advantage by the own baseline; so it has beside a single own attempt, whose score is then
    the mean (the authors take 0). Without own attempts the baseline is over the group.
    Without demonstrations this is `dr_grpo`, or `grpo`.

    Source: LUFFY, arXiv 2504.14945, and its code, `mix_core_alg.py`.
    """

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("normalize_std", False, ("ddof", "eps")),)

    baseline: Literal["group", "own"] = "group"
    """Attempts of the baseline: the whole group, or the policy's own."""
    normalize_std: bool = False
    """Divide by the standard deviation."""
    ddof: Literal[0, 1] = 1
    """1 divides the sum of squares by n − 1, 0 by n."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse stages without demonstrations."""
        if context.stage.group_demonstrations is not None:
            return
        if self.baseline == "own" and context.parent is None:
            why = "the stage adds no demonstrations: every attempt is the policy's own"
            yield no_effect(
                context.at("baseline"), "own", why, "remove the key, or set group_demonstrations: {per_group: 1}"
            )
        if not context.is_trained:
            same = "grpo" if self.normalize_std else "dr_grpo"
            do = f"set group_demonstrations: {{per_group: 1}}, or use {same}, which it then is"
            yield missing_part(self, context, "the stage adds no demonstrations", do)

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        own = [r for t, r in zip(group.trajectories, returns, strict=True) if not t.is_demonstration]
        compared = own if self.baseline == "own" and own else returns
        if is_constant(returns):
            return Credit(broadcast_trajectories(group, [0.0] * len(returns)), group_counters(returns))
        mean, std = mean_and_std(compared, self.ddof)
        factor = std + self.eps if self.normalize_std and std else 1.0
        # Equal scores are equal up to rounding: what is left of the difference is no advantage.
        advantages = [0.0 if is_constant([r, mean]) else (r - mean) / factor for r in returns]
        return Credit(broadcast_trajectories(group, advantages), group_counters(returns))
