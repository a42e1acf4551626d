"""`rlhf new`: what it writes passes its own test and its check at once, and trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from rlhf.commands.new import Part, texts_of
from rlhf.commands.tune import Tuning, choices_of
from rlhf.recipe import load
from rlhf.rollout.tasks import tasks_of
from tests.commands import last_json, run

ROOT = Path(__file__).resolve().parent.parent
PARTS = [part.value for part in Part]
#: The part that a check is told of, by what was written.
TARGETS = {
    "reward": "./my_part.py:judge",
    "environment": "./my_part.py:MyPart",
    "agent": "./my_part.py:MyPart",
    "dataset": "./my_part.py:judge",
}


def shell(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as somebody in `folder` gives it."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds all parts, each in files of its own."""
    made = tmp_path_factory.mktemp("new")
    for part in PARTS:
        files = last_json(run("new", part, "my_part", "--folder", made / part, "--json"))["files"]
        assert files[0] == str(made / part / "my_part.py") and all(Path(file).is_file() for file in files)
    return made


@pytest.mark.parametrize("part", PARTS)
def test_what_is_written_passes_its_test(folder: Path, part: str) -> None:
    done = shell(folder / part, "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.parametrize("part", PARTS)
def test_it_passes_its_check(folder: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / part)
    for what, target in (("reward" if part == "dataset" else part, TARGETS[part]), ("recipe", "my_part.yaml")):
        result = run("check", what, target)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("part", PARTS)
def test_it_can_be_watched_and_tuned_on_tasks_of_their_own(folder: Path, part: str, tmp_path: Path) -> None:
    recipe = folder / part / "my_part.yaml"
    watched = load(recipe, ["stages.1.evaluate_every=10"])
    assert watched.evaluation.validation_split == "dev"
    drawn = {split: {task.id for task in tasks_of(watched.environment, split)} for split in ("train", "dev", "test")}
    assert not any(one & other for one, other in combinations(drawn.values(), 2))
    assert len(drawn["test"]) >= watched.evaluation.n_tasks
    Tuning(str(recipe), (), load(recipe), tmp_path, 2).check(choices_of(["stages.1.optimizer.lr=1e-4,1e-3"]), 20)


@pytest.mark.parametrize("part", PARTS)
def test_it_is_formatted_as_this_project_is(folder: Path, part: str) -> None:
    done = shell(folder / part, "ruff", "format", "--check", "--line-length", "120", ".")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_from_nothing_to_a_run_with_ones_own_verifier(tmp_path: Path) -> None:
    # After `git clone` and `make install`, the three commands of the README, as a new user gives them; fewer steps.
    fewer = ["stages.0.n_demonstrations=200", "stages.0.epochs=1", "evaluation.n_tasks=5"]
    fewer += ["stages.1.steps=3", "stages.1.tasks_per_step=4"]
    commands = [
        ["new", "reward", "near"],
        ["check", "recipe", "near.yaml"],
        ["train", "near.yaml", *fewer, "--json"],
    ]
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    for words in commands:
        said = " ".join(word for word in words if "=" not in word and word != "--json")
        assert f"rlhf {said}" in readme
        done = shell(tmp_path, "rlhf.cli", *words)
        assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (tmp_path / result["report"]).is_file()
    logged = [json.loads(line) for line in (tmp_path / result["run"] / "metrics.jsonl").read_text().splitlines()]
    values = [line["reward/near"] for line in logged if "reward/near" in line]
    assert len(values) == 3 and 0 <= sum(values) / 3 <= 1


@pytest.mark.extended
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_run_with_a_part_of_ones_own_learns(tmp_path: Path, part: str, seed: int) -> None:
    # Half a minute to a minute of processor time: what a newcomer sees is better than what they began with, beyond
    # chance.
    for words in (["new", part, "near"], ["train", "near.yaml", f"seed={seed}", "--json"]):
        done = shell(tmp_path, "rlhf.cli", *words)
        assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["interval_before"][1] < result["interval_after"][0]


def test_names_become_classes_and_nothing_is_left_open() -> None:
    for part in PARTS:
        for file, text in texts_of(part, "red_ball_2").items():
            assert "red_ball_2" in file and "$" not in text, file
    assert "class RedBall2:" in texts_of("agent", "red_ball_2")["red_ball_2.py"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "near.yaml").write_text("mine")
    result = run("new", "reward", "near", "--folder", tmp_path)
    assert result.exit_code == 2 and "this file exists, and nothing is overwritten" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["near.yaml"]


NO_NAMES = ["Near", "my-part", "2nd", "class", "rewards", "random", "json", "torch", "test_me", "", "a/b", "ä"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    result = run("new", "reward", name, "--folder", tmp_path)
    assert result.exit_code == 2 and "this is not a valid name" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "instead"), [("my-maze", "my_maze"), ("Near", "near"), ("class", "my_class")])
def test_a_name_that_can_be_is_suggested(tmp_path: Path, name: str, instead: str) -> None:
    # What is left of the name when it is written as a name, or that with my_ before it where Python has taken it.
    assert f"rlhf new reward {instead}\n" in run("new", "reward", name, "--folder", tmp_path).stderr


@pytest.mark.parametrize(
    ("part", "name"), [("environment", "episode"), ("environment", "step_result"), ("agent", "action")]
)
def test_a_class_of_the_file_itself_is_no_name(tmp_path: Path, part: str, name: str) -> None:
    result = run("new", part, name, "--folder", tmp_path)
    assert result.exit_code == 2 and f"rlhf new {part} my_{name}" in result.stderr
    assert run("new", "reward", name, "--folder", tmp_path).exit_code == 0


def test_a_folder_without_code_takes_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path" / "data_of_mine").mkdir(parents=True)
    (tmp_path / "path" / "code_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    assert run("new", "reward", "data_of_mine", "--folder", tmp_path).exit_code == 0
    assert run("new", "reward", "code_of_mine", "--folder", tmp_path).exit_code == 2


def test_an_unknown_part_is_named() -> None:
    result = run("new", "enviroment", "near")
    assert result.exit_code == 2 and "no such part" in result.stderr and "did you mean 'environment'?" in result.stderr
