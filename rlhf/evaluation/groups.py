"""Scored groups that wait to be trained, as bytes of a Parquet table: part of a checkpoint."""

from __future__ import annotations

import io
import itertools
import operator
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.data import ScoredGroup, Trajectory
from rlhf.data.generation import calls_of
from rlhf.errors import DataError
from rlhf.evaluation.rows import (
    SCHEMA,
    FailureRecord,
    TrajectoryRecord,
    decode,
    decode_failure,
    encode,
    encode_failure,
)
from rlhf.rollout.branching import Branch, SharedPrefix


def pack_groups(groups: Mapping[int, ScoredGroup]) -> bytes:
    """Return groups by their ordinals as bytes, of which `unpack_groups` makes equal ones."""
    rows = []
    for ordinal, group in groups.items():
        told = (ordinal, "ahead", "train", group.task_id)
        scored = zip(group.trajectories, group.scores, strict=True)
        rows += [encode(TrajectoryRecord(*told, trajectory, score)) for trajectory, score in scored]
        rows += [encode_failure(FailureRecord(*told, failure)) for failure in group.failures]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file, compression="zstd")
    return file.getvalue()


def unpack_groups(content: bytes) -> dict[int, ScoredGroup]:
    """Return the groups that `pack_groups` was given, in their order. Raises DataError where these are none."""
    try:
        rows = pq.read_table(io.BytesIO(content)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError("groups of a checkpoint cannot be read", where="unpack_groups", got=str(error)) from error
    found: dict[int, list[dict[str, object]]] = {}
    for row in rows:
        found.setdefault(row["step"], []).append(row)
    return {ordinal: _group(of_group) for ordinal, of_group in found.items()}


def _group(rows: list[dict[str, object]]) -> ScoredGroup:
    records = [decode(row) for row in rows if not row["is_failure"]]
    attempts: list[Trajectory] = []
    made: dict[int | None, Trajectory] = {}
    for record in records:  # an attempt comes before its branches
        t, parent = record.trajectory, made.get(record.trajectory.parent)
        attempts.append(t if parent is None else _rejoined(t, parent))
        made[t.attempt] = attempts[-1]
    return ScoredGroup(
        task_id=str(rows[0]["task_id"]),
        trajectories=tuple(attempts),
        scores=tuple(record.score for record in records if record.score is not None),
        failures=tuple(decode_failure(row).failure for row in rows if row["is_failure"]),
    )


def _rejoined(t: Trajectory, parent: Trajectory) -> Trajectory:
    """Return an attempt with the turns and pieces that it shares with the one it left, as the same objects."""
    turns, head = parent.turns[: t.n_shared], None
    if turns != t.turns[: t.n_shared]:  # another attempt of that number
        return t
    if t.n_shared < min(len(t.turns), len(parent.turns)):
        mine, theirs = t.turns[t.n_shared].generations, parent.turns[t.n_shared].generations
        n_alike = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, mine, theirs)))
        n = n_shared = 0
        for call in calls_of(mine):
            # Of the call within which they part something is its own; a call may also be answered alike by chance.
            if len(call) > 1 and n < n_alike:
                n_shared = min(n_alike, n + len(call) - 1)
            n += len(call)
        head = SharedPrefix((), theirs[:n_shared])
    return Branch(parent.attempt, turns, head=head).rejoined(t)
