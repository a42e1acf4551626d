"""Stored attempts and the tasks they were made at, for commands that judge them again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import RecipeError, RlhfError
from rlhf.evaluation.folder import where_to_look
from rlhf.renamed import other_names

if TYPE_CHECKING:
    from rlhf.data import Task
    from rlhf.evaluation.rows import TrajectoryRecord


@dataclass
class Stored:
    """The attempts of a run or an evaluation, read and never written.

    Attributes:
        folder: of the run or the evaluation.
        records: its attempts, those left out that ended with an infrastructure error.
        problem: why tasks could not be made again; empty where they could.
    """

    folder: Path
    records: list[TrajectoryRecord]
    problem: str = ""
    _tasks: dict[str, Task] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Path, *, phase: str | None = None, step: int | None = None) -> Stored:
        """Read a folder, or one file of its `trajectories`.

        Raises:
            DataError: a file is damaged.
            RecipeError: there is nothing stored.
        """
        from rlhf.evaluation.store import list_steps, read_trajectories

        file = run if run.suffix == ".parquet" and run.is_file() else None
        folder = file.parent.parent if file else run
        if not (folder / "trajectories").is_dir():
            raise RecipeError(
                "there are no stored attempts in this folder",
                where=str(run),
                got="no such folder" if not run.exists() else "no folder trajectories/",
                expected="a folder that `rlhf train` or `rlhf evaluate --out` made",
                hint=where_to_look(run),
            )
        stored = [s for s in list_steps(folder / "trajectories") if file is None or s.path.name == file.name]
        names = {(s.stage, s.phase, s.step) for s in stored}
        records = [
            record
            for record in read_trajectories(folder / "trajectories", steps=None if step is None else [step])
            if (record.stage, record.phase, record.step) in names and phase in (None, record.phase)
        ]
        if not records:
            raise RecipeError(
                "no stored attempt matches the filters",
                where=str(run),
                got=f"{len(stored)} files of attempts",
                expected="at least one attempt without an infrastructure error",
                hint="leave out --phase and --step",
            )
        return cls(folder, records)

    def make_tasks(self) -> None:
        """Rebuild the tasks as far as possible; an obstacle is kept as `problem`."""
        self._tasks, self.problem = tasks_of_folder(self.folder)
        missing = sum(known(self._tasks, record.task_id) is None for record in self.records)
        if missing and not self.problem:
            self.problem = f"the environment has no task of that id any more, for {missing} of them"

    def task(self, task_id: str) -> Task:
        """Task of an attempt; where it cannot be rebuilt, one with its id alone."""
        from rlhf.data import Task

        return known(self._tasks, task_id) or Task(task_id)

    def refuse_without_references(self, reward: Any, where: str) -> None:
        """Raise RecipeError if tasks lack the references that a verifier needs."""
        from rewards.verified import Verified

        if not isinstance(reward, Verified) or any(self.task(r.task_id).reference is not None for r in self.records):
            return
        raise RecipeError(
            "this reward needs references, and the tasks have none",
            where=where,
            got=f"the tasks cannot be recreated: {self.problem}" if self.problem else "tasks whose reference is null",
            expected="tasks with Task.reference",
            hint="run this where the environment of the run is installed, or use a reward of (task, trajectory)",
        )


def tasks_of_folder(folder: Path) -> tuple[dict[str, Task], str]:
    """Tasks of a run or an evaluation by id, as far as they can be made again, and the error, if any."""
    found: dict[str, Task] = {}
    try:
        for environment, splits in _environments(folder):
            for split in splits:
                found |= _by_id(environment, split)
    except RlhfError as error:
        return found, str(error)
    return found, ""


def known(tasks: Mapping[str, Task], task_id: str) -> Task | None:
    """Return the task of an attempt; None where it could not be made again."""
    if task_id in tasks:
        return tasks[task_id]
    origin = tasks.get(task_id.rpartition("@")[0])  # a task that begins in the middle is of another
    return replace(origin, id=task_id) if origin else None


def look(folder: Path, record: TrajectoryRecord) -> str:
    """The command that shows one attempt."""
    of_task = ["--step", record.step, "--task", record.task_id, "--attempt", record.trajectory.attempt]
    return shlex.join(map(str, ["rlhf", "trajectories", folder, *of_task]))


def _environments(folder: Path) -> Iterator[tuple[Any, list[str]]]:
    """The environments of a run or an evaluation, with the splits that were attempted."""
    from rlhf.recipe.builder import build_environment
    from rlhf.recipe.text import from_text, read

    plan, recipe = folder / "evaluation.yaml", folder / "recipe.yaml"
    if plan.is_file():
        parts = from_text(plan.read_text("utf-8"), str(plan))["suite"]["parts"]
        for name, part in parts.items():
            made = build_environment(part["environment"], f"parts.{name}.environment", base=folder)
            yield made, [part["tasks"]["split"]]
        return
    if not recipe.is_file():
        raise RecipeError("there is no recipe", where=str(folder), got="no recipe.yaml", expected="recipe.yaml")
    values = read(recipe, ())
    if "environment" not in values:
        raise RecipeError("the recipe has no environment", where=str(recipe), got="no environment", expected="one")
    asked = values.get("evaluation", {})
    names = ("split", "validation_split", *other_names("validation_split"))
    splits = [stage.get("split") for stage in values["stages"]] + [asked.get(name) for name in names]
    made = build_environment(values["environment"], "environment", base=folder)
    yield made, list(dict.fromkeys(split for split in splits if split))
    for i, stage in enumerate(values["stages"]):
        if stage.get("environment"):
            made = build_environment(stage["environment"], f"stages[{i}].environment", base=folder)
            yield made, [stage["split"]] if stage.get("split") else []


def _by_id(environment: Any, split: str) -> dict[str, Task]:
    from environments.base import properties_of
    from rlhf.rollout.tasks import tasks_of

    if split not in properties_of(environment).splits:
        return {}
    return {task.id: task for task in tasks_of(environment, split)}
