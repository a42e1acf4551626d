"""Oracle demonstrations of tasks that the oracle cannot solve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from environments.base import Properties, StepResult
from rlhf.build.stage_demonstrations import play_all
from rlhf.data import Task
from rlhf.errors import EnvError
from rlhf.progress import RichProgress
from rlhf.recipe import load
from rlhf.rollout.limits import Limits
from rlhf.terminal import CleanConsole
from rlhf.training.stages.demonstrations import Demonstration, play


@dataclass(frozen=True)
class Doors:
    """One of two doors, of which the oracle knows the right one in every second task."""

    properties = Properties(deterministic=True, replayable=True, inline=True, oracle=True)

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"doors/{i}", seed=i) for i in range(8)]

    def start(self, task: Task) -> Door:
        return Door()

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        return ("left",) if task.seed % 2 == 0 else None


class Door:
    opening = StepResult("Two doors.", state_key="doors", admissible_actions=("left", "right"))

    async def step(self, action: str) -> StepResult:
        return StepResult("Open.", float(action == "left"), True, state_key="open", success=action == "left")

    async def close(self) -> None:
        pass


def shown(*, unsolved_share: float, said: list[str]) -> list[Demonstration]:
    return asyncio.run(
        play(
            Doors(),
            Doors().tasks("train"),
            random_share=0.0,
            unsolved_share=unsolved_share,
            limits=Limits(max_turns=2),
            seed=0,
            say=said.append,
        )
    )


def test_a_task_without_a_plan_is_not_played_at_random() -> None:
    said: list[str] = []
    found = shown(unsolved_share=0.0, said=said)
    assert [d.task.id for d in found] == ["doors/0", "doors/2", "doors/4", "doors/6"]
    assert all([turn.action.text for turn in d.trajectory.turns] == ["left"] for d in found)
    assert said == ["the oracle has no plan for 4 of 8 tasks, left out: doors/1, ..."]


def test_demonstrations_that_are_meant_to_be_random_need_no_plan() -> None:
    said: list[str] = []
    assert len(shown(unsolved_share=1.0, said=said)) == 8 and said == []


def test_a_stage_with_nothing_to_imitate_is_an_error(tmp_path: Path) -> None:
    recipe = {
        "policy": {"kind": "pretrained", "path": "base"},
        "environment": {"kind": "guess_my_city", "max_steps": 1},  # too few to find one of ten towns
        "rewards": {"success": {"kind": "outcome"}},
        "stages": [{"kind": "supervised", "n_demonstrations": 4}],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with pytest.raises(EnvError, match="no demonstration of 4 tasks of GuessMyCity"):
        asyncio.run(play_all(load(path), tmp_path, RichProgress(CleanConsole())))
