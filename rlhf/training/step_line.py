"""Progress line of a step for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.stats import share_interval

#: KL to the reference where there is one, else to the policy that sampled, from which a step's later updates move away.
_KL = ("loss/kl_ref", "loss/approx_kl")
#: Divergence in nats that is rounding: that of a step's only update.
_ROUNDING = 1e-9


def step_line(metrics: Mapping[str, Any]) -> str:
    """Progress line: success with its 95% interval, return, loss, KL and speed, where computed."""
    parts = []
    if "rollout/success" in metrics:
        success, n = metrics["rollout/success"], metrics["rollout/n_episodes"] - metrics["rollout/n_failures"]
        parts.append(f"success {success:.0%} ({'{:.0%}-{:.0%}'.format(*share_interval(success * n, n))})")
        parts.append(f"return {metrics['rollout/return_mean']:+.2f}")
    if "loss/total" in metrics:
        parts.append(f"loss {metrics['loss/total']:.3g}")
    name = next((name for name in _KL if name in metrics), None)
    if name is not None and (name == _KL[0] or abs(metrics[name]) > _ROUNDING):
        parts.append(f"KL {metrics[name]:.2g}")
    return "  ".join([*parts, f"{metrics['rollout/tokens_per_s']:.0f} tok/s"])
