"""`rlhf memory`: what it shows of a store, and what it says of what is not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agents.stores import copies
from agents.stores.store import Origin, Store
from tests.commands import last_json, run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs, of which one has a store with three cases of two tasks."""
    folder = tmp_path / "runs" / "cases-seed0"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("")
    with Store(folder / copies.FILE, split="train") as store, store.transaction():
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
    assert (
        result.exit_code == 2 and "the store has no entry of this task" in result.stderr and "house/1'" in result.stderr
    )
    assert last_json(run("memory", runs / "cases-seed0", "--task", "house/2", "--json"))["n_found"] == 2


@pytest.mark.parametrize(
    ("target", "got"), [("case-seed0", "nothing of this name"), ("cases-seed0/recipe.yaml", "another")]
)
def test_what_is_no_store_is_told_apart(runs: Path, target: str, got: str) -> None:
    result = run("memory", runs / target)
    assert result.exit_code == 2 and "there is no store here" in result.stderr and got in result.stderr
    assert "cases-seed0" in result.stderr


def test_checkpoints_with_a_store_are_named(runs: Path) -> None:
    for step in (0, 8):
        (runs / "cases-seed0" / "checkpoints" / f"0-policy_gradient-{step:06d}").mkdir(parents=True)
        shutil.copy(runs / "cases-seed0" / copies.FILE, runs / f"cases-seed0/checkpoints/0-policy_gradient-{step:06d}")
    above = runs / "cases-seed0" / "checkpoints"
    for folder, below in ((above, [above / f"0-policy_gradient-00000{n}" for n in (0, 8)]), (runs, [above.parent])):
        result = run("memory", folder)
        assert result.exit_code == 2 and f"name one of them: {', '.join(map(str, below))}\n" in result.stderr


def test_of_a_run_whose_agent_keeps_no_store_the_agent_is_named(runs: Path) -> None:
    other = runs / "chat-seed0"
    (other / "checkpoints").mkdir(parents=True)
    (other / "recipe.yaml").write_text("agent: {kind: chat}")
    for folder in (other, other / "checkpoints"):
        result = run("memory", folder)
        assert result.exit_code == 2 and "the agent of this run is `chat`, which keeps no store" in result.stderr
        assert "agent={kind: remembering}" in result.stderr and "look into" not in result.stderr
    (other / "recipe.yaml").write_text("agent: {kind: remembering}")
    assert "got:      no store.sqlite\n" in run("memory", other).stderr


def test_a_misspelt_run_is_named_where_it_is_to_go_on(runs: Path) -> None:
    for words in (["train", "--resume", runs / "case-seed0"], ["score", runs / "case-seed0", "--reward", "outcome"]):
        result = run(*words)
        assert result.exit_code == 2 and "did you mean" in result.stderr and "cases-seed0" in result.stderr, words


def test_what_a_store_holds_is_listed_and_searched(runs: Path) -> None:
    stored = runs / "cases-seed0"
    everything = last_json(run("memory", stored, "--limit", "500", "--json"))
    assert everything["kinds"] == {"case": everything["n_entries"]} and everything["n_chars"] > 0
    numbers = [entry["id"] for entry in everything["entries"]]
    assert numbers == sorted(numbers, reverse=True), "the newest first"
    one = everything["entries"][0]
    of_task = last_json(run("memory", stored, "--task", one["tasks"][0], "--json"))["entries"]
    assert one in of_task and all(one["tasks"][0] in entry["tasks"] for entry in of_task)
    found = last_json(run("memory", stored, "--search", one["text"], "--json"))["entries"]
    assert found[0]["text"] == one["text"]
    shown = " ".join(run("memory", stored, "--limit", "1").output.split())
    assert f"{everything['n_entries']} entries" in shown and one["tasks"][0] in shown and one["text"] in shown
    assert "the store has no entry of this task" in run("memory", stored, "--task", "nothing").output
    wrong = run("memory", stored, "--kind", "cas")
    assert wrong.exit_code == 2 and "did you mean 'case'?" in " ".join(wrong.output.split())


def test_where_there_is_no_store(tmp_path: Path) -> None:
    ended = run("memory", tmp_path)
    assert ended.exit_code == 2 and "whose agent is of kind remembering" in " ".join(ended.output.split())
    with Store(tmp_path / copies.FILE, split="train"):
        pass
    assert "nothing is stored yet" in run("memory", tmp_path).output
    (tmp_path / copies.FILE).write_bytes(b"no store " * 100)
    assert "this file is not a store" in run("memory", tmp_path).output
