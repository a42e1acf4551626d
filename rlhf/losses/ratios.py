"""Importance ratios of the policy against recorded log-probs."""

from __future__ import annotations

import torch

from rlhf.losses.policy_loss import LossInputs

#: Log-ratios are clamped to ± this many nats before exp, as in verl; e^20 is still far from overflow.
MAX_LOG_RATIO = 20.0


def log_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return log ρ = new − old in nats, clamped to ±20; `[N]` each. No gradient flows where the clamp binds.

    For what is exponentiated. A loss that is linear or square in the log-ratio takes the difference as it is: it cannot
    overflow, and the gradient would be missing where it is needed most.
    """
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_metrics(inputs: LossInputs) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return (metrics, metrics_max) that every policy loss logs.

    `loss/approx_kl` is k3 of KL(old ‖ policy), the mean of ρ − 1 − log ρ. `loss/entropy` is the given entropy, or where
    none was computed its estimate, the mean of −log π over all tokens, which is too high where another policy sampled
    them. Such tokens count as ratios of 1. Mismatch of engine and trainer is measured in
    `rlhf.losses.mismatch`.
    """
    policy = inputs.policy_logprobs.detach()
    moved = log_ratio(policy, inputs.old_logprobs)
    if inputs.off_policy is not None:
        moved = torch.where(inputs.off_policy, 0.0, moved)
    ratio = moved.exp()
    entropy = -policy if inputs.entropy is None else inputs.entropy
    means = {
        "loss/ratio_mean": ratio,
        "loss/approx_kl": torch.expm1(moved) - moved,
        "loss/entropy": entropy,
    }
    return (
        {name: inputs.mean_share(values) for name, values in means.items()},
        {"loss/ratio_max": _largest(ratio)},
    )


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """Pessimistic surrogate of PPO, `[N]`: max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high))."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def clip_metrics(inputs: LossInputs, ratio: torch.Tensor, clip_low: float, clip_high: float) -> dict[str, torch.Tensor]:
    """Return the shares of tokens that `clipped_surrogate` leaves without gradient, above and below."""
    high = (inputs.advantages > 0) & (ratio > 1 + clip_high)
    low = (inputs.advantages < 0) & (ratio < 1 - clip_low)
    return {
        "loss/clip_high_share": inputs.mean_share(high.to(ratio)),
        "loss/clip_low_share": inputs.mean_share(low.to(ratio)),
    }


def _largest(values: torch.Tensor) -> torch.Tensor:
    # A ratio is never negative, so 0 is the maximum of no tokens.
    return values.max() if values.numel() else values.new_zeros(())
