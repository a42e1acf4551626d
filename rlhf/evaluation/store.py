"""Every trajectory of every step in Parquet files: `<stage>-<phase>-<step>.parquet`, one row per attempt.

Token ids, log-probs, scores and advantages come back exactly as they were. A prompt that extends the generation before
it is stored as its new tokens only. Attempts that ended with an infrastructure error are rows too, with `is_failure`
set and no score, so that counting `outcome` over a file counts every attempt. Any Parquet reader can open the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf.data import Credit, Outcome, ScoredGroup, TokenFigures
from rlhf.digests import Manifest
from rlhf.errors import DataError, whole
from rlhf.evaluation.answers import SamplingCost
from rlhf.evaluation.rows import (
    FORMAT,
    SCHEMA,
    FailureRecord,
    Phase,
    Row,
    TrajectoryRecord,
    decode,
    decode_failure,
    encode,
    encode_failure,
)

#: Columns that attempts are chosen by.
_FILTERED = ["is_failure", "task_id", "attempt", "outcome"]


@dataclass(frozen=True, slots=True, order=True)
class StoredStep:
    """File of a stored step."""

    stage: str
    step: int
    phase: str
    path: Path


@dataclass
class TrajectoryWriter:
    """Writes one file per (stage, step, phase), whole or not at all.

    A file that an earlier process left is replaced; a second write of the same step by this writer is an error.

    Attributes:
        folder: made if absent.
    """

    folder: Path
    _written: set[Path] = field(default_factory=set, repr=False)

    def write(
        self, stage: str, step: int, phase: str, records: Iterable[TrajectoryRecord | FailureRecord]
    ) -> Path | None:
        """Write all attempts of a step; returns the file, or None where there were no attempts.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written.
            DataError: a record of another step, a step already written, or a stage whose name is no file name.
        """
        path = self._path(stage, step, phase)
        rows = [_row(record, stage, step, phase) for record in records]
        if path in self._written:
            raise DataError("this step is already written", where=str(path), hint="write a step in one call")
        if not rows:
            return None
        self._write_file(path, rows)
        self._written.add(path)
        return path

    def write_groups(
        self,
        stage: str,
        step: int,
        phase: str,
        groups: Sequence[ScoredGroup],
        credits: Sequence[Credit | None] | None = None,
        figures: Sequence[TokenFigures | None] | None = None,
        *,
        spent: Sequence[Sequence[SamplingCost]] | None = None,
    ) -> Path | None:
        """Write scored groups, failed attempts included, with credit, figures and what was `spent` where given."""
        none = [None] * len(groups)
        given = (none if one is None else one for one in (credits, figures, spent))
        found = zip(groups, *given, strict=True)
        return self.write(stage, step, phase, [r for each in found for r in _of_group(stage, step, phase, *each)])

    def rewind(self, stage: str, step: int) -> None:
        """Delete the files of later steps of `stage`; an empty `stage` means every file."""
        for stored in list_steps(self.folder):
            if not stage or (stored.stage == stage and stored.step > step):
                stored.path.unlink()
                self._written.discard(stored.path)

    def _write_file(self, path: Path, rows: list[Row]) -> None:
        manifest = Manifest(path.parent)
        with whole("trajectories", path) as partial:
            if not manifest.is_there:  # what was written before there were digests is as it is now
                manifest.record_all(*(stored.path.name for stored in list_steps(path.parent)))
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), partial, compression="zstd")
            manifest.record(path, partial)

    def _path(self, stage: str, step: int, phase: str) -> Path:
        if not re.fullmatch(r"[\w.-]+", stage) or phase not in get_args(Phase) or step < 0:
            raise DataError(
                "no file can be named after this step",
                where="TrajectoryWriter",
                got=f"stage {stage!r}, phase {phase!r}, step {step}",
                expected="a stage of letters, digits, '_', '.', '-'; phase train or eval; a step from 0",
            )
        return Path(self.folder) / f"{stage}-{phase}-{step:06d}.parquet"


def _of_group(
    stage: str,
    step: int,
    phase: str,
    group: ScoredGroup,
    credit: Credit | None,
    figures: TokenFigures | None,
    spent: Sequence[SamplingCost] | None,
) -> Iterator[TrajectoryRecord | FailureRecord]:
    for i, (trajectory, score) in enumerate(zip(group.trajectories, group.scores, strict=True)):
        advantages = credit.advantages_GNT[i] if credit is not None else None
        took = spent[i] if spent is not None else None
        shown = (None, None) if figures is None else (figures.entropies_GNT[i], figures.gaps_GNT[i])
        yield TrajectoryRecord(step, stage, phase, group.task_id, trajectory, score, advantages, took, *shown)
    for failure in group.failures:
        yield FailureRecord(step, stage, phase, group.task_id, failure)


def _row(record: TrajectoryRecord | FailureRecord, stage: str, step: int, phase: str) -> Row:
    if (record.stage, record.step, record.phase) != (stage, step, phase):
        raise DataError(
            "a record of another step",
            where="TrajectoryWriter.write",
            got=f"{record.stage} {record.phase} {record.step}",
            expected=f"{stage} {phase} {step}",
        )
    return encode(record) if isinstance(record, TrajectoryRecord) else encode_failure(record)


def list_steps(folder: Path) -> list[StoredStep]:
    """List the files of a store, by stage, step and phase. A folder that does not exist is empty."""
    found = []
    for path in Path(folder).glob("*.parquet"):
        if match := re.fullmatch(r"([\w.-]+)-(train|eval)-(\d+)", path.stem):
            found.append(StoredStep(match[1], int(match[3]), match[2], path))
    return sorted(found)


def read_trajectories(
    folder: Path,
    *,
    stage: str | None = None,
    phase: Phase | None = None,
    steps: Collection[int] | None = None,
    task_id: str | None = None,
    task_ids: Collection[str] | None = None,
    attempt: int | None = None,
    outcomes: Collection[Outcome] | None = None,
    limit: int | None = None,
) -> Iterator[TrajectoryRecord]:
    """Yield the stored trajectories that pass every filter given, file by file, at most `limit`.

    Raises:
        CheckpointError: a file is not what was written.
        DataError: a file cannot be read.
    """
    left = limit
    is_filtered = any(given is not None for given in (task_id, task_ids, attempt, outcomes))
    wanted = pc.field("is_failure") == False  # noqa: E712  an expression
    if task_id is not None:
        wanted &= pc.field("task_id") == task_id
    if task_ids is not None:
        wanted &= pc.field("task_id").isin(list(task_ids))
    if attempt is not None:
        wanted &= pc.field("attempt") == attempt
    if outcomes is not None:
        wanted &= pc.field("outcome").isin([str(outcome) for outcome in outcomes])
    for stored in list_steps(folder):
        if left == 0:
            return
        if stage in (None, stored.stage) and phase in (None, stored.phase) and (steps is None or stored.step in steps):
            _verify(stored.path)
            # Texts and tokens, nearly all of a file, are read only where an attempt matches.
            if is_filtered and not _table(stored.path, _FILTERED).filter(wanted).num_rows:
                continue
            rows = _table(stored.path).filter(wanted).slice(0, left).to_pylist()
            yield from map(decode, rows)
            left = None if left is None else left - len(rows)


def read_successes(folder: Path, *, stage: str | None = None) -> dict[str, list[bool]]:
    """Read whether each attempt of evaluations was solved, by task, without failures of parts; for `paired.compare`."""
    found: dict[str, list[bool]] = {}
    for stored in list_steps(folder):
        if stage in (None, stored.stage) and stored.phase == "eval":
            table = _read_file(stored.path, ["task_id", "outcome", "solved"])
            for task_id, outcome, solved in zip(*(table[name].to_pylist() for name in table.column_names), strict=True):
                if not Outcome(outcome).is_infrastructure_error:
                    found.setdefault(task_id, []).append(solved)
    return found


def read_failures(folder: Path, *, stage: str | None = None, phase: Phase | None = None) -> Iterator[FailureRecord]:
    """Yield the stored attempts that ended with an infrastructure error."""
    columns = ["step", "stage", "phase", "task_id", "attempt", "outcome", "detail", "retryable", "is_failure"]
    for stored in list_steps(folder):
        if stage in (None, stored.stage) and phase in (None, stored.phase):
            table = _read_file(stored.path, columns)
            yield from map(decode_failure, table.filter(table["is_failure"]).to_pylist())


def read_columns(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a file as plain values, failures included; None for a missing column.

    Raises:
        CheckpointError: the file is not what was written.
        DataError: it cannot be read.
    """
    names = set(_checked(pq.read_schema, path).names)
    for row in _read_file(path, [name for name in columns if name in names]).to_pylist():
        yield {name: row.get(name) for name in columns}


def _read_file(path: Path, columns: list[str]) -> Any:
    _verify(path)
    return _table(path, columns)


def _verify(path: Path) -> None:
    Manifest(path.parent).require(path)
    if not FORMAT.items() <= dict(_checked(pq.read_schema, path).metadata or {}).items():
        raise DataError("a trajectory file of another format", where=str(path), expected="format 1")


def _table(path: Path, columns: list[str] | None = None) -> Any:
    return _checked(pq.read_table, path, columns=columns, partitioning=None)


def _checked(read: Callable[..., Any], path: Path, **options: Any) -> Any:
    try:
        return read(path, **options)
    except (OSError, pa.ArrowException) as error:
        raise DataError("not a readable trajectory file", where=str(path), got=str(error)[:200]) from error
