"""KL divergence from the frozen reference, estimated from the sampled tokens, as a term of a loss.

With d = log π − log π_ref on tokens sampled from π (Schulman, "Approximating KL divergence", 2020):

- k1 = d: unbiased value, but the gradient of its sample mean is zero on average, so it is useless as a loss term;
- k2 = d² / 2: biased value; its gradient d · ∇log π is the unbiased gradient of the reverse KL;
- k3 = e^{−d} − 1 + d: unbiased value, never negative; its gradient is that of the forward KL, yet it is common;
- k1+ and k3+: the value of k1 or k3 with the gradient of k2 (straight-through; the names are verl's).

Samples of an older policy bias all of them a little; no ratio corrects for that here.

k3 is bounded as in verl: d to ±20 nats, its value to 10, which it is 2.6 nats below the reference. Beyond, a token has
no gradient, though nothing needs pulling back more; `loss/kl_clamped_share` counts them. The other kinds have none.
"""

from __future__ import annotations

from typing import Literal

import torch

from rlhf.losses.ratios import MAX_LOG_RATIO, log_ratio

KLKind = Literal["k1", "k2", "k3", "k1+", "k3+"]

#: Bound of the value of k3.
MAX_K3 = 10.0


def kl_estimate(kind: KLKind, policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the estimate at each token, `[N]`, in nats; it carries the gradient that the kind has."""
    d = policy_logprobs - ref_logprobs
    if kind == "k1":
        return d
    k2 = d.square() / 2
    if kind == "k2":
        return k2
    value = d if kind == "k1+" else _k3(log_ratio(policy_logprobs, ref_logprobs)).clamp(max=MAX_K3)
    return value if kind == "k3" else k2 + (value - k2).detach()


def is_bounded(kind: KLKind, policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return at which tokens, `[N]` bool, a bound leaves the estimate without gradient."""
    d = (policy_logprobs - ref_logprobs).detach()
    if kind != "k3":
        return torch.zeros_like(d, dtype=torch.bool)
    return (d > MAX_LOG_RATIO) | (_k3(d.clamp(max=MAX_LOG_RATIO)) > MAX_K3)


def _k3(d: torch.Tensor) -> torch.Tensor:
    return torch.expm1(-d) + d
