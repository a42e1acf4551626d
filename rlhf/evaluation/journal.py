"""Journal of the attempts of an unfinished block of tasks, and attempts kept when an evaluation is given more."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from uuid import uuid4

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
        group_size: attempts at one task, of which the file then gives all or none, and those of one writer: where
            branches leave attempts whose token ids mean nothing to another process; 0 gives whatever is there.
    """

    def __init__(self, path: Path, stage: str, earlier: Iterable[Trajectory] = (), group_size: int = 0) -> None:
        self._path, self._stage, self._writer = path, stage, uuid4().hex
        lines = list(_lines(path))
        n_of = Counter((t.task_id, writer) for t, _, writer in lines)
        held = [(t, branch) for t, branch, writer in lines if n_of[t.task_id, writer] >= group_size]
        self._held = {(t.task_id, t.attempt, branch): t for t, branch in (*((t, "") for t in earlier), *held)}

    def held(self, task_id: str, attempt: int, branch: str = "") -> Trajectory | None:
        """Return the attempt of this number at a task, from a branch of this digest; None where there is none."""
        return self._held.get((task_id, attempt, branch))

    def keep(self, trajectory: Trajectory, branch: str = "") -> None:
        """Append an attempt. Raises CheckpointError where the disk is full or the folder cannot be written."""
        row = encode(TrajectoryRecord(0, self._stage, "eval", trajectory.task_id, trajectory))
        row |= {"branch": branch, "writer": self._writer}
        with disk("the attempts", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:  # a line begins where a torn one may have ended
                file.write(b"\n" + json.dumps(row, default=methodcaller("tolist")).encode())


def earlier_attempts(folder: Path, tasks: Collection[str], *, chosen: bool) -> Iterator[Trajectory]:
    """Yield the attempts at `tasks`, by id, that were set aside when an evaluation was given more attempts per task.

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
            yield from (t for t, *_ in _lines(path) if t.task_id in tasks)


def _lines(path: Path) -> Iterator[tuple[Trajectory, str, str]]:
    """Attempts of a journal, digests of their branches, and who wrote them, without what a kill left half-written."""
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            yield decode(row).trajectory, row.get("branch", ""), row.get("writer", "")
