"""`benchmarks/frozen.py`: two trees that train the same are equal, and what differs first is named."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: A command line that trains nothing: what it leaves is written out, and differs by what is replaced in this text.
CLI = """
import json, sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file


def main():
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    (out / "trajectories").mkdir(parents=True)
    lines = [{"step": step, "stage": "1-a", "time": id(out), "loss/total": 0.5 * step} for step in (1, 2, 3)]
    lines[1]["rollout/n_tokens"] = 3.0
    lines[1]["time/step_s"], lines[1]["rollout/tokens_per_s"] = float(id(out)), float(id(lines))
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
    for step, name in enumerate(["1-a-000000", "1-a-000010", "1-a-000002"]):
        (out / "checkpoints" / name / "policy").mkdir(parents=True)
        weights = {"w": np.arange(4, dtype="float32") + step}
        save_file(weights, out / "checkpoints" / name / "policy" / "model.safetensors", {"made": str(id(out))})
    rows = [{"task_id": "t", "attempt": i, "generations": [{"token_ids": [1, 2, 3 + i]}]} for i in (0, 1)]
    pq.write_table(pa.Table.from_pylist(rows), out / "trajectories" / "1-a-train-000001.parquet")
"""


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("frozen")


def tree(folder: Path, old: str = "", new: str = "") -> Path:
    """Write a tree whose command line has `new` where others have `old`."""
    assert old in CLI
    (folder / "rlhf").mkdir(parents=True)
    (folder / "rlhf" / "__init__.py").touch()
    (folder / "rlhf" / "cli.py").write_text(CLI.replace(old, new) if old else CLI, "utf-8")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "quickstart.yaml").touch()
    return folder


def said(frozen: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run the script; returns its exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", ["frozen.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        frozen.main()
    return f"{ended.value.code} {capsys.readouterr().out}"


DIFFERING = {
    "a metric": ("0.5 * step", "0.5 * step + (step == 2)", "1-a, step 2: loss/total is 1.0 and 2.0, 1 apart, 0.5 of"),
    "a metric that is gone": ('"rollout/n_tokens"', '"rollout/n_turns"', "step 2: rollout/n_tokens is in base only"),
    "a line": ("(1, 2, 3)", "(1, 2)", "3 and 2 lines were logged"),
    "a step": ("(1, 2, 3)", "(1, 2, 4)", "a line of 1-a, step 3 has become one of 1-a, step 4"),
    "a value that is not finite": ("= 3.0", "= None", "rollout/n_tokens is 3.0 and None"),
    "a token": ("3 + i", "3 + 2 * i", "1-a-train-000001, task t, attempt 1: generation 0 differs from token 2 on"),
    "a generation": ("3 + i]}", "3 + i]}] * 2 + [{'token_ids': []}", "attempt 0: 1 and 3 generations"),
    "an attempt": ("for i in (0, 1)", "for i in (0, 2)", "attempt 1 is in base only"),
    "a weight": ("+ step}", "+ step + (step == 2)}", "1-a-000002/policy/model.safetensors: w is 1 apart, of 5 at most"),
    "a tensor": ('{"w"', '{"v"', "1-a-000000/policy/model.safetensors: tensors ['v', 'w'] are in one tree only"),
    "a type": ('"float32"', '"int64"', "w is torch.float32 [4] and torch.int64 [4]"),
    "a checkpoint": ('"1-a-000002"', '"1-a-000003"', "1-a-000003/policy/model.safetensors'] in one tree only"),
    "a run that fails": ("def main():", "def main():\n    sys.exit('too hot')", "failed in head:\n    too hot"),
}


@pytest.mark.parametrize("case", DIFFERING.values(), ids=DIFFERING)
def test_what_differs_first_is_named(
    case: tuple[str, str, str], frozen: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    old, new, expected = case
    base, head = tree(tmp_path / "base"), tree(tmp_path / "head", old, new)
    text = said(frozen, monkeypatch, capsys, base, head, "--only", "quickstart", "--jobs", 2)
    assert text.startswith("1 quickstart: differs") and expected in text, text


def test_trees_that_train_the_same_are_equal_and_times_are_no_difference(
    frozen: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    base, out = tree(tmp_path / "base"), tmp_path / "out"
    words = (base, tree(tmp_path / "head"), "--only", "quickstart")
    text = said(frozen, monkeypatch, capsys, *words, "--out", out)
    # Three losses and a number of tokens; two attempts of three tokens; a file in each of three checkpoints.
    assert text.startswith("0 quickstart: equal; 4 numbers, 6 tokens, 3 files of weights; base"), text
    folder = out / "quickstart" / "head" / "0-quickstart"
    assert [path.name for path in frozen.checkpoints(folder)] == ["1-a-000000", "1-a-000002", "1-a-000010"]


def test_a_tolerance_is_relative_and_no_tolerance_of_tokens(
    frozen: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    base = tree(tmp_path / "base")
    words = ("--only", "quickstart", "--tolerance", "1e-6")
    near = tree(tmp_path / "near", "0.5 * step", "0.5 * step * (1 + 5e-7)")
    assert said(frozen, monkeypatch, capsys, base, near, *words).startswith("0")
    weights = tree(tmp_path / "weights", "+ step}", "+ step + 1e-6 * (step == 2)}")
    assert said(frozen, monkeypatch, capsys, base, weights, *words).startswith("0")
    assert said(frozen, monkeypatch, capsys, base, weights, *words[:2]).startswith("1")
    tokens = tree(tmp_path / "tokens", "3 + i", "4 + i")
    assert said(frozen, monkeypatch, capsys, base, tokens, *words, "--jobs", 2).startswith("1")
    assert frozen.is_equal(1e-13, 0.0, 1e-6) and not frozen.is_equal(1e-13, 0.0, 0.0)


def test_a_renamed_metric_is_compared_with_its_new_name(
    frozen: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    base, head = tree(tmp_path / "base"), tree(tmp_path / "head", '"rollout/n_tokens"', '"rollout/n_sampled"')
    words = ("--only", "quickstart", "--renamed", "rollout/n_tokens=rollout/n_sampled")
    assert said(frozen, monkeypatch, capsys, base, head, *words).startswith("0 quickstart: equal; 4 numbers")


def test_an_added_metric_is_no_difference(frozen: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    base, head = tree(tmp_path / "base"), tree(tmp_path / "head", "0.5 * step}", '0.5 * step, "rollout/new": 1.0}')
    words = (base, head, "--only", "quickstart")
    assert "rollout/new is in head only" in said(frozen, monkeypatch, capsys, *words)
    assert said(frozen, monkeypatch, capsys, *words, "--added", "rollout/new").startswith("0 quickstart: equal")


def test_a_revision_is_checked_out_and_removed_again(
    frozen: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    repository = tree(tmp_path / "repository")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (repository / "rlhf" / "cli.py").write_text(CLI.replace("3 + i", "4 + i"), "utf-8")
    monkeypatch.setattr(frozen, "ROOT", repository)
    text = said(frozen, monkeypatch, capsys, "HEAD", repository, "--only", "quickstart")
    assert text.startswith("1") and "attempt 0: generation 0 differs from token 2 on" in text
    listed = subprocess.run([*git, "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1
    monkeypatch.setattr(sys, "argv", ["frozen.py", "nowhere"])
    with pytest.raises(SystemExit, match="nowhere is neither a folder with rlhf/ in it nor a revision"):
        frozen.main()


def test_what_runs_is_the_tree_and_a_recipe_that_it_lacks_is_the_other_ones(
    frozen: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    base, head = tree(tmp_path / "base"), tree(tmp_path / "head")
    shutil.rmtree(base / "recipes")
    assert said(frozen, monkeypatch, capsys, base, head, "--only", "quickstart").startswith("0")
    (head / "rlhf" / "__init__.py").write_text("__file__ = '/elsewhere/rlhf/__init__.py'", "utf-8")
    text = said(frozen, monkeypatch, capsys, base, head, "--only", "quickstart")
    assert text.startswith("1") and "failed in head" in text and "rlhf comes from" in text


def test_every_recipe_of_the_comparison_is_there(frozen: Any) -> None:
    for trainings in frozen.RECIPES.values():
        for training in trainings:
            assert frozen.recipe_of(training.recipe, [ROOT]).is_file()


def test_without_a_revision_it_says_what_is_missing(frozen: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["frozen.py"])
    frozen.main()
    assert "name a revision" in capsys.readouterr().out


@pytest.mark.extended
def test_the_quickstart_is_equal_to_itself(frozen: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    text = said(frozen, monkeypatch, capsys, ROOT, ROOT, "--only", "quickstart", "--steps", 1, "--out", tmp_path)
    assert text.startswith("0 quickstart: equal"), text
