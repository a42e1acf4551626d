"""ArCHer: turn-level advantage Q - V of an off-policy critic."""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from rlhf.credit.estimator import require_action_values, require_values
from rlhf.credit.groups import turn_rewards
from rlhf.data import Credit, ScoredGroup, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ArCHer:
    """A_k = Q(o_k, a_k) − V(o_k), the same for every token of turn k.

    Q is what a critic of turns expects of having taken a_k in o_k, V what it expects of o_k (`Values.actions_GNT` and
    `Values.values_GNT`); each is the lower one of two that the critic holds. Q-values (.7, .65) and values (.5, .55):
    A = .65 − .5 = .15. Rewards act through what the critic has learnt from them and in no other way. Nothing is
    centred: V already is the mean of Q over the policy's actions, as far as the critic knows. A critic that has seen
    nothing expects 0 of everything and gives 0.

    Source: ArCHer, arXiv 2402.19446.
    """

    needs_values: ClassVar[bool] = True
    #: Kind of the critic that knows Q-values.
    needs_critic: ClassVar[str] = "archer"
    min_group: ClassVar[int] = 1

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`.

        Raises:
            DataError: there are no values, or none of actions; a score is not finite.
        """
        name = type(self).__name__
        states_GNT, actions_GNT = (
            require_values(values, name).values_GNT,
            require_action_values(values, name, self.needs_critic),
        )
        turn_rewards(group)
        advantages_GNT = tuple(
            tuple(tuple(q - v for q, v in zip(*pair, strict=True)) for pair in zip(q_NT, v_NT, strict=True))
            for q_NT, v_NT in zip(actions_GNT, states_GNT, strict=True)
        )
        return Credit(advantages_GNT, {"credit/n_groups": float(len(group.trajectories) > 0)})
