"""The line that an error names: of the user's file, not of the toolkit below it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agents.tool_calls
from rlhf.data import Task
from rlhf.data.untrusted import is_listing
from rlhf.errors import EnvError, raised_at
from rlhf.rollout.tasks import tasks_of


def of(path: Path, source: str) -> str:
    """Where an error is said to be raised by this source, as if it were in that file."""
    try:
        exec(compile(source, str(path), "exec"), {})
    except TypeError as error:
        return raised_at(error)
    raise AssertionError("it raises nothing")


def test_a_call_of_the_toolkit_is_told_by_the_line_that_makes_it(tmp_path: Path) -> None:
    source = "from agents.tool_calls import read_calls\n\nread_calls(None, 'json')\n"
    assert of(tmp_path / "mine.py", source) == " (mine.py:3)"


def test_a_folder_beside_the_toolkit_is_the_users() -> None:
    beside = Path(agents.tool_calls.__file__).parents[1] / "agents_of_mine" / "mine.py"
    assert of(beside, "\nlen(3)") == " (mine.py:2)"


def test_tasks_may_be_a_map_style_data_set() -> None:
    class Listed:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Task:
            if i >= 3:
                raise IndexError
            return Task(f"t/{i}")

    world: Any = SimpleNamespace(tasks=lambda split: Listed())
    assert [task.id for task in tasks_of(world, "train", 2)] == ["t/0", "t/1"]
    assert len(tasks_of(world, "train")) == 3
    assert not is_listing(3)
    world = SimpleNamespace(tasks=lambda split: None)
    with pytest.raises(EnvError, match="lists no tasks"):
        tasks_of(world, "train")
