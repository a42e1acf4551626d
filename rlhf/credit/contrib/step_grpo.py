"""Step-GRPO: group-normalised advantages per turn, among the turns at the same position."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.groups import CriticFree, broadcast_turns, group_counters, group_returns, normalise, turn_rewards
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepGRPO(CriticFree):
    """Step-wise GRPO: A_{i,k} = (r_{i,k} − mean r_k) / (std r_k + ε), over trajectories with a turn k.

    Only what turn k itself earned counts, so the rewards must judge turns (`Verdict.per_turn`). With `last_apart` the
    last turns, which give the answer and get the rewards of whole trajectories, are compared with each other, whatever
    their number. A turn without counterpart gives 0, and so do equal rewards and a lone trajectory.

    R1-Router samples each step anew from one prompt; here turn k of two attempts may follow different turns. R1-VL,
    also called StepGRPO, is a sum of rewards on whole trajectories: GRPO with weights 1 for the answer, 0.1 for the
    share of key steps and 1 for their form.

    Source: R1-Router, arXiv 2505.22095 (Step-GRPO); R1-VL, arXiv 2503.12937.
    """

    last_apart: bool = True
    """Compare last turns with each other instead of turns of the same index."""
    ddof: Literal[0, 1] = 1
    """1 divides the sum of squares by n − 1, 0 by n."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns, rewards_GK = group_returns(group), turn_rewards(group)
        members: dict[int, list[tuple[int, int]]] = {}
        for i, row in enumerate(rewards_GK):
            for k in range(len(row)):
                place = -1 if self.last_apart and k == len(row) - 1 else k
                members.setdefault(place, []).append((i, k))
        credit_GK = [[0.0] * len(row) for row in rewards_GK]
        for pairs in members.values():
            advantages = normalise([rewards_GK[i][k] for i, k in pairs], by_std=True, ddof=self.ddof, eps=self.eps)
            for (i, k), advantage in zip(pairs, advantages, strict=True):
                credit_GK[i][k] = advantage
        is_silent = not any(x for row in credit_GK for x in row)
        return Credit(
            broadcast_turns(group, credit_GK),
            group_counters(returns)
            | {
                "credit/n_zero_std_groups": float(len(returns) > 1 and is_silent),
                "credit/n_singleton_turns": float(sum(len(pairs) == 1 for pairs in members.values())),
            },
        )
