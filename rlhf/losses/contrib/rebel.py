"""REBEL: least-squares regression of differences of log-ratios on differences of rewards."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.regularized import Regularized
from rlhf.losses.trajectories import Whole
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class REBEL(Regularized):
    """REBEL: mean over the pairs of a group of [(D_i − D_j) − η (A_i − A_j)]².

    D = Σ log π − log π_old over a trajectory.

    Policy optimisation as regression: no ratio, no clipping, no baseline. Rewards enter by their differences, and those
    of the advantages are the same with Dr.GRPO (GRPO divides them by the group's deviation); a trajectory whose tokens
    differ in advantage has their mean. A pair of equal reward is pulled together. D of .2 and −.1, η = .5 and rewards 1
    apart: (.2 + .1 − .5)² = .04.

    A trajectory carries its share of the mean over pairs, 2 G / (G − 1) · (e_i − ē)² with e = D − η A, ē its mean over
    the G trajectories of the group in the minibatch: pairs that lie in different minibatches are not compared, and one
    without a partner has no loss. At π = π_old the gradient is 4 η G / (G − 1) times −(A − Ā) ∇log π: the policy
    gradient at another rate. The rewards' scale sets η; the log-ratios it asks for should stay moderate.

    Source: Regressing relative rewards, arXiv 2404.16767; its code, `rebel.py`.
    """

    in_units_of_reward: ClassVar[bool] = True
    needs_whole: ClassVar[Whole] = "group"
    reductions: ClassVar[tuple[str, ...]] = ("seq_mean_token_sum", "seq_mean_token_sum_norm")

    eta: Annotated[float, Field(gt=0)] = 1.0
    """η, nats of log-ratio per unit of reward."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        whole, policy = inputs.whole_trajectories(), inputs.policy_logprobs
        errors = whole.log_ratios - self.eta * whole.advantages
        means, sizes = whole.group_means(errors)
        factors = 2 * sizes.double() / (sizes - 1).clamp(min=1)
        value = whole.spread(factors * (errors - means).square() / whole.n_tokens, inputs.trajectory_ids).to(policy)
        slope = whole.spread(2 * factors * (errors - means), inputs.trajectory_ids).to(policy)
        return self.output(inputs, value + slope * (policy - policy.detach()))
