"""What the scripts in `benchmarks/` keep, and what they refuse to take for something else."""

from __future__ import annotations

import importlib
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.recipe.builder import build_part

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def credit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`benchmarks/credit.py`, in a folder of its own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("credit")


def test_each_task_of_the_comparison_has_its_own_folder(credit: Any) -> None:
    assert credit.folder_for("rooms-4", None) == Path("runs/credit")
    assert credit.folder_for("cooking", None) == Path("runs/credit-cooking")
    assert credit.folder_for("rooms-3", Path("runs/small")).is_dir()


def test_runs_of_another_task_are_not_taken_for_those_that_are_wanted(credit: Any, tmp_path: Path) -> None:
    recipe = credit.TASKS["rooms-4"].recipe(credit.FLAT)
    credit.command(tmp_path / "start-seed0", recipe)
    assert yaml.safe_load((tmp_path / "start-seed0.yaml").read_text())["environment"]["rows"] == 4
    assert credit.folder_for("rooms-4", tmp_path) == tmp_path
    for task in ("rooms-3", "cooking"):
        with pytest.raises(SystemExit, match=f"start-seed0.yaml is of another task than {task}"):
            credit.folder_for(task, tmp_path)


def test_an_arm_can_have_another_learning_rate(credit: Any) -> None:
    own, slow = credit.arm_of("planner"), credit.arm_of("planner@5e-5")
    assert (slow.label, slow.lr, slow.stage, slow.agent) == ("planner@5e-5", 5e-5, own.stage, own.agent)
    other = credit.arm_of("short={kind: gigpo, gamma: 0.5}")
    assert other.label == "short" and other.stage["advantage"] == {"kind": "gigpo", "gamma": 0.5}
    warm = credit.arm_of("warm={advantage: {kind: gae, lam: 0.95}, critic: {warmup_steps: 3}}")
    assert warm.stage == {"advantage": {"kind": "gae", "lam": 0.95}, "critic": {"warmup_steps": 3}}


def test_shapes_have_the_sizes_that_they_are_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    shapes: Any = importlib.import_module("shapes")
    sizes = {name: sum(p.numel() for p in shapes.make_model(name, "meta").parameters()) for name in ("0.6b", "1.7b")}
    assert sizes == {"0.6b": 596_049_920, "1.7b": 1_720_574_976}  # as Qwen3's own


def test_a_page_without_its_marks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pages: Any = importlib.import_module("pages")
    page = tmp_path / "page.md"
    page.write_text("before\n<b>\nold\n<e>\nafter\n")
    pages.write_between(page, ("<b>", "<e>"), "new\n")
    assert page.read_text() == "before\n<b>\nnew\n<e>\nafter\n"
    for marks in (("<b>", "<none>"), ("<none>", "<e>")):
        with pytest.raises(SystemExit, match="has no line"):
            pages.write_between(page, marks, "lost\n")
    assert "new" in page.read_text()


def test_a_run_is_named_after_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    learning: Any = importlib.import_module("learning")
    assert learning.named("quickstart", 0, []) == "quickstart-seed0"
    assert learning.named("quickstart", 0, ["policy.path=a/b"]) == "quickstart-policy.path=a_b-seed0"


def test_the_cost_of_credit_is_measured_with_values_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cost: Any = importlib.import_module("credit_cost")
    groups = cost.make_groups(8)
    for kind in ("archer", "sweet"):
        estimator = build_part("advantage", {"kind": kind}, kind, base=Path.cwd())
        assert cost.seconds(estimator, groups, cost.make_values(groups)) > 0


@pytest.mark.parametrize("script", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for folder in (BENCHMARKS, script.parent):
        monkeypatch.syspath_prepend(str(folder))
    runpy.run_path(str(script), run_name="imported")
