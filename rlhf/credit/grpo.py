"""GRPO: group-normalised advantages per trajectory."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import IgnoredKeys, Scale
from rlhf.credit.groups import broadcast_trajectories, group_counters, group_returns, normalise
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GRPO:
    """Group-relative advantage (GRPO): A_i = (R_i − mean R) / (std R + ε).

    It is the same for every token of trajectory i.

    R_i is the total score of trajectory i; mean and deviation are over the trajectories of one task, however many turns
    each has. Degenerate groups: equal scores give exactly 0; a lone trajectory gives 0, or its score with
    `single_group: raw`.

    Source: DeepSeekMath, arXiv 2402.03300; deviation and ε as in verl, `compute_grpo_outcome_advantage`.
    """

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("normalize_std", False, ("ddof", "eps")),)
    needs_values: ClassVar[bool] = False

    normalize_std: bool = True
    """Divide by the standard deviation; false removes the difficulty bias (see `dr_grpo`)."""
    ddof: Literal[0, 1] = 1
    """1 divides the sum of squares by G − 1, 0 by G."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""
    single_group: Literal["zero", "raw"] = "zero"
    """Advantage of a group of one trajectory: 0, or its score as in verl (REINFORCE, no baseline)."""

    @property
    def scale(self) -> Scale | None:
        """Scores less the mean of their group, unless a deviation divides them."""
        return None if self.normalize_std else "group_mean"

    @property
    def min_group(self) -> int:
        """1 if a lone trajectory keeps its raw score, so that no baseline is needed."""
        return 1 if self.single_group == "raw" else 2

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        if len(returns) == 1 and self.single_group == "raw":
            advantages = returns
        else:
            advantages = normalise(returns, by_std=self.normalize_std, ddof=self.ddof, eps=self.eps)
        return Credit(broadcast_trajectories(group, advantages), group_counters(returns))
