"""KL divergence from the frozen reference, estimated from the sampled tokens, as a term of a loss.

With d = log π − log π_ref on tokens sampled from π (Schulman, "Approximating KL divergence", 2020):

- k1 = d: unbiased value, but the gradient of its sample mean is zero on average, so it is useless as a loss term;
- k2 = d² / 2: biased value; its gradient d · ∇log π is the unbiased gradient of the reverse KL;
- k3 = e^{−d} − 1 + d: unbiased value, never negative; its gradient is that of the forward KL, yet it is common;
- k1+ and k3+: the value of k1 or k3 with the gradient of k2 (straight-through; the names are verl's).

Samples of an older policy bias all of them a little; no ratio corrects for that here.
"""

from __future__ import annotations

from typing import Literal

import torch

from rlhf.losses.ratios import log_ratio

KLKind = Literal["k1", "k2", "k3", "k1+", "k3+"]

#: Bound of k3, as in verl (d itself is clamped to ±20 nats); no gradient flows where one of them binds.
MAX_K3 = 10.0


def kl_estimate(kind: KLKind, policy_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the estimate at each token, `[N]`, in nats; it carries the gradient that the kind has."""
    d = log_ratio(policy_logprobs, ref_logprobs)
    if kind == "k1":
        return d
    k2 = d.square() / 2
    if kind == "k2":
        return k2
    value = d if kind == "k1+" else (torch.expm1(-d) + d).clamp(max=MAX_K3)
    return value if kind == "k3" else k2 + (value - k2).detach()
