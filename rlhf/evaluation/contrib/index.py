"""Index of a trajectory folder: stage, step, task and outcome of every attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf.data import Outcome
from rlhf.evaluation.rows import Row
from rlhf.evaluation.store import list_steps, read_columns

_COLUMNS = ("stage", "phase", "step", "task_id", "attempt", "outcome", "is_failure")


@dataclass(frozen=True, slots=True)
class Query:
    """Filter of attempts; None matches any.

    Attributes:
        step: they were made in.
        task: id.
        attempt: at the task, from 0.
        outcome: how they ended; None asks for those that no part failed in.
    """

    step: int | None = None
    task: str | None = None
    attempt: int | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Index:
    """Every attempt of a store.

    Attributes:
        rows: plain values, in the order of the files.
    """

    rows: list[Row]

    @classmethod
    def read(cls, folder: Path, step: int | None = None) -> Index:
        """Read it from the files of a folder, all of them or those of a step.

        Raises:
            DataError: a file cannot be read.
        """
        files = [stored.path for stored in list_steps(folder) if step in (None, stored.step)]
        return cls([row for path in files for row in read_columns(path, _COLUMNS)])

    def count(self, query: Query) -> int:
        """Attempts that are like this."""
        wanted = None if query.outcome is None else query.outcome.value
        alike = self._alike(query)
        return sum(not row["is_failure"] if wanted is None else row["outcome"] == wanted for row in alike)

    def outcomes(self, query: Query) -> dict[str, int]:
        """Counts of outcomes among attempts that match all else, most frequent first."""
        return dict(Counter(row["outcome"] for row in self._alike(query)).most_common())

    @property
    def steps(self) -> list[int]:
        """Stored steps, in order."""
        return sorted({row["step"] for row in self.rows})

    def said(self) -> str:
        """The stored steps for the reader: `0 (eval, before), 1 to 33 (train, 0-policy_gradient)`."""
        kinds: dict[tuple[str, str], set[int]] = {}
        for row in self.rows:
            kinds.setdefault((row["phase"], row["stage"]), set()).add(row["step"])
        ordered = sorted(kinds.items(), key=lambda kind: (min(kind[1]), kind[0]))
        return ", ".join(f"{_ranges(steps)} ({phase}, {stage})" for (phase, stage), steps in ordered)

    def _alike(self, query: Query) -> Iterator[Row]:
        wanted = (query.step, query.task, query.attempt)
        for row in self.rows:
            stored = (row["step"], row["task_id"], row["attempt"])
            if all(value in (None, there) for value, there in zip(wanted, stored, strict=True)):
                yield row


def _ranges(steps: set[int]) -> str:
    """Numbers as `1 to 4 and 8`."""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], step]
        else:
            runs.append([step, step])
    return " and ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
