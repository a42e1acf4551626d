"""What a store tells of itself without reading all of it: counts, what one task left, and views that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.stores.entry import Origin
from agents.stores.store import Store

A, B = Origin("a", "train"), Origin("b", "train")


def test_the_oldest_of_a_kind_go_with_their_links(store: Store) -> None:
    numbers = [store.add("fact", f"fact {i}", A) for i in range(5)]
    note = store.add("note", "note", A)
    store.link(note, numbers[0])
    store.link(note, numbers[4])
    store.keep_newest("fact", 2)
    assert [e.id for e in store.entries("fact")] == numbers[3:] and store.get(note).text == "note"
    assert [link.target for link in store.links()] == [numbers[4]]
    assert store.versions(numbers[0]) == []
    store.keep_newest("fact", 2)
    assert store.n_entries("fact") == 2 and store.n_entries() == 3


def test_what_one_task_left_is_found(store: Store) -> None:
    first, other = store.add("fact", "one", A), store.add("fact", "two", B)
    note, also = store.add("note", "three", A), store.add("fact", "four", A)
    assert [e.id for e in store.entries("fact", "a")] == [first, also]
    assert [e.id for e in store.entries(task="a")] == [first, note, also]
    assert [e.id for e in store.entries("fact")] == [first, other, also]
    assert store.entries("fact", "c") == [] and store.n_entries("case") == 0


def test_a_view_is_made_once_until_something_changes(store: Store) -> None:
    n_made = 0

    def texts() -> list[str]:
        nonlocal n_made
        n_made += 1
        return [entry.text for entry in store.entries()]

    def seen() -> tuple[list[str], int]:
        return store.view("texts", texts), n_made

    assert seen() == ([], 1) and seen() == ([], 1)
    number = store.add("fact", "one", A)
    assert seen() == (["one"], 2) and seen() == (["one"], 2)
    store.update(number, "two")
    assert seen() == (["two"], 3)
    with pytest.raises(KeyError), store.transaction():
        store.add("fact", "three", A)
        assert seen() == (["two", "three"], 4)
        raise KeyError
    assert seen() == (["two"], 5), "what was not kept is not seen either"
    assert store.view("other", lambda: "other") == "other" and seen() == (["two"], 5)
    store.delete(number)
    assert seen() == ([], 6)


def test_a_reader_sees_what_another_has_written(store: Store, tmp_path: Path) -> None:
    store.add("fact", "a red key", A)
    with Store(tmp_path / "store.sqlite") as reader:
        assert [hit.entry.text for hit in reader.search("key", 5)] == ["a red key"]
        assert reader.view("n", reader.n_entries) == 1
        with store.transaction():
            store.add("fact", "a blue key", B)
            assert reader.view("n", reader.n_entries) == 1
        assert reader.view("n", reader.n_entries) == 2
        assert {hit.entry.text for hit in reader.search("key", 5)} == {"a red key", "a blue key"}
        assert [hit.entry.text for hit in reader.search("blue", 5, kind="fact")] == ["a blue key"]
        assert reader.search("blue", 5, kind="note") == []


def test_who_reads_waits_for_no_transaction_however_much_it_has_changed(store: Store, tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite", busy_s=0.05) as reader, store.transaction():
        for _ in range(100):
            store.add("fact", "x" * 50_000, A)  # more than SQLite keeps in memory by itself
        assert reader.n_entries() == 0
