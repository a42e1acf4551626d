"""The wheel alone: recipes, suites, templates and pages are in it, it is small, and its commands need no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("rlhf", "rewards", "agents", "environments", "recipes", "suites", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PARTS:
        whole = ROOT / name
        if whole.is_dir():
            shutil.copytree(whole, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(whole, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)
    [built] = folder.glob("*.whl")
    return built


def test_all_that_commands_read_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind in ("recipes", "suites"):
        shipped = {f"rlhf/shipped/{kind}/{p.relative_to(ROOT / kind)}" for p in (ROOT / kind).rglob("*.yaml")}
        assert shipped and shipped <= names
    read = [p for top in PARTS[:4] for p in (ROOT / top).rglob("*") if p.suffix in (".txt", ".html", ".css", ".js")]
    assert read and {str(p.relative_to(ROOT)) for p in read} <= names
    assert wheel.stat().st_size < 5_000_000
    assert not any(name.endswith(".safetensors") for name in names), "the base model stays in the repository"


def test_its_commands_run_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}

    def rlhf(*words: str) -> str:
        command = [sys.executable, "-m", "rlhf.cli", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    assert str(tmp_path / "installed" / "rlhf") in rlhf("recipes", "quickstart", "--json")
    assert "babyai" in rlhf("show", "quickstart")
