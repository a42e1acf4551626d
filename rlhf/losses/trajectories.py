"""Statistics of whole trajectories, for sequence-level losses.

The rows of a trajectory may lie in several micro-batches, of which a loss sees one at a time. What it needs of the rest
are a few numbers that carry no gradient: the gradient of a function of Σ_t log π_t reaches the parameters through each
token by itself, times a factor that these numbers give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Whole = Literal["trajectory", "group", "tokens"]


@dataclass(frozen=True, slots=True)
class Trajectories:
    """S trajectories of a minibatch; all `[S]` and without gradient.

    Attributes:
        ids: int64, ascending; the `trajectory_ids` of their tokens.
        group_ids: int64, which group each belongs to.
        n_tokens: int64, policy tokens of each.
        log_ratios: float64, Σ log π − log π_old over those tokens, in nats, not clamped.
        advantages: float64, mean over those tokens.
    """

    ids: torch.Tensor
    group_ids: torch.Tensor
    n_tokens: torch.Tensor
    log_ratios: torch.Tensor
    advantages: torch.Tensor

    def spread(self, values: torch.Tensor, trajectory_ids: torch.Tensor) -> torch.Tensor:
        """Return for each token, `[N]`, the value `[S]` of its trajectory, which must be among these."""
        return values[torch.searchsorted(self.ids, trajectory_ids)]

    def group_means(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (mean of `values` `[S]` over the trajectories of each one's group, their number), `[S]` each."""
        _, index, counts = torch.unique(self.group_ids, return_inverse=True, return_counts=True)
        sums = values.new_zeros(len(counts)).index_add_(0, index, values)
        return (sums / counts)[index], counts[index]


def trajectories_of(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    trajectory_ids: torch.Tensor,
    group_ids: torch.Tensor,
) -> Trajectories:
    """Sum up tokens, `[N]` each, over the trajectories that they make up.

    Tokens of ratios e^.1, e^-.05 and e^.01 in one trajectory have Σ log ρ = .06.
    """
    ids, index, counts = torch.unique(trajectory_ids, return_inverse=True, return_counts=True)

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), dtype=torch.float64, device=values.device).index_add_(0, index, values)

    gaps = policy_logprobs.detach().double() - old_logprobs.detach().double()
    groups = torch.zeros_like(ids).scatter_(0, index, group_ids)
    return Trajectories(ids, groups, counts, total(gaps), total(advantages.double()) / counts)


def sums_from(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Suffix sum of `values` for each token, to the end of its trajectory, `[N]`, float64.

    Args:
        values: `[N]`, in the order of the tokens.
        ids: `[N]`, the trajectory of each; the tokens of one stand side by side.
    """
    _, index, counts = torch.unique_consecutive(ids, return_inverse=True, return_counts=True)
    total = values.double().cumsum(0)
    return total[counts.cumsum(0) - 1][index] - total + values


def sums_to(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Prefix sum of `values` for each token, from its trajectory's start and inclusive; as `sums_from`."""
    return sums_from(values.flip(0), ids.flip(0)).flip(0)


def next_in(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Value of the next token in the trajectory, `[N]`, 0 for the last; as `sums_from`."""
    found = torch.zeros_like(values)
    found[:-1] = torch.where(ids[1:] == ids[:-1], values[1:], 0.0)
    return found
