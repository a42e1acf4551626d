"""HRPO: trajectory-level GRPO, plus a turn-level term of the turn's own reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, IgnoredKeys, Problem
from rlhf.credit.estimator import unknown_reward_problem
from rlhf.credit.groups import CriticFree, broadcast_turns, group_counters, group_returns, normalise, per_turn
from rlhf.data import Credit, Score, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HRPO(CriticFree):
    """GRPO advantage plus a per-turn reward term (HRPO).

    A_{i,k} = (R_i − mean R) / (std R + ε) + w r_{i,k}, where r is what one of the rewards says of turn k.

    r is absolute: it is not compared with anything, so equal scores and a lone trajectory leave w r. The named reward
    gives values per turn (`Verdict.per_turn`), such as a cost of each agent added to a team; with weight 0 in the
    recipe it counts here alone, and not in R too. Penalties do not count in the first `exempt_turns` turns.

    The paper does not say what its step rewards are, nor when its exemption ends: both are definitions of ours.

    Source: MasHost, arXiv 2506.08507 (Hierarchical Relative Policy Optimization).
    """

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("step_weight", 0, ("exempt_turns",)),)

    reward: str
    """Name of the reward, a key of `rewards`, whose values per turn are r."""
    step_weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """w, the weight of r."""
    exempt_turns: Annotated[int, Field(ge=0)] = 0
    """Turns at the start of each trajectory in which an r below 0 counts as 0."""
    ddof: Literal[0, 1] = 1
    """1 divides the sum of squares by G − 1, 0 by G."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse the name of no reward."""
        if self.reward not in context.recipe.trained_rewards:
            yield unknown_reward_problem(self.reward, "reward", context)

    @property
    def turn_reward(self) -> str:
        """Name of the reward whose values per turn it reads."""
        return self.reward

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`. Raises DataError where the reward has no values per turn."""
        returns = group_returns(group)
        advantages = normalise(returns, by_std=True, ddof=self.ddof, eps=self.eps)
        credit_GK = [
            [advantage + self.step_weight * r for r in self._steps(score, group)]
            for advantage, score in zip(advantages, group.scores, strict=True)
        ]
        return Credit(broadcast_turns(group, credit_GK), group_counters(returns))

    def _steps(self, score: Score, group: ScoredGroup) -> list[float]:
        return [max(r, 0.0) if k < self.exempt_turns else r for k, r in enumerate(per_turn(score, self.reward, group))]
