"""Stored attempts of other runs for `offline_data` of a stage: read anew when a run has written something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.build.pair_data import groups_of
from rlhf.data import ScoredGroup
from rlhf.errors import RecipeError
from rlhf.evaluation.folder import where_to_look
from rlhf.evaluation.store import StoredStep, list_steps
from rlhf.recipe import Recipe
from rlhf.training.contrib.logged_attempts import OfflineData, place_of
from rlhf.training.stages.policy_gradient import PolicyGradient


@dataclass
class StoredRuns:
    """Groups of the training attempts of some runs; a file is read again only when it has changed."""

    settings: OfflineData
    _read: dict[tuple[Path, int, int], tuple[ScoredGroup, ...]] = field(default_factory=dict)

    def groups(self) -> list[ScoredGroup]:
        """Return what is stored now, run by run and step by step. Raises DataError for a file that cannot be read."""
        before, self._read = self._read, {}
        for run in self.settings.runs:
            for stored in self._steps(run):
                status = stored.path.stat()
                key = (stored.path, status.st_mtime_ns, status.st_size)
                of_step = stored.path.parent, stored.stage, stored.step
                self._read[key] = before[key] if key in before else tuple(groups_of(*of_step))
        return [group for groups in self._read.values() for group in groups]

    def _steps(self, run: str) -> list[StoredStep]:
        steps = [s for s in list_steps(Path(run).expanduser() / "trajectories") if s.phase == "train"]
        if self.settings.newest is None or not steps:
            return steps
        stage = max(steps, key=lambda s: int(s.stage.partition("-")[0])).stage
        return [s for s in steps if s.stage == stage][-self.settings.newest :]


def logged_runs(recipe: Recipe) -> Iterator[tuple[int, StoredRuns]]:
    """Give the place of each stage that learns from stored attempts, and what reads them.

    Raises:
        RecipeError: nothing is sampled, and a run holds no attempts.
    """
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, PolicyGradient) and stage.offline_data is not None:
            found = StoredRuns(stage.offline_data)
            for run in stage.offline_data.runs:
                folder = Path(run).expanduser()
                if not stage.offline_data.sample and not list_steps(folder / "trajectories"):
                    raise RecipeError(
                        "this folder holds no attempts",
                        where=f"stages[{index}].offline_data.runs",
                        got=run,
                        expected="the folder of a run with rollouts, such as a policy_gradient stage",
                        hint=where_to_look(folder),
                    )
            yield place_of(index), found
