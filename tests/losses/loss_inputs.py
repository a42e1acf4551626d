"""Loss inputs from plain numbers, for tests of losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlhf.losses.policy_loss import LossInputs, whole_of
from rlhf.losses.trajectories import trajectories_of

#: Arrays of floats that may be given.
OPTIONAL = (
    "weights", "ref_logprobs", "entropy", "log_normalizers", "ref_log_normalizers", "mean_logprobs",
    "old_mean_logprobs", "teacher_logprobs",
)  # fmt: skip


def inputs(
    policy: Sequence[float] | torch.Tensor,
    advantages: Sequence[float],
    old: Sequence[float] | None = None,
    **more: Any,
) -> LossInputs:
    """Float64 inputs, weights of a token mean unless given; `policy` is a leaf that collects gradients.

    All tokens are of one trajectory unless `trajectory_ids` are given, all trajectories of one group unless `group_ids`
    are. `trajectories` and `whole` are those of these tokens unless given, the tokens in their present order.
    """
    policy = torch.as_tensor(policy, dtype=torch.float64)
    leaf = policy if policy.requires_grad else policy.clone().requires_grad_()
    n = len(leaf)

    def tensor(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float64)

    old_logprobs = leaf.detach().clone() if old is None else tensor(old)
    trajectory_ids = torch.as_tensor(more.pop("trajectory_ids", [0] * n), dtype=torch.int64)
    group_ids = torch.as_tensor(more.pop("group_ids", [0] * n), dtype=torch.int64)
    whole = more.pop("trajectories", None)
    if whole is None:
        whole = trajectories_of(leaf, old_logprobs, tensor(advantages), trajectory_ids, group_ids)
    tensors = {name: tensor(more.pop(name)) for name in OPTIONAL if name in more}
    if "log_normalizers" in tensors:
        tensors["log_normalizers"].requires_grad_()
    tokens = more.pop("whole", None)
    made = LossInputs(
        policy_logprobs=leaf,
        old_logprobs=old_logprobs,
        sampler_logprobs=tensor(more.pop("sampler", old_logprobs)),
        advantages=tensor(advantages),
        trajectory_ids=trajectory_ids,
        trajectories=whole,
        token_positions=torch.as_tensor(more.pop("token_positions", range(n)), dtype=torch.int64),
        **{"weights": torch.full((n,), 1 / max(n, 1), dtype=torch.float64), **tensors},
        **more,
    )
    return replace(made, whole=whole_of([made]) if tokens is None else tokens)


def gradient(loss: torch.Tensor, given: LossInputs) -> list[float]:
    """∂loss / ∂ policy_logprobs, `[N]`."""
    return torch.autograd.grad(loss, given.policy_logprobs)[0].tolist()
