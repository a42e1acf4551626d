"""What the folder holds of a run that failed before there was anything to go on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agents.stores import copies
from agents.stores.store import Origin, Store
from rlhf.build.resume import run_folder, telling_what_is_there, without_empty
from rlhf.errors import RecipeError
from rlhf.recipe import load
from tests import recipe_parts
from tests.commands import run


def begun(folder: Path) -> None:
    """Make the record of a run, with a new store."""
    (folder / "trajectories").mkdir(parents=True)
    for name in ("recipe.yaml", "versions.json"):
        (folder / name).write_text("{}")
    (folder / "metrics.jsonl").write_text("")
    with Store(folder / copies.FILE, split="train"):
        pass


def remember(folder: Path) -> None:
    with Store(folder / copies.FILE, split="train") as store, store.transaction():
        store.add("case", "a red key", Origin("house/1", "train"), {})


def play(folder: Path) -> None:
    (folder / "demonstrations").mkdir()
    (folder / "demonstrations" / "0.jsonl").write_text("{}")


def renamed(folder: Path) -> None:
    """Leave what is listed and has no content, as a file that another process renames meanwhile."""
    (folder / "process-1.partial").symlink_to(folder / "process-1.json")


def failing(folder: Path, *, was_there: bool) -> list[str]:
    """What is said where a new run in `folder` fails at once."""
    said: list[str] = []
    inside = telling_what_is_there(folder, said.append, is_resumed=False)
    with pytest.raises(OSError, match="gone"), without_empty(folder, was_there=was_there), inside:
        raise OSError("gone")
    return said


def test_a_record_with_a_new_store_is_nothing(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    assert failing(tmp_path / "run", was_there=False) == [] and not (tmp_path / "run").exists()


def test_a_folder_that_the_user_made_is_emptied_and_stays(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    assert failing(tmp_path / "run", was_there=True) == [] and list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("work", [remember, play, renamed])
def test_what_took_work_stays_and_is_told(tmp_path: Path, work: Callable[[Path], None]) -> None:
    begun(tmp_path / "run")
    work(tmp_path / "run")
    said = failing(tmp_path / "run", was_there=False)
    assert f"--resume {tmp_path / 'run'}" in said[-1] and (tmp_path / "run" / copies.FILE).is_file()


def test_logs_of_learners_are_nothing_and_stay(tmp_path: Path) -> None:
    out, recipe = tmp_path / "run", load(recipe_parts.write(tmp_path))
    begun(out)
    (out / "learner-0.log").write_text("gone")
    assert failing(out, was_there=False) == []
    for _ in range(2):  # each start finds what the one before it left
        with run_folder(recipe, out, None) as folder:
            assert folder == out and "learner-0.log" in {path.name for path in out.iterdir()}
            begun(out)
        assert failing(out, was_there=True) == [] and [path.name for path in out.iterdir()] == ["learner-0.log"]
    (out / "other-0.log").touch()
    with pytest.raises(RecipeError, match="not empty"), run_folder(recipe, out, None):
        pass


def test_a_run_on_the_command_line_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    recipe, out = recipe_parts.write(tmp_path / "outside"), tmp_path / "run"
    (tmp_path / "config.json").write_text("{}")
    words = ["train", recipe, f"rewards.good={{kind: reward_model, path: {tmp_path}}}"]
    words += ["stages=[{kind: policy_gradient}]", "--out", out]
    assert run(*words).exit_code == 2 and not out.exists()
    out.mkdir()
    assert run(*words).exit_code == 2 and list(out.iterdir()) == []
