"""How far the policy has moved from the log-probs that were recorded: ratios."""

from __future__ import annotations

import torch

from rlhf.losses.policy_loss import LossInputs

#: Log-ratios are clamped to ± this many nats before exp, as in verl; e^20 is still far from overflow.
MAX_LOG_RATIO = 20.0


def log_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return log ρ = new − old in nats, clamped to ±20; `[N]` each. No gradient flows where the clamp binds."""
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_metrics(inputs: LossInputs) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return (metrics, metrics_max) that every policy loss logs.

    `loss/approx_kl` is k3 of KL(old ‖ policy), the mean of ρ − 1 − log ρ. `loss/entropy` is the given entropy, or where
    none was computed its estimate from the sampled tokens, the mean of −log π. How far the engine is from the trainer
    is no matter of the loss: `rlhf.losses.mismatch` tells.
    """
    policy = inputs.policy_logprobs.detach()
    moved = log_ratio(policy, inputs.old_logprobs)
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


def _largest(values: torch.Tensor) -> torch.Tensor:
    # A ratio is never negative, so 0 is the maximum of no tokens.
    return values.max() if values.numel() else values.new_zeros(())
