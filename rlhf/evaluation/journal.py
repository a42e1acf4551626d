"""Journal of the attempts of a block of tasks that is not whole yet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rlhf.data import Trajectory
from rlhf.errors import disk
from rlhf.evaluation.rows import TrajectoryRecord, decode, encode


class AttemptJournal:
    """File with a line for each finished attempt, written before it is scored, so that a killed process loses none.

    A half-written last line is ignored: that attempt is played again.

    Args:
        path: of the file, which need not be there.
        stage: that the attempts belong to.
    """

    def __init__(self, path: Path, stage: str) -> None:
        self._path, self._stage = path, stage
        self._held: dict[tuple[str, int], Trajectory] = {}
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            try:
                trajectory = decode(json.loads(line)).trajectory
            except (ValueError, KeyError, TypeError):
                continue
            self._held[trajectory.task_id, trajectory.attempt] = trajectory

    def held(self, task_id: str, attempt: int) -> Trajectory | None:
        """Return the attempt of this number at a task; None where the journal has none."""
        return self._held.get((task_id, attempt))

    def keep(self, trajectory: Trajectory) -> None:
        """Append an attempt. Raises CheckpointError where the disk is full or the folder cannot be written."""
        row = encode(TrajectoryRecord(0, self._stage, "eval", trajectory.task_id, trajectory))
        with disk("the attempts", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:  # a line begins where a torn one may have ended
                file.write(b"\n" + json.dumps(row, default=_plain).encode())


def _plain(value: np.ndarray | np.generic) -> object:
    return value.tolist()
