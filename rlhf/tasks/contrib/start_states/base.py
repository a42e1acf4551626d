"""Base of samplers of start states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlhf.data import ScoredGroup, Task


def is_due(place: int, share: float) -> bool:
    """True if draw number `place` belongs to a `share` of all draws, spread evenly."""
    return math.floor((place + 1) * share + 1e-9) > math.floor(place * share + 1e-9)


def start_metrics(tasks: Sequence[Task], groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
    """Metrics of start depth, and of success from the initial and from later states.

    Args:
        tasks: drawn in the step.
        groups: aligned with `tasks`.
    """
    values = {"sampling/prefix_turns_mean": sum(len(task.prefix) for task in tasks) / max(len(tasks), 1)}
    for name, wanted in (("initial_state", False), ("start", True)):
        found = [
            trajectory.solved
            for task, group in zip(tasks, groups, strict=True)
            if bool(task.prefix) is wanted
            for trajectory in group.trajectories
        ]
        if found:
            values[f"sampling/{name}_success"] = sum(found) / len(found)
    return values
