"""ShiQ: logits as soft Q-values, squared Bellman residual over several steps."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.losses.policy_loss import LossInputs, LossOutput
from rlhf.losses.regularized import Regularized, given
from rlhf.losses.trajectories import Whole, sums_from, sums_to
from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ShiQ(Regularized):
    """ShiQ: l_t = e_t², e_t = G_t − β Σ_{k ≥ t} (log π − log π_ref)(a_k) − v_t.

    v_t = β (log Σ exp ℓ − log Σ exp ℓ_ref), with logits ℓ.

    Logits ℓ that are Q-values of the task regularised by β KL(π ‖ π_ref) are consistent along every path: the value of
    a state is what the rest of the path brings, less what it costs to leave the reference. So the loss holds for tokens
    of any policy, needs no ratio, and takes the log-normaliser, which other losses do not see, for the value. Sums run
    over the policy's tokens to the end of the trajectory, across its turns; beyond the end the value is 0, discount 1.

    The advantage of a token is its return G_t. One score for the attempt and `dr_grpo` make it R less the group's mean:
    the value then learns what is left of a task's own, and its solution moves by a constant. Estimators that divide by
    a deviation change β from group to group.

    Logits of 1, 0, 0 and of 0, 1, 0, of the reference 0, tokens (0, 1), G = (1, 1) and β = .5: v = .226416 each,
    log-ratio .547168 each, tails .452832 and .726416, loss .301264. At π = π_ref, logits and all, the gradient in
    log π_k is −2 β Σ_{t ≤ k} G_t.

    A token carries the gradient of all errors in which it occurs, which are its own and those before it, times its own
    weight. β is not public; the default is a choice of this project.

    Source: ShiQ, arXiv 2505.11081, derived anew from its abstract; no code is public.
    """

    #: True if `LossInputs.ref_logprobs` must be given.
    needs_ref: ClassVar[bool] = True

    in_units_of_reward: ClassVar[bool] = True
    in_equal_groups: ClassVar[str] = "keeps what scores as expected where it is"
    needs_log_normalizers: ClassVar[bool] = True
    needs_whole: ClassVar[Whole] = "tokens"
    reductions: ClassVar[tuple[str, ...]] = ("seq_mean_token_sum", "seq_mean_token_sum_norm", "token_mean")

    beta: Annotated[float, Field(gt=0)] = 0.1
    """β, units of reward per nat of divergence from the reference."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""
        whole, at = inputs.whole_tokens()
        ids, policy, normalizers = whole.trajectory_ids, inputs.policy_logprobs, _normalizers(inputs)
        ahead = sums_from(whole.policy_logprobs.double() - given(whole.ref_logprobs, "ref_logprobs").double(), ids)
        values = _normalizers(whole).double() - given(whole.ref_log_normalizers, "ref_log_normalizers").double()
        errors = whole.advantages.double() - self.beta * (ahead + values)
        error, so_far = (x[at].to(policy) for x in (errors, sums_to(errors, ids)))
        pull = so_far * (policy - policy.detach()) + error * (normalizers - normalizers.detach())
        return self.output(inputs, error.square() - 2 * self.beta * pull)


def _normalizers(inputs: LossInputs) -> torch.Tensor:
    return given(inputs.log_normalizers, "log_normalizers")
