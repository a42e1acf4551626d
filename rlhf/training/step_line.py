"""Progress line of a step for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.data import ScoredGroup
from rlhf.metrics import KLS, ROUNDING


def step_line(
    metrics: Mapping[str, Any], groups: Sequence[ScoredGroup], estimate: Callable[[Sequence[bool], Sequence[str]], Any]
) -> str:
    """Progress line: success with its 95% interval, return, loss, KL and speed, where computed.

    Args:
        metrics: of the step.
        groups: of the step, all of them.
        estimate: interval of a share, of what was right and the tasks that these belong to.
    """
    parts = []
    if "rollout/success" in metrics:
        attempts = [t for group in groups for t in group.trajectories]
        found = estimate([t.solved for t in attempts], [t.task_id for t in attempts])
        parts.append(f"success {metrics['rollout/success']:.0%} ({found.low:.0%}-{found.high:.0%})")
        parts.append(f"return {metrics['rollout/return_mean']:+.2f}")
    if "loss/total" in metrics:
        parts.append(f"loss {metrics['loss/total']:.3g}")
    name = next((name for name in KLS if name in metrics), None)
    if name is not None and (name == KLS[0] or abs(metrics[name]) > ROUNDING):
        parts.append(f"KL {metrics[name]:.2g}")
    return "  ".join([*parts, f"{metrics['rollout/tokens_per_s']:.0f} tok/s"])
