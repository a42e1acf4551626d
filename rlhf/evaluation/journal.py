"""Journal of the attempts of a block of tasks that is not whole yet, and attempts of when there were fewer at each."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from rlhf.data import Trajectory
from rlhf.errors import disk
from rlhf.evaluation.folder import CANDIDATES, TRAJECTORIES, list_earlier
from rlhf.evaluation.rows import TrajectoryRecord, decode, encode
from rlhf.evaluation.store import read_trajectories


class AttemptJournal:
    """File with a line for each finished attempt, written before it is scored, so that a killed process loses none.

    A half-written last line is ignored: that attempt is played again.

    Args:
        path: of the file, which need not be there.
        stage: that the attempts belong to.
        earlier: attempts that are held as well and stored elsewhere.
    """

    def __init__(self, path: Path, stage: str, earlier: Iterable[Trajectory] = ()) -> None:
        self._path, self._stage = path, stage
        self._held = {(t.task_id, t.attempt): t for t in (*earlier, *_lines(path))}

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


def earlier_attempts(folder: Path, tasks: Collection[str], *, chosen: bool) -> Iterator[Trajectory]:
    """Yield the attempts at `tasks`, by id, from before an evaluation was given more attempts at each.

    Args:
        folder: of the evaluation.
        tasks: ids, which no two parts of a suite share.
        chosen: whether a strategy chose the attempts, so that its candidates are what was played.
    """
    for place in list_earlier(folder):
        yield from (
            record.trajectory
            for record in read_trajectories(place / (CANDIDATES if chosen else TRAJECTORIES), task_ids=tasks)
        )
        for path in sorted((place / TRAJECTORIES).glob("*.jsonl")):
            yield from (t for t in _lines(path) if t.task_id in tasks)


def _lines(path: Path) -> Iterator[Trajectory]:
    """Attempts of a journal; none where there is no file, and without what a kill left half-written."""
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            yield decode(json.loads(line)).trajectory


def _plain(value: np.ndarray | np.generic) -> object:
    return value.tolist()
