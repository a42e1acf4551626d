"""Sampler/trainer mismatch: weights, statistics and figures from two log-probs per token.

An engine rounds otherwise than the trainer, or still has older weights, so what it reports for a token is not what the
trainer computes for it. With μ the distribution that was sampled from, π_old the trainer's before the first update, and

    w = π_old / μ = exp(log π_old − log μ),  the exponent clamped to ±20 nats

an expectation under μ of w · f is that under π_old of f: w is the importance weight that
`rlhf.losses.importance_correction`
bounds. A sequence is a trajectory, in however many rows it lies. All arrays are flat over the policy tokens, `[N]`;
what is computed here is float64, so that the order of tokens and rows does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch

from rlhf.errors import DataError
from rlhf.losses.ratios import MAX_LOG_RATIO, log_ratio

Level = Literal["token", "sequence", "geometric"]
Statistic = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class CorrectionInputs:
    """Inputs of a correction. All `[N]`; log-probs in nats.

    Attributes:
        old_logprobs: as the trainer computes them, before the first update of the step; without gradient.
        sampler_logprobs: as reported by the engine that sampled.
        advantages: one number per token.
        trajectory_ids: int64, which trajectory a token belongs to.
    """

    old_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    trajectory_ids: torch.Tensor

    def __post_init__(self) -> None:
        shapes = {f.name: tuple(getattr(self, f.name).shape) for f in fields(self)}
        if len(set(shapes.values())) != 1 or self.old_logprobs.ndim != 1:
            raise DataError(
                "the arrays of a correction differ in shape",
                where="CorrectionInputs",
                got=str(shapes),
                expected="[N] each, N = policy tokens",
            )

    def log_weights(self) -> torch.Tensor:
        """Return log w of each token, `[N]` float64, within ±20 nats."""
        return log_ratio(self.old_logprobs.double(), self.sampler_logprobs.double())


@dataclass(frozen=True, slots=True)
class CorrectionOutput:
    """Result of a correction for each token, `[N]`.

    Attributes:
        weights: at least 0; multiplies the token's weight in the loss. A token of weight 0 teaches nothing and still
            counts in the numbers that the reduction divides by.
        kept: bool; a token that is not kept is left out as if it had never been sampled: it does not count there
            either. None keeps all.
        bounded: bool, whether the weight was brought to a bound, for the log; None is nowhere.
    """

    weights: torch.Tensor
    kept: torch.Tensor | None = None
    bounded: torch.Tensor | None = None


def sequence_sums(
    values: torch.Tensor, trajectory_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (sums `[S]`, counts `[S]`, index `[N]` of each token's sequence in them)."""
    ids, index = torch.unique(trajectory_ids, return_inverse=True)
    sums = values.new_zeros(len(ids)).index_add_(0, index, values)
    return sums, torch.bincount(index, minlength=len(ids)), index


def weights_at(level: Level, inputs: CorrectionInputs) -> torch.Tensor:
    """Return w of each token, `[N]`: its own, or one number for all tokens of its sequence.

    `token`: w_t. `sequence`: ∏ w_t, its logarithm clamped to ±20 nats. `geometric`: (∏ w_t)^(1/T). For
    w = .3, 1, 1.8, 6 of one sequence the product is 3.24 and the geometric mean 1.341641.
    """
    log_w = inputs.log_weights()
    if level == "token":
        return log_w.exp()
    sums, counts, index = sequence_sums(log_w, inputs.trajectory_ids)
    of_sequence = sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) if level == "sequence" else sums / counts
    return of_sequence.exp()[index]


def divergence(statistic: Statistic, log_weights: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(μ ‖ π_old) in nats, `[N]`: k1 = −log w, k2 = log² w / 2, k3 = w − 1 − log w.

    Source: Schulman, "Approximating KL divergence", 2020. Tokens are samples of μ, so k1 and k3 are unbiased.
    """
    if statistic == "k1":
        return -log_weights
    return log_weights.square() / 2 if statistic == "k2" else torch.expm1(log_weights) - log_weights


def hits_sequence(hit: torch.Tensor, trajectory_ids: torch.Tensor) -> torch.Tensor:
    """Return for each token, `[N]` bool, whether `hit` is true of any token of its sequence."""
    sums, _, index = sequence_sums(hit.double(), trajectory_ids)
    return sums[index] > 0


def off_policy_negatives(
    old: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, trajectory_ids: torch.Tensor, delta: float
) -> torch.Tensor:
    """Off-policy sequence mask, `[N]` bool: True where A < 0 and mean of (old − new) > δ.

    The mean is over the tokens of the sequence. Sequences of negative advantage that the present policy would rarely
    sample give mostly noise. old = −1, −1.2 and new = −1.3, −1.4 have mean .25.

    Source: DeepSeek-V3.2, arXiv 2512.02556; slime, `compute_opsm_mask`.
    """
    sums, counts, index = sequence_sums((old - new).double(), trajectory_ids)
    return (advantages < 0) & ((sums / counts)[index] > delta)


def effective_share(weights: torch.Tensor) -> torch.Tensor:
    """Effective sample size as a share of the samples, (Σ w)² / (N Σ w²): 1 where all are equal, 0 of none.

    Source: Kish, Survey Sampling, 1965.
    """
    squares = len(weights) * weights.square().sum()
    return weights.sum().square() / squares if squares > 0 else squares


def joined(parts: Sequence[CorrectionInputs]) -> CorrectionInputs:
    """Return the tokens of several micro-batches, one after the other."""
    return CorrectionInputs(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(CorrectionInputs)))


def joined_outputs(parts: Sequence[CorrectionOutput]) -> CorrectionOutput:
    """Return what becomes of the tokens of several micro-batches, one after the other."""
    kept = [_all(p) if p.kept is None else p.kept for p in parts]
    bounded = [~_all(p) if p.bounded is None else p.bounded for p in parts]
    return CorrectionOutput(torch.cat([p.weights for p in parts]), torch.cat(kept), torch.cat(bounded))


def _all(output: CorrectionOutput) -> torch.Tensor:
    return torch.ones_like(output.weights, dtype=torch.bool)


def mismatch_metrics(inputs: CorrectionInputs, output: CorrectionOutput | None = None) -> dict[str, float]:
    """Mismatch metrics of a step's tokens; without `output` the ratios themselves are the weights.

    Shares are of the N tokens, but `loss/sampler_dropped_share`, which is of the trajectories: those of which no token
    is kept. Without tokens everything is 0.
    """
    log_w = inputs.log_weights()
    n = max(len(log_w), 1)
    gap = (inputs.old_logprobs.double() - inputs.sampler_logprobs.double()).abs()
    values = {
        "loss/sampler_logprob_diff_mean": gap.sum() / n,
        "loss/sampler_logprob_diff_max": gap.max() if len(gap) else gap.sum(),
        "loss/sampler_kl_k1": divergence("k1", log_w).sum() / n,
        "loss/sampler_kl_k3": divergence("k3", log_w).sum() / n,
    }
    if output is None:
        return _floats(values | {"loss/sampler_ess": effective_share(log_w.exp())})
    kept = _all(output) if output.kept is None else output.kept
    weights = torch.where(kept, output.weights.double(), 0.0)
    of_sequence, _, _ = sequence_sums(kept.double(), inputs.trajectory_ids)
    bounded = ~_all(output) if output.bounded is None else output.bounded
    values |= {
        "loss/sampler_ess": effective_share(weights),
        "loss/sampler_weight_mean": weights.sum() / kept.sum().clamp(min=1),
        "loss/sampler_clipped_share": bounded.double().sum() / n,
        "loss/sampler_masked_share": (kept & (weights == 0)).double().sum() / n,
        "loss/sampler_rejected_share": (~kept).double().sum() / n,
        "loss/sampler_dropped_share": (of_sequence == 0).double().sum() / max(len(of_sequence), 1),
    }
    return _floats(values)


def _floats(values: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
