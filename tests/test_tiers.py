"""Collection, tiers and grouping of the test-suite."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ALONE, FAST, HERE

#: What starts groups of processes, or vLLM.
STARTS = re.compile(r"from tests\.training\.together import|\"torchrun|from tests\.rollout\.vllm\.")


def collected(*arguments: str) -> list[str]:
    """Ids of the tests that pytest finds, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "--collect-only", *arguments]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_files_of_one_name_are_collected_together() -> None:
    paths = sorted(HERE.glob("*/test_trees.py"))
    assert len(paths) > 1, "where none are alike, this proves nothing"
    found = collected(*map(str, paths))
    assert {line.split("::")[0] for line in found} == {str(path.relative_to(HERE.parent)) for path in paths}


def test_fast_is_what_is_in_fast_folders_and_not_slow() -> None:
    assert all((HERE / name).is_dir() for name in FAST)
    found = collected("-m", "fast", str(HERE / "tasks"), str(HERE / "training"))
    assert found and all(line.startswith("tests/tasks/") for line in found)


def test_what_starts_groups_of_processes_runs_alone() -> None:
    assert all((HERE / place).exists() for place in ALONE)
    for path in HERE.rglob("test_*.py"):
        if STARTS.search(path.read_text()) and path != Path(__file__):
            relative = path.relative_to(HERE)
            assert any(Path(place) in (relative, *relative.parents) for place in ALONE), relative
