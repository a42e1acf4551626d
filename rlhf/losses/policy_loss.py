"""The contract of a policy loss.

Arrays are flat over the policy tokens of a micro-batch, `[N]`; prompts, observations and padding are not in them. The
reduction is already inside `weights`: a loss is Σ weights · l, so that micro-batches and processes simply add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may look at. All `[N]`, N = policy tokens of the micro-batch; log-probs in nats.

    Attributes:
        policy_logprobs: of the current policy; carries the gradient.
        old_logprobs: of the policy that made the trajectories, as computed for training.
        sampler_logprobs: as reported by the engine that sampled.
        ref_logprobs: of the frozen reference, or None when no KL term is asked for.
        entropy: of the current policy's distribution at each token, or None; carries the gradient.
        advantages: one number per token.
        weights: reduction coefficients; they sum to the reduction's normaliser over the whole global batch.
        sequence_ids: int64, which trajectory a token belongs to.
    """

    policy_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequence_ids: torch.Tensor
    ref_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A scalar to differentiate, and sums for the log.

    Attributes:
        loss: scalar.
        metrics: name -> sum over tokens of weight · value, detached; micro-batches add up to the batch's mean.
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


@runtime_checkable
class PolicyLoss(Protocol):
    """A frozen dataclass whose fields are its recipe keys."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of one micro-batch's share of the global batch."""
        ...
