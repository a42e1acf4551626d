"""SWEET: turn advantages of a critic with privileged information, compared within a state."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from rlhf.credit.contrib.progress import by_turn
from rlhf.credit.estimator import require_action_values
from rlhf.credit.groups import broadcast_turns, group_counters, group_returns, normalise
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SWEET:
    """SWEET-RL advantage: A_k − mean A over the group's turns from the same state.

    It is the same for every token of turn k.

    A_k is what a critic (`critic: {kind: sweet}`) says of the turn (`Values.actions_GNT`): the mean log-ratio of its
    tokens. It has learnt from pairs of attempts, and knows the answer, which turns made the better one. Rewards act
    through what it has learnt from them and in no other way. Turns of A = .3 and −.1 in one state: .2 and −.2.

    States are the same where their keys are (`Turn.state_key`); where a key is unknown, turns of the same number are
    taken to be. A turn that is alone in its state keeps its A, which is 0 for what the critic likes as much as what it
    began as: so is every A of a critic that has seen nothing. Turns without tokens do not count.

    In the paper A ranks candidates for one turn, and the policy learns from pairs of them by DPO. Here the candidates
    are the turns that the attempts at a task had in one state.

    Source: SWEET-RL, arXiv 2503.15478.
    """

    needs_values: ClassVar[bool] = True
    #: Kind of the critic that says A.
    needs_critic: ClassVar[str] = "sweet"
    min_group: ClassVar[int] = 1

    baseline: Literal["state", "none"] = "state"
    """Baseline to subtract: the mean of turns in the same state, or none."""

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`.

        Raises:
            DataError: there are no values, or none of actions; a score is not finite.
        """
        found = require_action_values(values, type(self).__name__, self.needs_critic)
        credit_GK = [list(by_turn(*pair)) for pair in zip(group.trajectories, found, strict=True)]
        metrics = group_counters(group_returns(group))
        alone = 0
        for members in _same_state(group) if self.baseline == "state" else ():
            alone += len(members) == 1
            if len(members) > 1:
                compared = normalise([credit_GK[i][k] for i, k in members], by_std=False, ddof=1, eps=0.0)
                for (i, k), advantage in zip(members, compared, strict=True):
                    credit_GK[i][k] = advantage
        return Credit(broadcast_turns(group, credit_GK), metrics | {"credit/n_singleton_states": float(alone)})


def _same_state(group: ScoredGroup) -> list[list[tuple[int, int]]]:
    """Return the (trajectory, turn) pairs of each state in which something was sampled."""
    members: dict[tuple[str | None, int], list[tuple[int, int]]] = {}
    for i, trajectory in enumerate(group.trajectories):
        for k, turn in enumerate(trajectory.turns):
            if any(g.n_tokens for g in turn.generations):
                key = (turn.state_key, -1) if turn.state_key is not None else (None, k)
                members.setdefault(key, []).append((i, k))
    return list(members.values())
