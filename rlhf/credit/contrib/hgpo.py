"""HGPO: hierarchy of groups, turns compared at equal states and histories of several depths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, IgnoredKeys, Problem, unused
from rlhf.credit.groups import CriticFree, broadcast_turns, group_counters, group_returns, normalise, turn_rewards
from rlhf.credit.returns import discounted_returns
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HGPO(CriticFree):
    """HGPO advantage: weighted mean of a turn's advantages among turns with equal histories, over depths of history.

    A_{i,k} = Σ_h w_h a_h / Σ_h w_h, w_h = (h + c)^α, over the depths h = 0 ... K at which turn k has company.
    At depth h the turns of the group are compared that share their last h + 1 states: a_h = (D − mean D) / F, where
    D_{i,k} = Σ_{l≥k} γ^{l−k} r_{i,l} is the discounted score from turn k on, and F is the deviation plus ε, or 1. Depth
    0 is the state comparison of GiGPO; deeper ones compare turns that were also led up to alike, and weigh more.

    Degenerate cases: a depth without company, with an unknown state, or reaching back before the first turn is left
    out, and so is one whose a_h is exactly 0, as the authors do; nothing left gives 0, and so does a lone trajectory.

    The authors' code has c = 2, their paper c = 1. Like theirs, deviations of states are over n and that of `episode`
    over n − 1. Theirs counts each trajectory once per turn in the mean and deviation of episodes, this one once: scores
    of 1 and 0 played in 3 and 4 turns are ±.707 here, 1.07 and −.80 there.

    Source: Hierarchy-of-Groups Policy Optimization, arXiv 2602.22817; langfengQ/verl-agent, `recipe/hgpo`.
    """

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (IgnoredKeys("normalize", "mean", ("ddof", "eps")),)
    #: Turns that began in one state, or after equal ones.
    compares_states: ClassVar[bool] = True
    turn_discount: ClassVar[str] = "gamma"

    history: Annotated[int, Field(ge=0)] = 2
    """K, the maximum number of previous states compared: as many as the agent sees."""
    alpha: Annotated[float, Field(ge=0)] = 1.0
    """α; larger values weigh longer histories more, 0 weighs all equally."""
    first_weight: Annotated[float, Field(gt=0)] = 2.0
    """c; 2 as in the authors' code (weights 2, 3, 4, ...), 1 as in the paper."""
    episode: bool = False
    """Add the episode-level advantage of GRPO, with weight 1. Without it a turn alone in its group has no signal."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount per turn of the returns compared."""
    normalize: Literal["mean_std", "mean"] = "mean_std"
    """`mean` only subtracts the mean."""
    ddof: Literal[0, 1] = 0
    """Of the turns compared in a state: 1 divides the sum of squares by n − 1, 0 by n. Episodes have n − 1 always."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse a weight where there is one term alone."""
        if not self.history and not self.episode:
            yield from unused(self, ("alpha",), context.path, "history is 0 and episode is false")

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        totals = group_returns(group)
        returns_GK = [discounted_returns(row, self.gamma) for row in turn_rewards(group)]
        found: list[list[list[tuple[float, float]]]] = [[[] for _ in row] for row in returns_GK]  # (weight, a_h)
        if self.episode:
            for row, advantage in zip(found, self._normalise(totals, ddof=1), strict=True):
                for items in row:
                    items.append((1.0, advantage))
        present = _alike(group, 0)
        for depth in range(self.history + 1 if len(totals) > 1 else 0):
            weight = (depth + self.first_weight) ** self.alpha
            for members in _alike(group, depth):
                advantages = self._normalise([returns_GK[i][k] for i, k in members], self.ddof)
                for (i, k), advantage in zip(members, advantages, strict=True):
                    found[i][k].append((weight, advantage))
        n_turns, n_known = sum(map(len, returns_GK)), sum(map(len, present))
        return Credit(
            broadcast_turns(group, [[_weighted_mean(items) for items in row] for row in found]),
            group_counters(totals)
            | {
                "credit/n_state_groups": float(sum(len(members) > 1 for members in present)),
                "credit/n_singleton_states": float(sum(len(members) == 1 for members in present)),
                "credit/n_turns_without_state": float(n_turns - n_known),
            },
        )

    def _normalise(self, values: Sequence[float], ddof: int) -> list[float]:
        return normalise(values, by_std=self.normalize == "mean_std", ddof=ddof, eps=self.eps)


def _alike(group: ScoredGroup, depth: int) -> list[list[tuple[int, int]]]:
    """Return the (trajectory, turn) pairs that share their last `depth` + 1 states, all of them known."""
    members: dict[tuple[str | None, ...], list[tuple[int, int]]] = {}
    for i, trajectory in enumerate(group.trajectories):
        states = tuple(turn.state_key for turn in trajectory.turns)
        for k in range(depth, len(states)):
            recent = states[k - depth : k + 1]
            if None not in recent:
                members.setdefault(recent, []).append((i, k))
    return list(members.values())


def _weighted_mean(items: Sequence[tuple[float, float]]) -> float:
    """Mean of the non-zero values by their weights; 0 where there are none."""
    kept = [(weight, value) for weight, value in items if value]
    return math.fsum(w * x for w, x in kept) / math.fsum(w for w, _ in kept) if kept else 0.0
