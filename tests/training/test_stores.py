"""Stores in whole runs: written by training alone, versioned with checkpoints, and resumed exactly."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from agents.stores import copies
from agents.stores.copies import content_hash
from agents.stores.entry import Origin
from agents.stores.faults import StoreLeak
from agents.stores.kind import RECALLED
from agents.stores.store import Store
from rlhf.build.memory_store import agent_of
from rlhf.build.train import train
from rlhf.catalog import CATALOG
from rlhf.errors import CheckpointError, RecipeError, StoreError
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from rlhf.recipe.suites import Part, Tasks
from rlhf.training.checkpoints import store as checkpoint
from tests import test_resume as resume
from tests.commands import last_json
from tests.commands import run as command
from tests.training import runs, words
from tests.training.tiny import policy

AGENT = {
    "kind": "remembering",
    "inner": {"kind": "chat", "system": ""},
    "store": {"kind": "cases", "k": 2, "alpha": 0.5, "lr": 0.5},
}
NOTES = {**AGENT, "store": {"kind": "notes", "k": 2, "max_transcript": 40, "ask": "note:", "ask_links": "links:"}}
RULES = {"kind": "pattern", "patterns": [r"(?P<subject>S)(?P<relation>ay) (?P<object>\w+)"]}
GRAPH = {**AGENT, "store": {"kind": "graph", "extractor": RULES, "max_tokens": 20}}
TYPED = {**AGENT, "store": {"kind": "typed", "core": {"begin": ["red"]}, "max_transcript": 40}}
REFLECTION = {**AGENT, "store": {"kind": "reflection", "writer": "rule", "used": "words", "k": 1, "max_chars": 20}}
#: What each is shown begins with; and what of it is learnt beside the entries.
KINDS = {
    "cases": (AGENT, ("Solved before:", "Not solved before:"), "weights"),
    "notes": (NOTES, ("Notes:",), ""),
    "graph": (GRAPH, ("Known:",), ""),
    "typed": (TYPED, ("Always:",), "core"),
    "reflection": (REFLECTION, ("Summaries:",), "re-ranker"),
}


def recipe(folder: Path, **changes: Any) -> Path:
    return resume.recipe(folder, "grpo", None, **{"agent": AGENT, **changes})


def hash_of(path: Path) -> str:
    with Store(path) as store:
        return content_hash(store)


@pytest.mark.parametrize("kind", sorted(CATALOG["store"]))
def test_a_run_that_was_stopped_has_the_store_of_one_that_ran_on(tmp_path: Path, kind: str) -> None:
    agent, begins, learnt = KINDS[kind]
    path = recipe(tmp_path, agent=agent)
    with words.on_every_step(path, counter := resume.PressAt(-1)):
        runs.run(path, tmp_path / "whole")
    draw = random.Random(1)
    at = [draw.randrange(1, counter.n_steps // 2) for _ in range(3)]
    assert resume.run_with_interruptions(path, tmp_path / "stopped", at) >= 2
    resume.assert_equal(tmp_path / "stopped", tmp_path / "whole")
    whole = tmp_path / "whole"
    assert hash_of(whole / "store.sqlite") == hash_of(tmp_path / "stopped" / "store.sqlite")

    # Every checkpoint holds the store as it was then; the last one, as it is now.
    found = checkpoint.every(whole / "checkpoints")
    hashes = [hash_of(folder / copies.FILE) for folder in found]
    assert hashes == [(folder / copies.HASH).read_text() for folder in found]
    assert hashes[-1] == hash_of(whole / "store.sqlite") != hashes[0]
    with Store(whole / "store.sqlite") as store:
        entries = store.entries()
        assert entries and {e.origin.split for e in entries} == {"train"}
        numbers = [int(e.origin.task.rpartition("/")[2]) for e in entries if e.origin.task]
        assert all(n < words.FIRST_SEED["dev"] for n in numbers), "no task of another split"
        assert not learnt or store.kept(learnt)

    # What is learnt is shown from the next step on, in training and, read alone, in the evaluation after it.
    assert runs.curve(whole, "store/n_entries")[-1] == len(entries)
    shown = {
        phase: [t.action.notes.get(RECALLED, "") for r in read_trajectories(whole / "trajectories", phase=phase)
                for t in r.trajectory.turns[:1]]
        for phase in ("train", "eval")
    }  # fmt: skip
    assert all(any(text.startswith(begins) for text in texts) for texts in shown.values())
    assert runs.curve(whole, "store/n_chars")[-1] == sum(len(e.text) for e in entries)
    if kind == "notes":  # this model cannot write one: it was asked, and what it did was kept
        assert runs.curve(whole, "store/n_refused")[0] == runs.curve(whole, "store/n_entries")[0] > 0


def test_a_checkpoint_whose_store_was_changed_is_refused_by_name(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    with words.on_every_step(path, resume.PressAt(40)), pytest.raises(Exception, match="stopped"):
        train(load(path), tmp_path / "run")
    last = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert last is not None
    with Store(last / copies.FILE, split="train") as store:
        store.add("case", "x", Origin("words/1", "train"), {"solved": True, "actions": []})
    sizes = (last / "files.json").read_text()
    with pytest.raises(Exception, match="the store is not the one that was saved"):
        shutil.copy(last / "files.json", tmp_path / "kept")
        (last / "files.json").unlink()  # so that not the size of the file gives it away
        train(load(path), tmp_path / "run", resume=tmp_path / "run")
    assert '"store.sqlite"' in sizes and '"store.sha256"' in sizes


def test_a_run_does_not_go_on_with_another_kind_of_store(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with words.on_every_step(path := recipe(tmp_path), resume.PressAt(40)), pytest.raises(Exception, match="stopped"):
        train(load(path), run)
    with pytest.raises(StoreError, match="is of another kind") as caught:
        train(load(recipe(tmp_path, agent=NOTES)), run, resume=run)
    told = caught.value
    assert (told.where, told.got, told.expected) == ("agent.store.kind", "notes", "cases")
    assert f"write cases and its keys into {run / 'recipe.yaml'} again, or start a new run" in str(told)
    train(load(run), run, resume=run)
    with Store(run / "store.sqlite") as store:
        assert {entry.kind for entry in store.entries()} == {"case"}


def test_a_policy_is_not_judged_with_another_kind_of_store_than_it_was_trained_with(tmp_path: Path) -> None:
    runs.run(recipe(tmp_path), tmp_path / "run")
    other = command("evaluate", tmp_path / "run", "agent.store={kind: notes}", "--n", "2", "--out", tmp_path / "out")
    assert other.exit_code == 2 and "error agent.store.kind: the store of this policy is of another" in other.stderr
    assert "got:      notes, for the store in " in other.stderr and "expected: cases" in other.stderr
    assert not (tmp_path / "out").exists()
    # Other keys of its own kind may be given.
    assert last_json(command("evaluate", tmp_path / "run", "agent.store={kind: cases, k: 1}", "--n", "2", "--json"))


def test_a_store_that_cannot_be_copied_leaves_no_checkpoint(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoint.save(tmp_path, checkpoint.State(0, "supervised", 0, False, 0), policy(), None, beside=fails)
    assert not list(tmp_path.iterdir())


def test_an_evaluation_reads_the_store_of_its_checkpoint_and_refuses_tasks_that_are_in_it(tmp_path: Path) -> None:
    made = load(recipe(tmp_path))
    with Store(tmp_path / "s", split="train") as store:
        store.add("case", "Say red.", Origin("words/1", "train"), {"solved": True, "actions": ["red"]})
        copies.save(store, tmp_path)
        saved = content_hash(store)

    def of(split: str) -> Part:
        parts = {name: getattr(made, name) for name in ("environment", "agent", "rewards", "limits")}
        return Part(name="words", **parts, tasks=Tasks(split=split))

    bound = agent_of(of("test"), tmp_path)
    assert bound.store.split is None and content_hash(bound.store) == saved
    bound.store.close()
    with pytest.raises(StoreLeak, match=r"(?s)the store holds entries of evaluation tasks.*words/1"):
        agent_of(of("train"), tmp_path)
    assert agent_of(of("test"), None) is made.agent
    # A model that was exported has its store beside it; another model has none.
    exported = agent_of(of("test"), None, str(tmp_path))
    assert content_hash(exported.store) == saved
    exported.store.close()
    assert agent_of(of("test"), None, str(tmp_path / "other")) is made.agent


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        (
            {"stages": [resume.SUPERVISED]},
            "agent.store",
            "nothing would be stored: only policy_gradient stages write to the store",
        ),
        ({"agent": {**AGENT, "inner": AGENT}}, "agent.inner.kind", "one store"),
        (
            {"stages": [resume.POLICY_GRADIENT, {**resume.POLICY_GRADIENT, "split": "dev"}]},
            "stages",
            "dev, train",
        ),
        ({"agent": {**AGENT, "store": {"kind": "case"}}}, "agent.store.kind", "did you mean 'cases'"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, changes: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(recipe(tmp_path, **changes))
    assert refused.value.where == where and says in str(refused.value)
