"""A store: entries, their earlier versions and their links, in one SQLite file.

A change is a transaction: it happens whole or not at all, also where the disk fills up or the process is killed in it.
Several processes may read while one writes; who finds the file locked waits `busy_s` and is then told so. Nobody but a
training run writes: a store is opened for reading unless a split is named, and takes entries of that split's tasks
alone. What is in it has a hash; `agents.stores.copies` writes it beside a checkpoint and brings it back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from agents.stores.entry import Entry, Found, Link, Origin
from agents.stores.faults import StoreDamaged, StoreLeak, StoreReadOnly, explained, unknown
from agents.stores.rows import COLUMNS, entry_of, where, written
from agents.stores.search import Encoder, Vector, by_vectors
from rlhf.errors import StoreError, nearest
from rlhf.text_search import Index

_TABLES = """
CREATE TABLE IF NOT EXISTS entry (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, text TEXT NOT NULL, fields TEXT NOT NULL,
    task TEXT NOT NULL, split TEXT NOT NULL, version INTEGER NOT NULL, vector BLOB);
CREATE TABLE IF NOT EXISTS earlier (
    id INTEGER NOT NULL, version INTEGER NOT NULL, text TEXT NOT NULL, fields TEXT NOT NULL,
    PRIMARY KEY (id, version));
CREATE TABLE IF NOT EXISTS link (
    source INTEGER NOT NULL, target INTEGER NOT NULL, relation TEXT NOT NULL,
    PRIMARY KEY (source, target, relation));
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
#: Made with the first entry that another task than its own had a part in.
_ALSO = """CREATE TABLE IF NOT EXISTS also (
    id INTEGER NOT NULL, task TEXT NOT NULL, split TEXT NOT NULL, PRIMARY KEY (id, task))"""
#: Most earlier versions of one entry; of more the oldest go.
MAX_EARLIER = 10
_FORMAT = "rlhf-store-1"
_PAGE = 4096
_T = TypeVar("_T")


class Store:
    """A store that is open.

    Args:
        path: of the file; made where it is not there and may be written.
        split: of the tasks whose episodes may write, one of `splits`; None opens it for reading alone.
        splits: names that there are, as the environment's `properties` list them.
        judged: ids of tasks that judge the policy, which must leave nothing here.
        encoder: makes the vectors of `search(by="vectors")`; None searches by words alone.
        busy_s: how long to wait for another process.
        max_mb: most that the file may take; None is as much as the disk has.

    Raises:
        StoreError: or one of its kinds in `agents.stores.faults`.
    """

    def __init__(
        self,
        path: Path,
        *,
        split: str | None = None,
        splits: Collection[str] = ("train", "dev", "test"),
        judged: frozenset[str] = frozenset(),
        encoder: Encoder | None = None,
        busy_s: float = 5.0,
        max_mb: float | None = None,
    ) -> None:
        self.path, self.split, self._judged, self._encoder = path, split, judged, encoder
        if split is not None and split not in splits:
            raise StoreError(
                "there is no such split",
                where=str(path),
                got=split,
                expected=", ".join(splits),
                hint=nearest(split, splits) or "name all splits: Store(path, split=..., splits=(...))",
            )
        mode = "ro" if split is None else "rwc"
        with explained(path):
            uri = f"{path.resolve().as_uri()}?mode={mode}"
            self._base = sqlite3.connect(uri, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False)
        self._depth, self._views, self._seen = 0, dict[str, Any](), (0, 0)
        try:
            self._begin(max_mb)
        except BaseException:
            self._base.close()
            raise

    def _begin(self, max_mb: float | None) -> None:
        with explained(self.path):
            # A long transaction would write before its end, and nobody could read from then on.
            self._base.execute("PRAGMA cache_spill = OFF")
            if max_mb is not None:
                self._base.execute(f"PRAGMA max_page_count = {max(16, int(max_mb * 1e6) // _PAGE)}")
            names = {row[0] for row in self._base.execute("SELECT name FROM sqlite_master")}
        if not names and self.split is not None:
            with self.transaction():
                for statement in _TABLES.split(";"):
                    self._base.execute(statement)
                self._base.execute("INSERT OR IGNORE INTO about VALUES ('format', ?)", (_FORMAT,))
            names = {"about"}
        found = self._about("format") if "about" in names else ""
        if found != _FORMAT:
            raise StoreDamaged(
                "this file is not a store",
                where=str(self.path),
                got=found or "a file without the tables of a store",
                expected=_FORMAT,
            )
        if left := sorted(frozenset().union(*self.tasks().values()) & self._judged):
            raise StoreLeak(
                "the store holds entries of evaluation tasks",
                where=str(self.path),
                got=f"{len(left)} tasks, such as {left[0]}",
                expected="entries of training tasks only",
                hint="start with a new store, or evaluate on other tasks",
            )

    def close(self) -> None:
        """Close the file. May be called again."""
        self._base.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Change the store atomically inside; transactions may be nested."""
        if self.split is None:
            raise StoreReadOnly(
                "the store is open read-only",
                where=str(self.path),
                expected="a training run: only training writes",
                hint="Store(path, split='train')",
            )
        mark = f"within_{self._depth}" if self._depth else ""
        with explained(self.path):
            self._base.execute(f"SAVEPOINT {mark}" if mark else "BEGIN IMMEDIATE")
        self._depth += 1
        try:
            with explained(self.path):
                yield
                self._base.execute(f"RELEASE {mark}" if mark else "COMMIT")
        except BaseException:
            if self._base.in_transaction:  # SQLite may have ended it itself, where the disk is full
                self._base.execute(f"ROLLBACK TO {mark}" if mark else "ROLLBACK")
            self._views.clear()
            raise
        finally:
            self._depth -= 1

    def add(self, kind: str, text: str, origin: Origin, fields: Mapping[str, Any] | None = None) -> int:
        """Store an entry and return its id.

        Raises:
            StoreLeak: `origin` is of another split than the store's, or judges the policy.
        """
        self._refuse_leak(origin)
        in_json = written(fields or {}, self.path)
        with self.transaction():
            row = (kind, text, in_json, origin.task, origin.split, 1, self._vector(text))
            marks = ", ".join("?" * len(row))
            names = "kind, text, fields, task, split, version, vector"
            return int(self._base.execute(f"INSERT INTO entry ({names}) VALUES ({marks})", row).lastrowid or 0)

    def update(self, number: int, text: str | None = None, fields: Mapping[str, Any] | None = None) -> Entry:
        """Change an entry; what it said before stays among its `versions`, of which the newest are kept.

        Raises:
            UnknownEntry: there is no such entry.
        """
        with self.transaction():
            before = self.get(number)
            kept = (number, before.version, before.text, written(before.fields, self.path))
            self._base.execute("INSERT INTO earlier VALUES (?, ?, ?, ?)", kept)
            gone = (number, before.version - MAX_EARLIER)
            self._base.execute("DELETE FROM earlier WHERE id = ? AND version <= ?", gone)
            now = before.text if text is None else text
            in_json = written(before.fields if fields is None else fields, self.path)
            row = (now, in_json, before.version + 1, self._vector(now), number)
            self._base.execute("UPDATE entry SET text = ?, fields = ?, version = ?, vector = ? WHERE id = ?", row)
            return self.get(number)

    def delete(self, number: int) -> None:
        """Remove an entry with its versions and links. Raises UnknownEntry."""
        with self.transaction():
            self.get(number)
            self._base.execute("DELETE FROM entry WHERE id = ?", (number,))
            self._base.execute("DELETE FROM earlier WHERE id = ?", (number,))
            self._base.execute("DELETE FROM link WHERE source = ? OR target = ?", (number, number))
            if self._has_also():
                self._base.execute("DELETE FROM also WHERE id = ?", (number,))

    def keep_newest(self, kind: str, most: int) -> None:
        """Delete the oldest entries of a kind beyond `most`."""
        with self.transaction():
            rows = self._rows("SELECT id FROM entry WHERE kind = ? ORDER BY id DESC LIMIT -1 OFFSET ?", (kind, most))
            for (number,) in reversed(rows):
                self.delete(number)

    def also(self, number: int, origin: Origin) -> None:
        """Record another task's part in an entry, such as a summary of several; once is enough.

        Raises:
            StoreLeak: as in `add`.
            UnknownEntry: there is no such entry.
        """
        self._refuse_leak(origin)
        with self.transaction():
            if origin == self.get(number).origin:
                return
            self._base.execute(_ALSO)
            self._base.execute("INSERT OR IGNORE INTO also VALUES (?, ?, ?)", (number, origin.task, origin.split))

    def tasks(self) -> dict[int, frozenset[str]]:
        """Of every entry, by its id, all tasks that had a part in it."""
        found: dict[int, frozenset[str]] = {}
        for table in ("entry", "also") if self._has_also() else ("entry",):
            for number, task in self._rows(f"SELECT id, task FROM {table}"):
                found[number] = found.get(number, frozenset()) | {task}
        return found

    def link(self, source: int, target: int, relation: str = "") -> None:
        """Point from one entry to another; twice is once. Raises UnknownEntry."""
        with self.transaction():
            self.get(source), self.get(target)
            self._base.execute("INSERT OR IGNORE INTO link VALUES (?, ?, ?)", (source, target, relation))

    def get(self, number: int) -> Entry:
        """Return an entry. Raises UnknownEntry."""
        rows = self._rows(f"SELECT {COLUMNS} FROM entry WHERE id = ?", (number,))
        if not rows:
            raise unknown(self.path, number, [row[0] for row in self._rows("SELECT id FROM entry ORDER BY id")])
        return entry_of(rows[0])

    def entries(self, kind: str | None = None, task: str | None = None) -> list[Entry]:
        """All entries, or those of a kind and those that a task left, oldest first."""
        condition, values = where(kind=kind, task=task)
        return [entry_of(row) for row in self._rows(f"SELECT {COLUMNS} FROM entry{condition} ORDER BY id", values)]

    def n_entries(self, kind: str | None = None) -> int:
        """Return the number of entries, or of those of a kind."""
        condition, values = where(kind=kind)
        return int(self._rows(f"SELECT COUNT(*) FROM entry{condition}", values)[0][0])

    def view(self, name: str, make: Callable[[], _T]) -> _T:
        """Cached view that `make` reads from the store, until the store changes; read-only."""
        now = (int(self._rows("PRAGMA data_version")[0][0]), self._base.total_changes)
        if now != self._seen:
            self._views.clear()
            self._seen = now
        if name not in self._views:
            self._views[name] = make()
        found: _T = self._views[name]
        return found

    def versions(self, number: int) -> list[str]:
        """Texts of an entry, oldest first: the present one, and at most `MAX_EARLIER` before it."""
        rows = self._rows("SELECT text FROM earlier WHERE id = ? ORDER BY version", (number,))
        return [row[0] for row in (*rows, *self._rows("SELECT text FROM entry WHERE id = ?", (number,)))]

    def links(self, number: int | None = None) -> list[Link]:
        """All links, or those from and to an entry."""
        condition, values = ("", ()) if number is None else (" WHERE source = ? OR target = ?", (number, number))
        rows = self._rows(f"SELECT source, target, relation FROM link{condition} ORDER BY 1, 2, 3", values)
        return [Link(*row) for row in rows]

    def search(self, query: str, k: int, *, kind: str | None = None, by: str = "words") -> list[Found]:
        """Return the `k` entries that fit best, best first.

        Args:
            query: what to look for.
            k: most entries.
            kind: of the entries; None is any.
            by: `words` for BM25, `vectors` for the cosine of the encoder's vectors, over all entries.

        Raises:
            StoreError: by vectors without an encoder, or with another than the one that wrote them.
        """
        if by == "words":
            entries, words = self.view(f"words of {kind}", lambda: _with_words(self.entries(kind)))
            return [Found(entries[i], score) for i, score in words.scored(query, k)]
        if self._encoder is None or by != "vectors":
            raise StoreError(
                "the store does not support this search",
                where=str(self.path),
                got=f"by={by!r}",
                expected="'words', or 'vectors' in a store with an encoder",
            )
        self._check_encoder()
        condition, values = ("", ()) if kind is None else (" AND kind = ?", (kind,))
        statement = f"SELECT {COLUMNS}, vector FROM entry WHERE vector IS NOT NULL{condition} ORDER BY id"
        rows = self._rows(statement, values)
        vectors = [np.frombuffer(row[-1], dtype=np.float32) for row in rows]
        asked: Vector = np.asarray(self._encoder([query])[0], dtype=np.float32)
        return [Found(entry_of(rows[i][:-1]), score) for i, score in by_vectors(asked, vectors, k)]

    def encode_again(self) -> int:
        """Give every entry the vector of the present encoder; return how many there are."""
        with self.transaction():
            self._base.execute("DELETE FROM about WHERE name = 'encoder'")
            entries = self.entries()
            for entry in entries:
                row = (self._vector(entry.text), entry.id)
                self._base.execute("UPDATE entry SET vector = ? WHERE id = ?", row)
            return len(entries)

    def keep(self, name: str, value: str) -> None:
        """Keep a text beside the entries, under a name: what a kind of store has learnt."""
        with self.transaction():
            self._base.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (f"kept/{name}", value))

    def kept(self, name: str) -> str:
        """Return the text kept under a name; empty where there is none."""
        return self._about(f"kept/{name}")

    def rows_of_all(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Everything that is in the store, in one order: (table, row)."""
        tables = {"about": "1", "entry": "1", "earlier": "1, 2", "link": "1, 2, 3", "sqlite_sequence": "1"}
        if self._has_also():
            tables["also"] = "1, 2"
        for table, order in tables.items():
            for row in self._rows(f"SELECT * FROM {table} ORDER BY {order}"):
                yield table, row

    def back_up(self, path: Path) -> None:
        """Copy everything into a new file at `path`, as it is at one moment. Raises StoreError where there is one."""
        if path.exists():
            raise StoreError("the file exists already", where=str(path), expected="a new file")
        with explained(path):
            target = sqlite3.connect(path)
            try:
                self._base.backup(target)
            finally:
                target.close()

    def _refuse_leak(self, origin: Origin) -> None:
        if self.split is not None and (origin.split != self.split or origin.task in self._judged):
            raise StoreLeak(
                "entries of this task must not be stored",
                where=str(self.path),
                got=f"{origin.task} of the split {origin.split!r}",
                expected=f"a task of the split {self.split!r} that no evaluation uses",
                hint="write entries of training episodes only",
            )

    def _has_also(self) -> bool:
        return bool(self._rows("SELECT 1 FROM sqlite_master WHERE name = 'also'"))

    def _vector(self, text: str) -> bytes | None:
        if self._encoder is None:
            return None
        self._check_encoder()
        row = ("encoder", self._encoder.name)
        self._base.execute("INSERT OR IGNORE INTO about VALUES (?, ?)", row)
        return np.asarray(self._encoder([text])[0], dtype=np.float32).tobytes()

    def _check_encoder(self) -> None:
        found, name = self._about("encoder"), "" if self._encoder is None else self._encoder.name
        if found and found != name:
            raise StoreError(
                "the store's vectors come from another encoder",
                where=str(self.path),
                got=name,
                expected=found,
                hint="search with that encoder, or call encode_again()",
            )

    def _about(self, name: str) -> str:
        rows = self._rows("SELECT value FROM about WHERE name = ?", (name,))
        return str(rows[0][0]) if rows else ""

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with explained(self.path):
            return self._base.execute(statement, values).fetchall()


def _with_words(entries: list[Entry]) -> tuple[list[Entry], Index]:
    return entries, Index([entry.text for entry in entries])
