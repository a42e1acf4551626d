"""Checkpoints (snapshots) of a pipeline shared by several processes: each holds its part of the whole.

Process r holds `n_r` of the B groups of a step, neighbours from place `start_r` on. Its own pipeline counts them from
0: local ordinal o is the group `(o // n_r) · B + start_r + o % n_r` of the run. A snapshot of the run has ordinals of
the run, so that another number of processes can go on with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import CheckpointError


def global_ordinal(local: int, share: slice, n_per_step: int) -> int:
    """Return the ordinal in the run of a group of one process.

    The second group of its second step, where four groups make a step and it plays the last two:

    >>> global_ordinal(3, slice(2, 4), 4)
    7
    """
    number, place = divmod(local, int(share.stop - share.start))
    return number * n_per_step + int(share.start) + place


def merged(states: Sequence[Mapping[str, Any]], shares: Sequence[slice], n_per_step: int) -> dict[str, Any]:
    """Return the snapshot of a run of the snapshots of its processes; see `Pipeline.state`.

    What one process had not begun, and lies before what another had, is to begin.
    """
    both = list(zip(states, shares, strict=True))
    begun = [
        global_ordinal(s["counts"]["n_begun"] - 1, share, n_per_step) for s, share in both if s["counts"]["n_begun"]
    ]
    n_begun = 1 + max(begun, default=-1)
    running: list[int] = []
    store: list[tuple[Any, ...]] = []
    for state, share in both:
        left = range(state["counts"]["n_begun"], _n_of(n_begun, share, n_per_step))
        running += [global_ordinal(local, share, n_per_step) for local in (*state["running"], *left)]
        store += [(global_ordinal(local, share, n_per_step), *rest) for local, *rest in state["store"]]
    total = {name: sum(s["tokens"][name] for s in states) for name in ("generated", "trained", "failed")}
    n_given_back = sum(s["counts"]["n_given_back"] for s in states)
    return {
        "rules": {**states[0]["rules"], "n_per_step": n_per_step},
        "counts": {"step": states[0]["counts"]["step"], "n_begun": n_begun, "n_given_back": n_given_back},
        "tokens": total,
        "running": sorted(running),
        "store": store,
        "n_processes": len(states),
    }


def split_state(state: Mapping[str, Any], share: slice, n_per_step: int, n_processes: int) -> dict[str, Any]:
    """Return one process's part of a run's snapshot; the first keeps the counts of tokens that are trained or failed.

    Raises:
        CheckpointError: other processes than these chose which groups to train, of those that finished first.
    """
    n = int(share.stop - share.start)

    def local(ordinal: int) -> int:
        number, place = divmod(ordinal, n_per_step)
        return number * n + place - int(share.start)

    def is_mine(ordinal: int) -> bool:
        return bool(share.start <= ordinal % n_per_step < share.stop)

    if state["rules"]["order"] != "in_order" and state["n_processes"] != n_processes:
        raise CheckpointError(
            "each process chose the groups to train on among its own",
            where="asynchrony.order first_finished",
            got=f"{n_processes} processes",
            expected=f"{state['n_processes']}, as before",
            hint=f"start {state['n_processes']} processes",
        )
    store = [(local(ordinal), *rest) for ordinal, *rest in state["store"] if is_mine(ordinal)]
    n_stored = sum(count for *_, kept in store for _, count in kept)
    is_first = share.start == 0
    tokens = {name: state["tokens"][name] if is_first else 0 for name in ("trained", "failed")}
    counts = state["counts"]
    return {
        "rules": {**state["rules"], "n_per_step": n},
        "counts": {
            "step": counts["step"],
            "n_begun": _n_of(counts["n_begun"], share, n_per_step),
            "n_given_back": counts["n_given_back"] if is_first else 0,
        },
        "tokens": {"generated": n_stored + sum(tokens.values()), **tokens},
        "running": [local(ordinal) for ordinal in state["running"] if is_mine(ordinal)],
        "store": store,
    }


def _n_of(n_begun: int, share: slice, n_per_step: int) -> int:
    """Number of a process's groups among the first `n_begun` of a run."""
    steps, rest = divmod(n_begun, n_per_step)
    n = int(share.stop - share.start)
    return steps * n + min(max(rest - int(share.start), 0), n)
