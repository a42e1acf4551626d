"""Readers of question files: JSON lines, JSON, CSV, TSV, Parquet, or a `datasets` data set."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from rlhf.errors import EnvError, MissingPackageError, nearest

_KINDS = ".jsonl, .ndjson, .json, .csv, .tsv or .parquet, or a folder that datasets.save_to_disk has written"
#: Rows of a Parquet file that are read at a time.
_N_ROWS = 1_000
#: Characters of a cell of a table, at most.
_LONGEST_CELL = 1 << 26

Row = Mapping[str, Any]


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def refuse_too_large(path: Path, where: str) -> None:
    """Raise EnvError if a file that can only be read as a whole is larger than free memory."""
    size, free = size_of(path), psutil.virtual_memory().available
    if size > free:
        raise EnvError(
            "this data does not fit into memory",
            where=where,
            got=f"{path}: {size / 1e9:,.1f} GB",
            expected=f"less than the {free / 1e9:,.1f} GB that are free, as a .json file is read as a whole",
            hint="write it as JSON lines, which are read row by row, or set environment.max_rows: 100000",
        )


def read(path: Path, where: str) -> Iterator[tuple[int, Row]]:
    """Yield number and columns of each row: the line number, or counted from 1.

    Args:
        path: file or folder.
        where: recipe key that names it, for errors.

    Raises:
        EnvError: it is not there, of no known kind, or a row is no mapping of columns; the line is named.
        MissingPackageError: a folder, without the package `datasets`.
    """
    if path.is_dir():
        yield from enumerate(load_folder(path, where), start=1)
        return
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, beside) or "give its path, from here or beside the recipe"
        raise EnvError("no such file", where=where, got=str(path), expected=_KINDS, hint=hint)
    readers = {
        ".jsonl": json_lines, ".ndjson": json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet,
    }  # fmt: skip
    if (reader := readers.get(path.suffix.lower())) is None:
        raise EnvError("unknown file type", where=where, got=path.name, expected=_KINDS, hint="convert it")
    yield from reader(path)


def json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield line number and object of each line that is not blank. Raises EnvError, naming the line."""
    with _opened(path, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _mapping(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _json(path: Path) -> Iterator[tuple[int, Row]]:
    with _opened(path) as file:
        found = _parsed(file.read(), str(path))
    if not isinstance(found, list):
        raise EnvError(
            "no list of rows",
            where=str(path),
            got=f"an object with {', '.join(map(str, found))}"[:200] if isinstance(found, dict) else str(found)[:80],
            expected="[{...}, ...]",
            hint="take the list out of its object",
        )
    for number, row in enumerate(found, start=1):
        yield number, _mapping(row, f"{path}, row {number}")


def _csv(path: Path) -> Iterator[tuple[int, Row]]:
    with _opened(path, newline=_line_end(path)) as file:
        reader = table_reader(file, path)
        try:
            if twice := next((name for name, n in Counter(reader.fieldnames or ()).items() if name and n > 1), None):
                heads = ", ".join(reader.fieldnames or ())
                raise EnvError("two columns have one name", where=f"{path}:1", got=heads, expected=f"one {twice}")
            for row in reader:
                if None in row or None in row.values():
                    n = sum(value is not None for value in row.values()) + len(row.get(None) or ()) - (None in row)
                    raise EnvError(
                        "this row and the header differ in length",
                        where=f"{path}:{reader.line_num}",
                        got=f"{n} cells",
                        expected=f"{len(reader.fieldnames or ())}: {', '.join(reader.fieldnames or ())}",
                        hint="quote cells that hold commas or line ends",
                    )
                yield reader.line_num, row
        except csv.Error as error:
            raise EnvError("no CSV", where=f"{path}:{reader.line_num}", got=str(error)) from error


def _line_end(path: Path) -> str:
    """Line end of a table, after `open`: any of its own where it has no plain one, as tables of old Macs."""
    with path.open("rb") as file:
        return "\n" if b"\n" in file.read(1 << 20) else ""


def has_old_ends(path: Path) -> bool:
    """True for a table whose lines end as those of old Macs, so that it has no lines to be found by."""
    return path.suffix.lower() in (".csv", ".tsv") and path.is_file() and not _line_end(path)


def table_reader(file: Iterable[str], path: Path, heads: Sequence[str] | None = None) -> csv.DictReader[str]:
    """Reader of a table's rows, whose cells may be long."""
    csv.field_size_limit(_LONGEST_CELL)
    return csv.DictReader(file, heads, dialect="excel-tab" if path.suffix.lower() == ".tsv" else "excel")


def _parquet(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = (row for batch in pq.ParquetFile(path).iter_batches(_N_ROWS) for row in batch.to_pylist())
        yield from enumerate(rows, start=1)
    except (pa.ArrowException, OSError) as error:
        raise EnvError("no Parquet", where=str(path), got=str(error)[:200], hint="is the file whole?") from error


def load_folder(path: Path, where: str) -> Any:
    """Load a folder that `datasets.save_to_disk` has written. Raises EnvError, MissingPackageError."""
    datasets = _package()
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:
        names = ", ".join(sorted(p.name for p in path.iterdir())[:5])
        got, hint = f"the folder {path} with {names or 'nothing'}", "name a file in it"
        raise EnvError("no data set", where=where, got=got, expected=_KINDS, hint=hint) from error
    if isinstance(found, datasets.DatasetDict):
        raise EnvError(
            "this folder holds several splits",
            where=where,
            got=", ".join(map(str, found)),
            expected="the folder of one",
            hint=f"environment.train: {path / 'train'}, environment.test: ...",
        )
    return found


@dataclass(frozen=True)
class FirstRows:
    """First rows of a split that were read from a stream, in place of a data set that lies on the disk."""

    rows: Sequence[Row]
    split: str

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, at: int) -> Row:
        return self.rows[at]

    @property
    def _fingerprint(self) -> str:
        """Digest of the rows, as the package `datasets` has one of a whole data set."""
        whole = hashlib.sha256()
        for row in self.rows:
            whole.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
        return whole.hexdigest()[:16]


def load_hub(name: str, config: str | None, where: str, known: Collection[str], n_rows: int | None) -> dict[str, Any]:
    """Load the splits of a data set of the hub, or of a folder in its form.

    Args:
        name: as `datasets.load_dataset` takes it.
        config: of a data set that has several.
        where: recipe key that names it, for errors.
        known: names of splits that rows are read of.
        n_rows: only the first rows of each split, which are read from a stream and held: nothing else is fetched. None
            fetches all, and leaves it on the disk.

    Raises:
        EnvError: there is none of this name, or it cannot be fetched.
        MissingPackageError: without the package `datasets`.
    """
    datasets = _package()
    try:
        found = dict(datasets.load_dataset(name, config, streaming=n_rows is not None))
        if n_rows is None:
            return found
        # Not `rows.take`, which looks into the next file before it says that there is enough.
        return {
            split: FirstRows([dict(row) for row in islice(rows, n_rows)], split) if split in known else rows
            for split, rows in found.items()
        }
    except Exception as error:
        raise EnvError(
            "this data set cannot be loaded",
            where=where,
            got=f"{name}{f', {config}' if config else ''}: {' '.join(str(error).split())[:200]}",
            expected="the name of a data set on the hub, such as openai/gsm8k",
            hint="see its page for environment.hub_config; without a network, save it elsewhere: environment.path",
        ) from error


def _package() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingPackageError(
            "this needs the package datasets",
            where="environment",
            got="not installed",
            hint="pip install datasets, or save the data as JSON lines or Parquet",
        ) from error
    return datasets


@contextmanager
def _opened(path: Path, **how: Any) -> Iterator[Any]:
    """Open a text file; what cannot be read of it is an EnvError."""
    try:
        with path.open(encoding="utf-8-sig", **how) as file:
            yield file
    except UnicodeDecodeError as error:
        got = f"byte {error.start}: {error.object[error.start : error.start + 8]!r}"
        theirs = "utf-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        raise EnvError("no UTF-8", where=str(path), got=got, hint=f"iconv -f {theirs} -t utf8") from error
    except OSError as error:
        raise EnvError("the file cannot be read", where=str(path), got=str(error)) from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        got = f"{text.strip()[:80]} ({error})"
        raise EnvError("no JSON", where=where, got=got, expected="an object", hint="write one object a line") from error


def _mapping(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise EnvError(
            "no mapping of columns", where=where, got=str(row)[:80], expected='{"name of a column": ..., ...}'
        )
    return row
