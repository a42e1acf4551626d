"""Progress attribution: contribution of each turn to success, times whether it was carried out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.credit.estimator import require_action_values
from rlhf.credit.groups import broadcast_turns, group_counters, group_returns, normalise, turn_rewards
from rlhf.data import Credit, ScoredGroup, Trajectory, Values
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Progress:
    """Turn-level advantage from progress rewards: A_{i,k} = Σ_{l≥k} (r_{i,l} − mean r) / (std r + ε).

    r = c + β g, with statistics over all turns of the group.

    c_{i,k} is the score of turn k: what a reward that spreads its value over the turns (`Verdict.per_turn`), such as a
    learned estimator of contributions, gives it by its weight, which is the α of the paper. The plain final reward
    needs weight 0 then. g is 1 on a turn whose action the environment carried out, and on the last turn, else 0.

    With `contributions: critic` c is what a critic says that learns to spread scores over turns (`Values.actions_GNT`,
    the same at each token of a turn; 0 for a turn without tokens). c = (.1, .2, .5), g = (1, 0, 1) and β = .5: r = (.6,
    .2, 1).

    Equal r everywhere and a lone trajectory give 0. The paper trains a critic on these rewards; in its place stands the
    process supervision of GRPO, which needs none. Their released script leaves c out and spreads the centred final
    reward evenly, which is GRPO with β.

    Source: SPA-RL, arXiv 2505.20732; DeepSeekMath, arXiv 2402.03300, process supervision.
    """

    min_group: ClassVar[int] = 2
    #: Kind of the critic that it can have.
    takes_critic: ClassVar[str] = "contributions"

    contributions: Literal["score", "critic"] = "score"
    """Source of a turn's contribution: a reward that scores turns, or a learned critic."""
    grounding: Annotated[float, Field(ge=0)] = 0.5
    """β, the reward of a turn whose action was executed."""
    ddof: Literal[0, 1] = 1
    """1 divides the sum of squares by the number of turns − 1, 0 by their number."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""

    @property
    def needs_values(self) -> bool:
        """True if a critic gives the contributions of turns."""
        return self.contributions == "critic"

    @property
    def needs_critic(self) -> str:
        """Kind of that critic."""
        return self.takes_critic

    def __call__(self, group: ScoredGroup, values: Values | None = None) -> Credit:
        """Return one number per sampled token of `group`.

        Raises:
            DataError: a score is not finite, or a critic is to say what turns contributed and has not.
        """
        returns, contributed = group_returns(group), turn_rewards(group)
        if self.needs_values:
            found = require_action_values(values, type(self).__name__, self.needs_critic)
            contributed = [by_turn(*pair) for pair in zip(group.trajectories, found, strict=True)]
        earned_GK = [
            grounded(trajectory, rewards, self.grounding)
            for trajectory, rewards in zip(group.trajectories, contributed, strict=True)
        ]
        flat = [x for row in earned_GK for x in row]
        # Without company there is nothing to compare with, though the turns of one trajectory differ.
        steps = normalise(flat, by_std=True, ddof=self.ddof, eps=self.eps) if len(returns) > 1 else [0.0] * len(flat)
        remaining = iter(steps)
        credit_GK = [_to_go([next(remaining) for _ in row]) for row in earned_GK]
        is_silent = len(returns) > 1 and not any(steps)
        return Credit(
            broadcast_turns(group, credit_GK), group_counters(returns) | {"credit/n_zero_std_groups": float(is_silent)}
        )


def by_turn(trajectory: Trajectory, values_NT: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return `[K]`, the value at the tokens of each turn; 0 where nothing was sampled."""
    rows = iter(values_NT)
    of_turns = ([x for _ in turn.generations for x in next(rows)] for turn in trajectory.turns)
    return tuple(tokens[0] if tokens else 0.0 for tokens in of_turns)


def grounded(trajectory: Trajectory, contributions_K: Sequence[float], beta: float) -> list[float]:
    """Contributions `[K]`, plus β on executed actions and on the last turn."""
    last = len(trajectory.turns) - 1
    return [
        c + beta * (turn.valid or k == last)
        for k, (turn, c) in enumerate(zip(trajectory.turns, contributions_K, strict=True))
    ]


def _to_go(values_K: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values_K)))[::-1]
