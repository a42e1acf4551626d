"""Attempts of a run, read from its Parquet files a step at a time: the store is never in memory as a whole.

Of a step only the cheap columns are read and kept, for the steps looked at last. Texts are looked for in one file after
the other, from the newest, within a budget of seconds and with a cursor to go on from.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf.errors import DataError
from rlhf.evaluation.rows import FORMAT, Row
from rlhf.evaluation.store import StoredStep, list_steps
from rlhf.viewer.redaction import cut_whole

_CHEAP = (
    "task_id",
    "attempt",
    "outcome",
    "is_failure",
    "n_turns",
    "n_tokens",
    "duration_s",
    "parent",
    "detail",
    "score.total",
)
#: Where texts are looked for; what an older file lacks is not.
_TEXTS = (
    "opening",
    "detail",
    "turns.list.element.text",
    "turns.list.element.reply",
    "turns.list.element.said",
    "turns.list.element.notes",
)
#: Steps whose rows are kept, and characters of a detail among them.
_KEPT, _DETAIL = 32, 300
#: Rows of a file that are read at a time.
_BATCH = 32
#: Characters around a text that was found.
_AROUND = 80


@dataclass(frozen=True, slots=True)
class Filter:
    """Filter of attempts; empty or None admits all.

    Attributes:
        outcomes: how they ended.
        task: in the id of the task, whatever its case.
        exact: the id of the task.
        least: score.
        most: score.
        text: in what was said, by the environment, the policy or a failure; whatever its case.
    """

    outcomes: tuple[str, ...] = ()
    task: str = ""
    exact: str = ""
    least: float | None = None
    most: float | None = None
    text: str = ""

    def admits(self, row: Row) -> bool:
        """True if a row without its texts may match."""
        score = row["score"]
        return (
            (not self.outcomes or row["outcome"] in self.outcomes)
            and (not self.exact or row["task_id"] == self.exact)
            and (not self.task or self.task.casefold() in str(row["task_id"]).casefold())
            and (self.least is None or (score is not None and score >= self.least))
            and (self.most is None or (score is not None and score <= self.most))
        )


class Attempts:
    """The trajectory files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: OrderedDict[tuple[Path, int, int], list[Row]] = OrderedDict()
        self._turn = threading.Lock()
        self._steps: tuple[int, float, list[StoredStep]] = (-1, 0.0, [])

    def steps(self) -> list[StoredStep]:
        """The files in the order they were made: before, training, what was evaluated in between, after."""
        try:
            changed = self.folder.stat().st_mtime_ns
        except OSError:
            return []
        at, looked, found = self._steps
        # A file that came within the clock's grain of the last look would be missed, but for a second look.
        if at != changed or time.time() - looked < 1:
            found = sorted(list_steps(self.folder), key=_age)
            self._steps = (changed, time.time() if at != changed else looked, found)
        return found

    def find(self, stage: str, phase: str, step: int) -> StoredStep:
        """The file of a step.

        Raises:
            DataError: there is none.
        """
        for stored in self.steps():
            if (stored.stage, stored.phase, stored.step) == (stage, phase, step):
                return stored
        raise DataError("no attempts of this step are stored", where=str(self.folder), got=f"{stage} {phase} {step}")

    def rows(self, stored: StoredStep) -> list[Row]:
        """Cheap columns of all attempts of a step, failures of parts among them, by place in the file.

        Raises:
            DataError: the file cannot be read.
        """
        key = _identity(stored.path)
        with self._turn:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with _opened(stored.path) as file:
            there = {file.schema.column(i).path for i in range(len(file.schema))}
            table = file.read([name for name in _CHEAP if name in there], use_threads=False)
        rows = [_cheap(row, i) for i, row in enumerate(table.to_pylist())]
        with self._turn:
            self._kept[key] = rows
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return rows

    def matching(self, stored: StoredStep, wanted: Filter, clean: Callable[[str], str] = str) -> dict[int, str]:
        """Places of a step's attempts that match once their texts are clean, with the text around each match."""
        places = [row["row"] for row in self.rows(stored) if wanted.admits(row)]
        if not wanted.text or not places:
            return dict.fromkeys(places, "")
        found, asked = _with_text(stored.path, wanted.text, clean), set(places)
        return {place: around for place, around in found if place in asked}

    def record(self, stored: StoredStep, place: int) -> Row:
        """The whole row of one attempt.

        Raises:
            DataError: there is none, or the file cannot be read.
        """
        with _opened(stored.path) as file:
            before = 0
            for batch in file.iter_batches(batch_size=_BATCH, use_threads=False) if place >= 0 else ():
                if place < before + batch.num_rows:
                    row: Row = batch.slice(place - before, 1).to_pylist()[0]
                    return row
                before += batch.num_rows
        raise DataError("no such attempt", where=str(stored.path), got=f"row {place}", expected=f"0 to {before - 1}")

    def records(self, stored: StoredStep) -> Iterator[Row]:
        """The whole rows of all attempts of a step, in the order of the file.

        Raises:
            DataError: the file cannot be read.
        """
        with _opened(stored.path) as file:
            for batch in file.iter_batches(batch_size=_BATCH, use_threads=False):
                yield from batch.to_pylist()

    def search(
        self, wanted: Filter, cursor: int, budget_s: float, limit: int, clean: Callable[[str], str] = str
    ) -> dict[str, Any]:
        """Attempts of all steps that are looked for, from the newest file on.

        Args:
            wanted: what is looked for.
            cursor: how many files, from the newest, were looked through before; those that came since shift nothing, as
                a cursor counts files from the oldest.
            budget_s: seconds, at the end of which the file at hand is finished.
            limit: attempts, likewise.
            clean: blacks out what a text must not show, which a search neither finds nor tells.

        Returns:
            `hits`, the `cursor` to go on from or None at the end, how many files are `left`, and `problems`.
        """
        files, hits, problems = self.steps(), list[Row](), list[str]()
        left = len(files) if cursor < 0 else min(cursor, len(files))
        until = time.monotonic() + budget_s
        while left and len(hits) < limit and (time.monotonic() < until or left == len(files)):
            left -= 1
            stored = files[left]
            try:
                found, rows = self.matching(stored, wanted, clean), self.rows(stored)
            except DataError as error:
                problems.append(str(error))
                continue
            at = {"stage": stored.stage, "phase": stored.phase, "step": stored.step}
            hits += [{**at, **rows[place], "around": around} for place, around in found.items()]
        return {"hits": hits, "cursor": left or None, "left": left, "n_files": len(files), "problems": problems}


def groups(rows: Sequence[Row], places: set[int] | None = None) -> list[Row]:
    """Attempts by task in the order of the file, with the mean and the spread of their scores.

    Args:
        rows: of a step.
        places: what was looked for; other attempts of their tasks come along, with `found` false. None is all.
    """
    tasks: dict[str, list[Row]] = {}
    for row in rows:
        tasks.setdefault(row["task_id"], []).append({**row, "found": places is None or row["row"] in places})
    return [_group(task, found) for task, found in tasks.items() if any(row["found"] for row in found)]


def _group(task: str, rows: list[Row]) -> Row:
    counted = [row for row in rows if not row["is_failure"]]
    scores = [row["score"] for row in counted if row["score"] is not None]
    n = max(len(counted), 1)
    return {
        "task_id": task,
        "attempts": sorted(rows, key=lambda row: row["attempt"]),
        "mean": statistics.fmean(scores) if scores else None,
        "spread": statistics.pstdev(scores) if scores else None,
        "solved": sum(row["outcome"] == "solved" for row in counted) / n if counted else None,
        "turns": sum(row["n_turns"] for row in counted) / n,
        "tokens": sum(row["n_tokens"] for row in counted) / n,
        "seconds": sum(row["duration_s"] for row in counted) / n,
    }


def _age(stored: StoredStep) -> tuple[int, str, int, str]:
    order = 0 if stored.stage == "before" else 2 if stored.stage == "after" else 1
    return (order, stored.stage if order == 1 else "", stored.step, stored.phase)


def _cheap(row: Row, place: int) -> Row:
    return {
        "row": place,
        "task_id": row["task_id"] or "",
        "attempt": row["attempt"] or 0,
        "outcome": row["outcome"] or "",
        "is_failure": bool(row["is_failure"]),
        "n_turns": row.get("n_turns") or 0,
        "n_tokens": row.get("n_tokens") or 0,
        "duration_s": row.get("duration_s") or 0.0,
        "parent": row.get("parent"),
        "detail": cut_whole(row.get("detail") or "", _DETAIL),
        "score": (row.get("score") or {}).get("total"),
    }


def _with_text(path: Path, text: str, clean: Callable[[str], str]) -> Iterator[tuple[int, str]]:
    """Rows of a file in which a text stands, with what is around it."""
    with _opened(path) as file:
        there = [file.schema.column(i).path for i in range(len(file.schema))]
        columns = [name for name in there if any(name == t or name.startswith(f"{t}.") for t in _TEXTS)]
        before = 0
        for batch in file.iter_batches(batch_size=8 * _BATCH, columns=columns, use_threads=False):
            found: dict[int, str] = {}
            for column in batch.columns:
                for place, words in _strings(column, pa.array(range(before, before + batch.num_rows))):
                    _look(words, place, text, clean, found)
            yield from sorted(found.items())
            before += batch.num_rows


def _look(words: Any, place: Any, text: str, clean: Callable[[str], str], found: dict[int, str]) -> None:
    """Note what is around the text, in words that were cleaned whole: half of a key looks like none."""
    hit = pc.fill_null(pc.match_substring(words, text, ignore_case=True), False)
    for row, value in zip(place.filter(hit).to_pylist(), words.filter(hit), strict=True):
        if row in found:
            continue
        shown = clean(value.as_py())
        if (at := shown.casefold().find(text.casefold())) >= 0:
            found[row] = shown[max(0, at - _AROUND) : at + len(text) + _AROUND]


def _strings(column: Any, place: Any) -> Iterator[tuple[Any, Any]]:
    """Every array of texts in a column, however deep, with the row that each of them belongs to."""
    kind = column.type
    if pa.types.is_map(kind):
        column = column.cast(pa.list_(pa.struct({"key": kind.key_type, "value": kind.item_type})))
        kind = column.type
    if pa.types.is_string(kind):
        yield place, column
    elif pa.types.is_list(kind):
        yield from _strings(column.flatten(), place.take(pc.list_parent_indices(column)))
    elif pa.types.is_struct(kind):
        for child in column.flatten():
            yield from _strings(child, place)


def _identity(path: Path) -> tuple[Path, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return path, stat.st_mtime_ns, stat.st_size


class _opened:
    """A Parquet file of the store, closed at the end; whatever it is that cannot be read is a DataError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        try:
            self._file = pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(self.path, error) from error
        if not FORMAT.items() <= dict(self._file.schema_arrow.metadata or {}).items():
            raise DataError("a trajectory file of another format", where=str(self.path), expected="format 1")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._file.close()
        if isinstance(error, OSError | pa.ArrowException):
            raise _unreadable(self.path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError("not a readable trajectory file", where=str(path), got=str(error)[:200])
