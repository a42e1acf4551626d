"""A step in one line, for who watches the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.stats import share_interval

#: The divergence that is trained against where there is one, else the one from the policy that sampled.
_KL = ("loss/kl_ref", "loss/approx_kl")


def step_line(metrics: Mapping[str, Any]) -> str:
    """Progress line: success with its 95% interval, return, loss, KL and speed, where computed."""
    success, n = metrics["rollout/success"], metrics["rollout/n_episodes"] - metrics["rollout/n_failures"]
    within = "({:.0%}-{:.0%})".format(*share_interval(success * n, n)) if n > 0 else "(nothing to count)"
    parts = [f"success {success:.0%} {within}", f"return {metrics['rollout/return_mean']:+.2f}"]
    if "loss/total" in metrics:
        parts.append(f"loss {metrics['loss/total']:.3g}")
    if (name := next((name for name in _KL if name in metrics), None)) is not None:
        parts.append(f"KL {metrics[name]:.2g}")
    return "  ".join([*parts, f"{metrics['rollout/tokens_per_s']:.0f} tok/s"])
