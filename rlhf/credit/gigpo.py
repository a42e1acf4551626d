"""GiGPO: trajectory-level advantage, plus turn-level advantage among turns that start in the same environment state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import IgnoredKeys
from rlhf.credit.groups import CriticFree, broadcast_turns, group_counters, group_returns, normalise, turn_rewards
from rlhf.credit.returns import discounted_returns
from rlhf.credit.similarity import similar_clusters
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GiGPO(CriticFree):
    """Group-in-group advantage (GiGPO): A_{i,k} = A^E_i + ω · A^S_{i,k}.

    It is the same for every token of turn k of trajectory i.

    A^E_i = (R_i − mean R) / F compares total scores within the group. D_{i,k} = Σ_{l≥k} γ^{l−k} r_{i,l} is the
    discounted score from turn k on; A^S = (D − mean D) / F compares it among all turns of the group that started from
    the same state (`Turn.state_key`), of any trajectory and at any time. F is the deviation plus ε, or 1.

    Degenerate cases: a state seen once, a turn whose state is unknown, and equal returns give A^S = 0; equal scores
    give A^E = 0; a lone trajectory gives 0 throughout. A state that one trajectory visits twice counts twice.

    Two differences from the authors' code (verl-agent): statistics of A^E are per trajectory unless `statistics: turn`;
    and a penalty for an invalid action is part of its turn's reward, so it also lowers D of the earlier turns, by γ per
    turn, where theirs lowers the D of its own turn only.

    Source: GiGPO, arXiv 2505.10978; langfengQ/verl-agent, `gigpo/core_gigpo.py`.
    """

    ignored_keys: ClassVar[tuple[IgnoredKeys, ...]] = (
        IgnoredKeys("normalize", "mean", ("ddof", "eps")),
        IgnoredKeys("step_weight", 0, ("gamma", "similarity")),
    )
    turn_discount: ClassVar[str] = "gamma"

    step_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """ω, the weight of the state-level advantage."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount per turn of the returns compared in a state group."""
    normalize: Literal["mean_std", "mean"] = "mean_std"
    """`mean` only subtracts the mean: for environments where a state group may mix easy and hopeless situations."""
    statistics: Literal["trajectory", "turn"] = "trajectory"
    """Unit of mean and standard deviation of A^E: each trajectory once, or once per turn (long ones weigh more)."""
    similarity: Annotated[float, Field(gt=0, le=1)] | None = None
    """null: states are the same if their keys are equal. A number: if the `difflib` similarity of their keys is at
    least this, each key joining the first cluster whose first member it resembles; depends on the order, slow for many
    states."""
    ddof: Literal[0, 1] = 1
    """1 divides the sum of squares by n − 1, 0 by n."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    @property
    def compares_states(self) -> bool:
        """True if turns that began in one state are compared."""
        return self.step_weight > 0

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`."""
        returns = group_returns(group)
        clusters, n_unknown = self._state_groups(group)
        metrics = group_counters(returns) | {
            "credit/n_state_groups": float(sum(len(members) > 1 for members in clusters)),
            "credit/n_singleton_states": float(sum(len(members) == 1 for members in clusters)),
            "credit/n_turns_without_state": float(n_unknown),
        }
        credit_GK = [[0.0] * len(t.turns) for t in group.trajectories]
        if len(returns) > 1:
            episode_G = self._episode_advantages(group, returns)
            credit_GK = [[a] * len(row) for a, row in zip(episode_G, credit_GK, strict=True)]
            self._add_state_advantages(credit_GK, group, clusters)
        return Credit(broadcast_turns(group, credit_GK), metrics)

    def _normalise(self, values: Sequence[float], population: Sequence[float] | None = None) -> list[float]:
        by_std = self.normalize == "mean_std"
        return normalise(values, by_std=by_std, ddof=self.ddof, eps=self.eps, population=population)

    def _episode_advantages(self, group: ScoredGroup, returns_G: Sequence[float]) -> list[float]:
        if self.statistics == "trajectory":
            return self._normalise(returns_G)
        rows = [r for r, t in zip(returns_G, group.trajectories, strict=True) for _ in t.turns]
        return self._normalise(returns_G, population=rows)

    def _add_state_advantages(
        self, credit_GK: list[list[float]], group: ScoredGroup, clusters: Iterable[Sequence[tuple[int, int]]]
    ) -> None:
        returns_GK = [discounted_returns(row, self.gamma) for row in turn_rewards(group)]
        for members in clusters:
            advantages = self._normalise([returns_GK[i][k] for i, k in members])
            for (i, k), advantage in zip(members, advantages, strict=True):
                credit_GK[i][k] += self.step_weight * advantage

    def _state_groups(self, group: ScoredGroup) -> tuple[list[list[tuple[int, int]]], int]:
        """Return the (trajectory, turn) pairs of each state, and how many turns have no known state."""
        turns = [(i, k, turn.state_key) for i, t in enumerate(group.trajectories) for k, turn in enumerate(t.turns)]
        known = [(i, k, key) for i, k, key in turns if key is not None]
        names: Iterable[object] = (key for _, _, key in known)
        if self.similarity is not None:
            names = similar_clusters([key for _, _, key in known], self.similarity)
        members: dict[object, list[tuple[int, int]]] = {}
        for (i, k, _), name in zip(known, names, strict=True):
            members.setdefault(name, []).append((i, k))
        return list(members.values()), len(turns) - len(known)
