"""Readers of single rows: of files that are too large to hold, and of data sets that lie on the disk anyway."""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from environments.tasks.dataset_files import Row, load_folder, table_reader
from rlhf.errors import EnvError

#: Bytes that are looked through for line ends at a time.
_CHUNK = 1 << 20


class RowReader(Protocol):
    """Reads one row of a source."""

    def row(self, first: int, number: int) -> Row:
        """Return a row that was read before, by its first line and its number."""


@dataclass
class OfLines:
    """Rows of a text file, found by the bytes at which its lines begin: 8 bytes a line.

    Attributes:
        path: JSON lines, CSV or TSV.
        n_lines: lines up to the last row that is used.
        heads: names of the columns of a table.
    """

    path: Path
    n_lines: int
    heads: Sequence[str]
    _state: tuple[int, int] = field(init=False)
    _begins: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self._state, self._begins = _state(self.path), _begins(self.path, self.n_lines)

    def row(self, first: int, number: int) -> Row:
        """Return a row. Raises EnvError where the file is not what it was."""
        is_table = self.path.suffix.lower() in (".csv", ".tsv")  # whose rows may have several lines
        begin, end = int(self._begins[(first if is_table else number) - 1]), int(self._begins[number])
        with self.path.open("rb") as file:
            file.seek(begin)
            text = file.read(end - begin).decode("utf-8-sig")
        _refuse_changed(self.path, self._state)
        if not is_table:
            return dict(json.loads(text))
        *_, row = table_reader(io.StringIO(text, newline=""), self.path, self.heads)
        return row


@dataclass(frozen=True)
class OfParquet:
    """Rows of a Parquet file, which is read by row groups; the two used last are kept."""

    path: Path
    _state: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_state", _state(self.path))

    def row(self, first: int, number: int) -> Row:
        """Return a row. Raises EnvError where the file is not what it was."""
        _refuse_changed(self.path, self._state)
        ends = _group_ends(self.path, self._state)
        at = bisect_right(ends, number - 1)
        table = _group(self.path, self._state, at)
        [row] = table.slice(number - 1 - (ends[at - 1] if at else 0), 1).to_pylist()
        return dict(row)


@dataclass(frozen=True)
class OfDatasets:
    """Rows of a data set of the package `datasets`, which maps its files into memory."""

    found: Any

    def row(self, first: int, number: int) -> Row:
        """Return a row."""
        return dict(self.found[number - 1])


def reader_of(path: Path, n_lines: int, heads: Sequence[str]) -> RowReader:
    """Reader of the rows of a file or folder that has been read once.

    Args:
        path: of any kind but `.json`, which is one value.
        n_lines: lines up to the last row that is used.
        heads: names of the columns.
    """
    if path.is_dir():
        return OfDatasets(load_folder(path, str(path)))
    return OfParquet(path) if path.suffix.lower() == ".parquet" else OfLines(path, n_lines, heads)


def _refuse_changed(path: Path, known: tuple[int, int]) -> None:
    if _state(path) != known:
        raise EnvError("the file changed while a run reads it", where=str(path), hint="put it back")


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _begins(path: Path, n_lines: int) -> npt.NDArray[np.int64]:
    """Bytes at which the first `n_lines` lines of a file begin, and the one at which the last of them ends."""
    found, n, at = [np.zeros(1, np.int64)], 0, 0
    with path.open("rb") as file:
        while n < n_lines and (chunk := file.read(_CHUNK)):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (at + 1)
            found.append(ends)
            n, at = n + len(ends), at + len(chunk)
    if n < n_lines:  # the last line has no end
        found.append(np.array([at]))
    return np.concatenate(found)[: n_lines + 1]


@lru_cache(maxsize=8)
def _group_ends(path: Path, state: tuple[int, int]) -> list[int]:
    import pyarrow.parquet as pq

    about = pq.ParquetFile(path).metadata
    return list(accumulate(about.row_group(i).num_rows for i in range(about.num_row_groups)))


@lru_cache(maxsize=2)
def _group(path: Path, state: tuple[int, int], at: int) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path).read_row_group(at)
