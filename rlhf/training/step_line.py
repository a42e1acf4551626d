"""Progress line of a step for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.metrics import KLS, ROUNDING


def step_line(metrics: Mapping[str, Any]) -> str:
    """Progress line of a step: success with its 95% interval, return, loss, KL and speed, where logged."""
    parts = []
    if "rollout/success" in metrics:
        low, high = metrics["rollout/success_low"], metrics["rollout/success_high"]
        parts.append(f"success {metrics['rollout/success']:.0%} ({low:.0%}-{high:.0%})")
        parts.append(f"return {metrics['rollout/return_mean']:+.2f}")
    if "loss/total" in metrics:
        parts.append(f"loss {metrics['loss/total']:.3g}")
    name = next((name for name in KLS if name in metrics), None)
    if name is not None and (name == KLS[0] or abs(metrics[name]) > ROUNDING):
        parts.append(f"KL {metrics[name]:.2g}")
    return "  ".join([*parts, f"{metrics['rollout/tokens_per_s']:.0f} tok/s"])
