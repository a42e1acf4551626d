"""A store on a real file: what is written is found again, and what goes wrong says so and loses nothing."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.stores import copies
from agents.stores.copies import content_hash
from agents.stores.entry import Link, Origin
from agents.stores.faults import (
    StoreDamaged,
    StoreFull,
    StoreLeak,
    StoreLocked,
    StoreReadOnly,
    UnknownEntry,
)
from agents.stores.search import by_vectors, by_words
from agents.stores.store import MAX_EARLIER, Store
from rlhf.errors import CheckpointError, StoreError

HERE = Origin("game/1", "train")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store.sqlite", split="train") as made:
        yield made


class Letters:
    """How often each of three letters stands in a text."""

    def __init__(self, name: str = "letters") -> None:
        self.name = name

    def __call__(self, texts: list[str]) -> np.ndarray:
        return np.array([[text.count(letter) for letter in "abc"] for text in texts], dtype=np.float32)


def test_a_split_that_there_is_not_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new.sqlite"
    with pytest.raises(StoreError, match="there is no such split") as caught:
        Store(path, split="trian")
    assert caught.value.hint == "did you mean 'train'?" and caught.value.where == str(path) and not path.exists()
    with pytest.raises(StoreError, match="splits="):
        Store(path, split="home")
    with Store(path, split="home", splits=("home", "away")) as made:
        assert made.add("note", "x", Origin("game/1", "home")) == 1


def test_what_is_stored_is_found_again_by_another_opening(store: Store, tmp_path: Path) -> None:
    first = store.add("note", "The key is red.", HERE, {"tags": ["key"], "turns": 3})
    second = store.add("case", "Go east, then north.", HERE)
    store.link(first, second, "helps")
    with Store(tmp_path / "store.sqlite") as read:
        assert read.get(first) == store.get(first)
        assert dict(read.get(first).fields) == {"tags": ["key"], "turns": 3} and read.get(first).origin == HERE
        assert [e.id for e in read.entries()] == [first, second] and [e.id for e in read.entries("case")] == [second]
        assert read.links(second) == [Link(first, second, "helps")] and read.links() == read.links(first)


def test_a_store_does_not_grow_by_what_it_has_forgotten(store: Store) -> None:
    number = store.add("note", "0", HERE)
    for i in range(1, 30):
        store.update(number, str(i))
        store.delete(store.add("note", "gone", HERE))
    assert store.versions(number) == [str(i) for i in range(29 - MAX_EARLIER, 30)] and store.get(number).version == 30
    rows = [table for table, _ in store.rows_of_all()]
    assert rows.count("earlier") == MAX_EARLIER and rows.count("entry") == 1


def test_an_entry_keeps_what_it_said_before_and_its_id_is_never_given_again(store: Store) -> None:
    number = store.add("note", "Mia is in Rome.", HERE)
    other = store.add("note", "Ben is in Oslo.", HERE)
    store.link(other, number)
    assert store.update(number, "Mia is in Paris.").version == 2
    assert store.update(number, fields={"sure": True}).text == "Mia is in Paris."
    assert store.versions(number) == ["Mia is in Rome.", "Mia is in Paris.", "Mia is in Paris."]
    store.delete(other)
    assert store.links() == [] and store.versions(other) == []
    store.delete(number)
    assert store.add("note", "new", HERE) == 3


@pytest.mark.parametrize("change", ["get", "update", "delete", "link"])
def test_an_id_that_no_entry_has_is_named_with_those_there_are(store: Store, change: str) -> None:
    store.add("note", "one", HERE)
    arguments = {"get": (7,), "update": (7, "x"), "delete": (7,), "link": (1, 7)}[change]
    before = content_hash(store)
    with pytest.raises(UnknownEntry, match=r"(?s)got: *7.*expected: *1"):
        getattr(store, change)(*arguments)
    assert content_hash(store) == before


def test_by_words_the_rarer_word_counts_more_and_nothing_is_found_without_one(store: Store) -> None:
    for text in ("the cat sat", "the dog sat", "the dog and the cat ran", "a bird"):
        store.add("note", text, HERE)
    assert [f.entry.id for f in store.search("Dog sat", 2)] == [2, 1]  # both words, then the shorter with one of them
    assert store.search("fish", 3) == [] and by_words("x", [], 3) == [] and by_words("x", ["", "?"], 3) == []
    # Lucene's BM25 by hand, k1 = 1.2, b = 0.75: "bird" is in 1 of 4 texts, idf = ln(1 + 3.5 / 1.5) = 1.20397; its text
    # has 2 words, the mean is (3 + 3 + 6 + 2) / 4 = 3.5, so tf = 1 / (1 + 1.2 (0.25 + 0.75 * 2 / 3.5)) = .551181.
    assert store.search("bird", 1)[0].score == pytest.approx(1.20397 * 0.551181, abs=1e-4)


def test_by_vectors_the_cosine_decides(tmp_path: Path) -> None:
    with Store(tmp_path / "s", split="train", encoder=Letters()) as store:
        for text in ("aab", "b", "zzz", "abb"):
            store.add("note" if text != "b" else "case", text, HERE)
        found = store.search("ab", 4, by="vectors")
        # cos((1,1,0), (2,1,0)) = 3 / sqrt(2 * 5) = .948683, the same with (1,2,0); with (0,1,0) 1 / sqrt(2) = .707107.
        assert [(f.entry.text, f.score) for f in found] == [
            ("aab", 0.948683),
            ("abb", 0.948683),
            ("b", 0.707107),
            ("zzz", 0.0),
        ]
        assert [f.entry.text for f in store.search("ab", 4, kind="case", by="vectors")] == ["b"]
        store.update(2, "aaa")
        assert store.search("a", 1, by="vectors")[0].entry.id == 2
    assert by_vectors(np.ones(3, np.float32), [], 2) == []


def test_vectors_of_two_encoders_are_never_compared(tmp_path: Path) -> None:
    with Store(tmp_path / "s", split="train", encoder=Letters()) as store:
        store.add("note", "abc", HERE)
    with Store(tmp_path / "s", split="train", encoder=Letters("other")) as store:
        for act in (lambda: store.search("a", 1, by="vectors"), lambda: store.add("note", "b", HERE)):
            with pytest.raises(StoreError, match=r"(?s)another encoder.*got: *other.*expected: *letters.*encode_again"):
                act()
        assert store.encode_again() == 1 and len(store.search("a", 1, by="vectors")) == 1
    with Store(tmp_path / "s") as store, pytest.raises(StoreError, match="an encoder"):
        store.search("a", 1, by="vectors")
    with pytest.raises(StoreError, match=r"(?s)got: *2 numbers.*expected: *3"):
        by_vectors(np.ones(2, np.float32), [np.ones(3, np.float32)], 1)


def test_a_transaction_is_whole_or_nothing(store: Store) -> None:
    before = content_hash(store)
    with pytest.raises(ValueError, match="no"), store.transaction():
        store.add("note", "one", HERE)
        raise ValueError("no")
    assert content_hash(store) == before
    with store.transaction():
        store.add("note", "outer", HERE)
        with pytest.raises(UnknownEntry), store.transaction():
            store.add("note", "inner", HERE)
            store.delete(99)
        store.add("note", "outer again", HERE)
    assert [e.text for e in store.entries()] == ["outer", "outer again"]


def test_evaluation_cannot_write_and_only_tasks_of_the_split_may(store: Store, tmp_path: Path) -> None:
    store.add("note", "one", HERE)
    before = content_hash(store)
    with Store(tmp_path / "store.sqlite") as read:
        assert read.split is None
        changes: list[Callable[[], object]] = [
            lambda: read.add("note", "x", HERE),
            lambda: read.update(1, "x"),
            lambda: read.delete(1),
            lambda: read.link(1, 1),
            lambda: read.encode_again(),
        ]
        for change in changes:
            with pytest.raises(StoreReadOnly, match="a training run: only training writes"):
                change()
    with pytest.raises(StoreLeak, match=r"(?s)game/9 of the split 'test'.*'train'"):
        store.add("note", "the answer", Origin("game/9", "test"))
    assert content_hash(store) == before


def test_a_store_that_knows_a_task_which_judges_is_refused(store: Store, tmp_path: Path) -> None:
    store.add("note", "one", HERE)
    with pytest.raises(StoreLeak, match=r"(?s)evaluation.*1 tasks, such as game/1"):
        Store(tmp_path / "store.sqlite", judged=frozenset({"game/1"}))
    with (
        Store(tmp_path / "other", split="train", judged=frozenset({"game/2"})) as other,
        pytest.raises(StoreLeak, match="game/2"),
    ):
        other.add("note", "x", Origin("game/2", "train"))


def test_every_task_that_had_a_part_in_an_entry_is_known_and_may_not_judge(store: Store, tmp_path: Path) -> None:
    number, alone = store.add("note", "one", HERE), store.add("note", "two", HERE)
    plain = content_hash(store)
    store.also(number, HERE)
    assert content_hash(store) == plain, "its own task is no other"
    store.also(number, Origin("game/2", "train"))
    store.also(number, Origin("game/2", "train"))
    assert store.tasks() == {number: {"game/1", "game/2"}, alone: {"game/1"}} and content_hash(store) != plain
    with pytest.raises(StoreLeak, match="game/3 of the split 'test'"):
        store.also(number, Origin("game/3", "test"))
    with pytest.raises(UnknownEntry):
        store.also(9, Origin("game/2", "train"))
    with pytest.raises(StoreLeak, match="such as game/2"):
        Store(tmp_path / "store.sqlite", judged=frozenset({"game/2"}))
    (tmp_path / "checkpoint").mkdir()
    saved = copies.save(store, tmp_path / "checkpoint")
    store.delete(number)
    assert store.tasks() == {alone: {"game/1"}}
    assert copies.restore(tmp_path / "checkpoint", tmp_path / "again") == saved
    with Store(tmp_path / "again") as again:
        assert again.tasks()[number] == {"game/1", "game/2"}
        with pytest.raises(StoreReadOnly):
            again.also(alone, Origin("game/2", "train"))


def test_a_lock_held_by_another_process_is_told_and_nothing_is_lost(store: Store, tmp_path: Path) -> None:
    store.add("note", "one", HERE)
    held = """
        import sqlite3, sys
        base = sqlite3.connect(sys.argv[1], isolation_level=None)
        base.execute("BEGIN EXCLUSIVE")
        print("held", flush=True)
        sys.stdin.readline()
    """
    command = [sys.executable, "-c", textwrap.dedent(held), str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "held\n"
        with pytest.raises(StoreLocked, match="locked by another process"):
            Store(store.path, split="train", busy_s=0.05)
        store._base.execute("PRAGMA busy_timeout = 50")
        with pytest.raises(StoreLocked, match=r"(?s)end the other process.*nothing was written"):
            store.add("note", "two", HERE)
        other.communicate("go on\n")
    store.add("note", "two", HERE)
    assert [e.text for e in store.entries()] == ["one", "two"]


def test_a_process_killed_within_a_transaction_leaves_what_was_there_before(store: Store) -> None:
    store.add("note", "one", HERE)
    before = content_hash(store)
    killed = """
        import os, signal, sys
        from pathlib import Path
        from agents.stores.entry import Origin
        from agents.stores.store import Store
        store = Store(Path(sys.argv[1]), split="train")
        store._base.execute("PRAGMA cache_size = 1")
        store._base.execute("PRAGMA cache_spill = ON")
        with store.transaction():
            for i in range(300):
                store.add("note", "x" * 500, Origin("game/2", "train"))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(killed), str(store.path)], check=False)
    assert done.returncode == -9
    assert content_hash(store) == before


def test_a_full_store_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    with Store(tmp_path / "s", split="train", max_mb=0.1) as store:
        with pytest.raises(StoreFull, match=r"(?s)no room.*raise max_mb.*what was stored before is whole"):
            for i in range(1000):
                store.add("note", f"{i} " + "x" * 4000, HERE)
        n = len(store.entries())
        assert 5 < n < 30
        with pytest.raises(StoreFull), store.transaction():
            store.delete(1)
            for _ in range(100):
                store.add("note", "x" * 2000, HERE)
        assert len(store.entries()) == n and store.get(1).text.startswith("0 ")
    # A removed entry stays among the versions, so that removing needs room too.
    with Store(tmp_path / "s", split="train", max_mb=1) as store:
        store.delete(1), store.delete(2)
        assert store.search("7", 1)[0].entry.id == 8
    with Store(tmp_path / "s") as again:
        assert len(again.entries()) == n - 2


@pytest.mark.parametrize("content", [b"this is no database, but it is long enough to be one" * 20, b""])
def test_a_file_that_is_no_store_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(StoreDamaged, match="this file is not a store"):
        Store(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == content


def test_another_database_is_not_taken_for_a_store(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "s") as base:
        base.execute("CREATE TABLE mine (x)")
    base.close()
    with pytest.raises(StoreDamaged, match=r"(?s)a file without the tables of a store.*rlhf-store-1"):
        Store(tmp_path / "s", split="train")


def test_a_damaged_file_is_told(store: Store) -> None:
    with store.transaction():
        for i in range(300):
            store.add("note", f"{i}" * 200, HERE)
    store.close()
    content = bytearray(store.path.read_bytes())
    content[8192 : len(content) // 2] = b"\xff" * (len(content) // 2 - 8192)
    store.path.write_bytes(content)
    with pytest.raises(StoreDamaged, match=r"(?s)damaged.*restore it from a checkpoint"), Store(store.path) as read:
        read.entries()


def test_where_there_is_no_file_there_is_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        Store(tmp_path / "none")
    with pytest.raises(StoreError, match=r"(?s)cannot be opened.*its folder"):
        Store(tmp_path / "no" / "folder", split="train")


@pytest.mark.parametrize("fields", [{"x": object()}, {"x": float("nan")}])
def test_fields_are_plain_values(store: Store, fields: dict[str, object]) -> None:
    with pytest.raises(StoreError, match="not plain JSON values"):
        store.add("note", "x", HERE, fields)
    assert store.entries() == []


def test_a_store_comes_back_exactly_as_it_was_saved(store: Store, tmp_path: Path) -> None:
    for text in ("one", "two", "three"):
        store.add("note", text, HERE)
    store.update(1, "uno"), store.delete(3), store.link(1, 2)
    (tmp_path / "checkpoint").mkdir()
    saved = copies.save(store, tmp_path / "checkpoint")
    assert saved == content_hash(store)
    store.add("note", "after the checkpoint", HERE), store.delete(2)
    assert content_hash(store) != saved
    store.close()
    assert copies.restore(tmp_path / "checkpoint", store.path) == saved
    with Store(store.path, split="train") as back:
        assert content_hash(back) == saved and back.add("note", "next", HERE) == 4, "3 was given already"


def test_a_copy_that_is_not_what_was_saved_is_refused_and_the_store_stays(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    store.add("note", "one", HERE)
    with pytest.raises(StoreDamaged, match="there is no store to restore"):
        copies.restore(folder, store.path)
    copies.save(store, folder)
    with Store(folder / copies.FILE, split="train") as copy:
        copy.update(1, "changed behind its back")
    with pytest.raises(StoreDamaged, match="not the one that was saved"):
        copies.restore(folder, store.path)
    assert [e.text for e in store.entries()] == ["one"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "store.sqlite"]


def test_a_copy_that_cannot_be_written_leaves_nothing(store: Store, tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / copies.HASH).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="the hash of the store cannot be written"):
        copies.save(store, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint" / copies.FILE).exists()
    with pytest.raises(StoreError, match="the file exists already"):
        store.back_up(store.path)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), TEXTS),
        st.tuples(st.just("update"), st.integers(1, 6), TEXTS),
        st.tuples(st.just("delete"), st.integers(1, 6)),
    ),
    max_size=12,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(CHANGES)
def test_whatever_is_done_it_is_a_dictionary_and_its_copy_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[object, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    model: dict[int, str] = {}
    n_given = 0
    with Store(folder / "s", split="train") as store:
        with store.transaction():  # one wait for the disk
            for name, *arguments in changes:
                if name == "add":
                    n_given += 1
                    assert store.add("note", str(arguments[0]), HERE) == n_given
                    model[n_given] = str(arguments[0])
                elif arguments[0] not in model:
                    with pytest.raises(UnknownEntry):
                        getattr(store, str(name))(*arguments)
                else:
                    number = int(str(arguments[0]))
                    getattr(store, str(name))(*arguments)
                    model = {**model, number: str(arguments[1])} if name == "update" else dict(model)
                    model.pop(number) if name == "delete" else None
        assert {e.id: e.text for e in store.entries()} == model
        saved = copies.save(store, folder)
        with Store(folder / copies.FILE) as copy:
            assert content_hash(copy) == saved == content_hash(store)
