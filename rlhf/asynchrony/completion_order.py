"""Completion-order batching: groups that finish first are trained first, within the staleness bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice


def first_finished(
    stored: Mapping[int, int], waiting: Sequence[int], *, step: int, n: int, staleness: int
) -> tuple[int, ...] | None:
    """Return the ordinals of the step in ascending order; None while too few have finished, or one that is due has not.

    A group of version v is due by step v + S. For each D from the present step on, those due by D must fit into the
    steps up to D: where more wait than the steps after this one up to D hold, this step takes the rest of them. Only
    then does it take what finished first.

    Args:
        stored: ordinal -> oldest version, in the order in which they finished.
        waiting: versions of those that have begun and not finished.
        step: k, counted from 0.
        n: B, groups of a step.
        staleness: S.
    """
    if len(stored) < n:
        return None
    due = {ordinal: oldest + staleness for ordinal, oldest in stored.items()}
    left = [version + staleness for version in waiting]
    chosen: set[int] = set()
    for limit in range(step, step + staleness + 1):
        by_then = [ordinal for ordinal, last in due.items() if last <= limit]
        free = [ordinal for ordinal in by_then if ordinal not in chosen]
        n_due = len(free) + sum(last <= limit for last in left)
        n_short = n_due - (limit - step) * n
        if n_short > len(free):
            return None
        chosen.update(free[: max(n_short, 0)])
    rest = (ordinal for ordinal in due if ordinal not in chosen)
    return tuple(sorted((*chosen, *islice(rest, n - len(chosen)))))
