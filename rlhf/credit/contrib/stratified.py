"""Stratified GRPO: group normalisation within strata of equally many tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import IgnoredKeys
from rlhf.credit.groups import CriticFree, broadcast_trajectories, group_counters, group_returns, normalise
from rlhf.data import Credit, ScoredGroup, Trajectory, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Stratified(CriticFree):
    """Stratified advantage: a blend of normalisation within the stratum and within the group.

    A_i = α (R_i − mean_s) / (std_s + ε) + (1 − α) (R_i − mean) / (std + ε), for every token of trajectory i.

    mean_s and std_s are over the stratum: the trajectories of the group with as many calls, of a search engine for
    instance. What tells the strata apart, mean_s − mean, reaches the gradient through the second term alone. A stratum
    of one gives 0 in the first term; equal scores and a lone trajectory give exactly 0.

    α is not known from the authors, of whom no code was found; 0.8 is a definition of ours, 1 is their formula.

    Source: Stratified GRPO, arXiv 2510.06214.
    """

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("alpha", 0, ("calls", "width")),)

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.8
    """α, the weight of the comparison within strata."""
    calls: str | None = None
    """Regular expression: a turn is a call if this is found in its action. null counts every turn."""
    width: Annotated[int, Field(ge=1)] = 1
    """Width of a stratum in numbers of calls: with 2, trajectories of 2 and 3 calls share one."""
    ddof: Literal[0, 1] = 0
    """1 divides the sum of squares by n − 1, 0 by n."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to both standard deviations."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.calls or "")
        except re.error as error:
            raise ValueError(f"calls must be a regular expression, and {self.calls!r} is none: {error}") from error

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        strata: dict[int, list[int]] = {}
        for i, trajectory in enumerate(group.trajectories):
            strata.setdefault(self.n_calls(trajectory) // self.width, []).append(i)
        advantages = [(1 - self.alpha) * a for a in self._normalise(returns)]
        for members in strata.values():
            for i, within in zip(members, self._normalise([returns[i] for i in members]), strict=True):
                advantages[i] += self.alpha * within
        n_single = sum(len(members) == 1 for members in strata.values()) if len(returns) > 1 else 0
        return Credit(
            broadcast_trajectories(group, advantages),
            group_counters(returns) | {"credit/n_singleton_strata": float(n_single)},
        )

    def n_calls(self, trajectory: Trajectory) -> int:
        """Turns that are calls."""
        return sum(self.calls is None or bool(re.search(self.calls, t.action.text)) for t in trajectory.turns)

    def _normalise(self, values: Sequence[float]) -> list[float]:
        return normalise(values, by_std=True, ddof=self.ddof, eps=self.eps)
