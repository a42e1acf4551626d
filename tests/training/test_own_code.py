"""Code of the user's own that changed between the begin of a run and its resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.build.own_code import caution_changed_code, code_digests
from rlhf.recipe import load
from rlhf.recipe.model import values_of
from tests.training import runs

STAGE = {"kind": "policy_gradient", "steps": 2, "tasks_per_step": 2, "group_size": 2, "checkpoint_every": 1}
VERIFIER = "def right(answer: str, reference: str) -> bool:\n    return answer == reference\n"
REWARD = "def brief(task, trajectory):\n    return -float(len(trajectory.turns))\n"


def test_a_resume_says_which_file_has_changed(tmp_path: Path) -> None:
    (tmp_path / "brief.py").write_text(REWARD)
    rewards = {**runs.BASE["rewards"], "brief": {"kind": "./brief.py:brief", "weight": 0.1}}
    path = runs.write(tmp_path, [STAGE], rewards=rewards)
    runs.stop(path, tmp_path / "run", "0-policy_gradient-000001")
    (tmp_path / "brief.py").write_text(REWARD.replace("-float", "-2.0 * float"))
    said = runs.run(path, tmp_path / "run", resume=True).said
    assert "brief.py (rewards.brief.kind) has changed since the run began" in said
    assert "words.py" not in said


def test_files_modules_and_tools_are_read_but_not_what_is_shipped(tmp_path: Path) -> None:
    (tmp_path / "verify.py").write_text(VERIFIER)
    (tmp_path / "own_code_of_a_module.py").write_text(VERIFIER)
    (tmp_path / "tools.py").write_text(
        'def add(a: int, b: int) -> int:\n    """Sum of two numbers."""\n    return a + b\n'
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "answer": "{i}"}}\n' for i in range(20)))
    rewards = {
        "file": {"kind": "./verify.py:right"},
        "module": {"kind": "own_code_of_a_module:right"},
        "shipped": {"kind": "environment"},
    }
    environment = {"kind": "dataset", "path": "rows.jsonl", "tools": "tools.py"}
    agent = {"kind": "tools"}
    path = runs.write(tmp_path, [STAGE], rewards=rewards, environment=environment, agent=agent)
    found = code_digests(values_of(load(path)))
    assert {key: value.partition(" ")[0] for key, value in found.items()} == {
        "environment.tools": "tools.py",
        "rewards.file.kind": "verify.py",
        "rewards.module.kind": "own_code_of_a_module.py",
    }


def test_a_function_that_a_program_gives_counts_by_its_own_source(tmp_path: Path) -> None:
    said: list[str] = []

    def brief(task: object, trajectory: Any) -> float:
        return -float(len(trajectory.turns))

    class Quiet:
        def __call__(self, task: object, trajectory: Any) -> float:
            return 0.0

    from rlhf import given_parts

    rewards = {**runs.BASE["rewards"], "own": {"kind": "python:rewards.own"}}
    path = runs.write(tmp_path, [STAGE], rewards=rewards)
    with given_parts.given({"rewards.own": brief}):
        first = code_digests(values_of(load(path)))
    with given_parts.given({"rewards.own": Quiet()}):
        second = code_digests(values_of(load(path)))
    assert first.keys() == second.keys() == {"environment.kind", "rewards.own.kind"}
    assert first["environment.kind"] == second["environment.kind"]
    assert first["rewards.own.kind"] != second["rewards.own.kind"]
    caution_changed_code(tmp_path, load(runs.write(tmp_path, [STAGE])), said.append)
    assert not said, "a run of an earlier version has no record"
