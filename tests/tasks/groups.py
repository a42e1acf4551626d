"""Groups of attempts by what came of them."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.data import Outcome, Score, ScoredGroup, Trajectory, Verdict


def group(task_id: str, values: Sequence[float], *, parts: Sequence[float] | None = None) -> ScoredGroup:
    """Attempts with these scores; above one half is solved. `parts` are the values of a reward called `right`."""
    parts = values if parts is None else parts
    return ScoredGroup(
        task_id,
        tuple(
            Trajectory(task_id, i, "", (), Outcome.SOLVED if x > 0.5 else Outcome.FAILED) for i, x in enumerate(values)
        ),
        tuple(Score({"right": Verdict(part)}, (), x) for x, part in zip(values, parts, strict=True)),
    )


def groups(*rows: str) -> list[ScoredGroup]:
    """Groups by their successes, as `0100`."""
    return [group(str(i), [float(x) for x in row]) for i, row in enumerate(rows)]
