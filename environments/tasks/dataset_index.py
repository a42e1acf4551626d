"""Index of the rows of question files, and tasks that are read from their files on demand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import overload

import numpy as np
import numpy.typing as npt

from environments.tasks.dataset_reader import RowReader
from environments.tasks.dataset_rows import SPLITS, Columns, Question
from rlhf.data import Task

#: Splits in the order in which they keep their prompts: the first of them that has a prompt is measured on it.
_RANKS = np.array([2, 1, 0])


@dataclass(frozen=True)
class Source:
    """A file that questions come from.

    Attributes:
        name: for messages.
        columns: that are used.
        rows: reads one of its rows; None where all tasks are held.
    """

    name: str
    columns: Columns
    rows: RowReader | None

    def task(self, first: int, number: int) -> Task:
        """Read the task of a row anew."""
        assert self.rows is not None
        return self.columns.question(number, self.rows.row(first, number)).task


@dataclass
class Index:
    """Rows of all sources: 58 bytes each, whatever is in them.

    Attributes:
        source: number of the source of each row.
        split: number of its split in `SPLITS`.
        first, number: first and last line of the row, or both its number, counted from 1.
        contents: 16 bytes of a hash of its prompt.
        wholes: 16 bytes of a hash of its prompt and answer.
    """

    source: array[int] = field(default_factory=lambda: array("B"))
    split: array[int] = field(default_factory=lambda: array("B"))
    first: array[int] = field(default_factory=lambda: array("Q"))
    number: array[int] = field(default_factory=lambda: array("Q"))
    contents: bytearray = field(default_factory=bytearray)
    wholes: bytearray = field(default_factory=bytearray)

    def add(self, source: int, split: str, first: int, question: Question) -> None:
        """Add a row behind the others."""
        self.source.append(source)
        self.split.append(SPLITS.index(split))
        self.first.append(first)
        self.number.append(question.number)
        content = question.content
        self.contents += blake2b(content.encode(), digest_size=16).digest()
        self.wholes += blake2b(repr((content, question.reference)).encode(), digest_size=16).digest()

    @property
    def splits(self) -> npt.NDArray[np.uint8]:
        """Number of the split of each row."""
        return np.frombuffer(self.split, np.uint8)

    def distinct(self) -> npt.NDArray[np.int64]:
        """Rows in order, each prompt with its answer once in a split: the first time."""
        split, whole = self.splits, _halves(self.wholes)
        order = np.lexsort((whole[:, 1], whole[:, 0], split))
        same = _as_before(split[order]) & _as_before(whole[order])
        return np.sort(order[~same])

    def shared(self, rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Rows whose prompt a split before theirs has too, each with such a row; test comes before dev and train."""
        rank = _RANKS[self.splits[rows]]
        content = _halves(self.contents)[rows]
        order = np.lexsort((rank, content[:, 1], content[:, 0]))
        begins = np.flatnonzero(~_as_before(content[order]))
        leader = np.repeat(order[begins], np.diff(np.append(begins, len(order))))
        late = rank[order] > rank[leader]
        found = sorted(zip(rank[order[late]], rows[order[late]], rows[leader[late]], strict=True))
        return [(int(row), int(other)) for _, row, other in found]


class ReadTasks(Sequence[Task]):
    """Tasks of a split, each read from its file on demand."""

    def __init__(self, sources: Sequence[Source], index: Index, rows: npt.NDArray[np.int64]) -> None:
        self._sources, self._index, self._rows = sources, index, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> Task: ...
    @overload
    def __getitem__(self, at: slice) -> ReadTasks: ...
    def __getitem__(self, at: int | slice) -> Task | ReadTasks:
        if isinstance(at, slice):
            return ReadTasks(self._sources, self._index, self._rows[at])
        row, index = int(self._rows[at]), self._index
        return self._sources[index.source[row]].task(index.first[row], index.number[row])


def _halves(digests: bytearray) -> npt.NDArray[np.uint64]:
    """Hashes of 16 bytes as two numbers each, `[N, 2]`."""
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def _as_before(values: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """True where a row equals the one before it."""
    equal = values[1:] == values[:-1]
    return np.concatenate([[False], equal.all(axis=1) if values.ndim > 1 else equal])
