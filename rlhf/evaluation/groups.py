"""Scored groups that wait to be trained, as bytes of a Parquet table: part of a checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.data import ScoredGroup
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
    return ScoredGroup(
        task_id=str(rows[0]["task_id"]),
        trajectories=tuple(record.trajectory for record in records),
        scores=tuple(record.score for record in records if record.score is not None),
        failures=tuple(decode_failure(row).failure for row in rows if row["is_failure"]),
    )
