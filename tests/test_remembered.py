"""`rlhf memory`: what it shows of a store, and what it says of what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.stores.store import Origin, Store
from tests.commands import last_json, run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs, of which one has a store with three cases of two tasks."""
    folder = tmp_path / "runs" / "cases-seed0"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("")
    with Store(folder / "store.sqlite", split="train") as store, store.transaction():
        for task, text, solved in (
            ("house/1", "a red key", True),
            ("house/2", "a door", False),
            ("house/2", "oil", True),
        ):
            store.add("case", text, Origin(task, "train"), {"solved": solved})
    return tmp_path / "runs"


def test_what_a_case_is_stands_in_the_table(runs: Path) -> None:
    shown = run("memory", runs / "cases-seed0").output
    assert "3 entries" in shown and "solved: True" in shown and "--limit" not in shown


def test_it_says_how_many_are_not_shown(runs: Path) -> None:
    assert "2 of 3; --limit shows more" in run("memory", runs / "cases-seed0", "--limit", "2").output
    found = last_json(run("memory", runs / "cases-seed0", "--limit", "2", "--json"))
    assert found["n_found"] == found["n_entries"] == 3 and len(found["entries"]) == 2


def test_an_unknown_task_is_an_error_that_names_the_nearest(runs: Path) -> None:
    result = run("memory", runs / "cases-seed0", "--task", "house/11")
    assert result.exit_code == 2 and "no entry is of this task" in result.stderr and "house/1'" in result.stderr
    assert last_json(run("memory", runs / "cases-seed0", "--task", "house/2", "--json"))["n_found"] == 2


@pytest.mark.parametrize(
    ("target", "got"), [("case-seed0", "nothing of this name"), ("cases-seed0/recipe.yaml", "another")]
)
def test_what_is_no_store_is_told_apart(runs: Path, target: str, got: str) -> None:
    result = run("memory", runs / target)
    assert result.exit_code == 2 and "there is no store here" in result.stderr and got in result.stderr
    assert "cases-seed0" in result.stderr


def test_a_misspelt_run_is_named_where_it_is_to_go_on(runs: Path) -> None:
    for words in (["train", "--resume", runs / "case-seed0"], ["score", runs / "case-seed0", "--reward", "outcome"]):
        result = run(*words)
        assert result.exit_code == 2 and "did you mean" in result.stderr and "cases-seed0" in result.stderr, words
