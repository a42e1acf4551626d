"""Inputs of preference and reward-model stages: library, pair files, attempts of other runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rewards.base import Capabilities
from rewards.combinators.parts import with_parts
from rlhf.data import ScoredGroup
from rlhf.errors import RecipeError
from rlhf.evaluation.folder import RECIPE, where_to_look
from rlhf.evaluation.store import list_steps, read_trajectories
from rlhf.recipe import Recipe
from rlhf.recipe.view import paired_stages
from rlhf.training.stages import pair_files
from rlhf.training.stages.pair_settings import OnPairs
from rlhf.training.stages.trl_trainers import load_trl


def check_sources(recipe: Recipe) -> None:
    """Refuse what would be missed only when its stage begins.

    Raises:
        MissingPackageError: TRL is not installed.
        RecipeError: a file of pairs cannot be read, or a run holds no trajectories.
    """
    for path, stage in paired_stages(recipe):
        load_trl(f"{path}.kind")
        if stage.pairs.file is not None:
            pair_files.read(Path(stage.pairs.file).expanduser(), f"{path}.pairs.file")
        if stage.pairs.from_run is not None and not _has_attempts(stage.pairs):
            raise _no_attempts(Path(stage.pairs.from_run).expanduser(), f"{path}.pairs.from_run")


def _no_attempts(run: Path, where: str) -> RecipeError:
    is_run = (run / RECIPE).is_file()
    return RecipeError(
        "this run holds no trajectories of training" if is_run else "there is no run in this folder",
        where=where,
        got=f"{run}{'' if is_run else ', which is not there' if not run.exists() else f', without {RECIPE}'}",
        expected="the folder of a run with stages in which the policy attempts tasks",
        hint="name another, with a stage such as policy_gradient" if is_run else where_to_look(run),
    )


def check_parts(parts: Iterable[Any], tokenizer: Any) -> None:
    """Let rewards and estimators see the policy's tokenizer, and load the models that they ask.

    Raises:
        ModelError: a model cannot be had, or reads other tokens.
        RecipeError: a part names tokens that the policy has not.
    """
    for _, part in with_parts("", list(parts)):
        Capabilities(part).check_policy(tokenizer)


def stored_groups(recipe: Recipe) -> dict[int, list[Any]]:
    """Stored training trajectories to pair, as groups, by the index of the stage."""
    found: dict[int, list[Any]] = {}
    for index, stage in enumerate(recipe.stages):
        if isinstance(stage, OnPairs) and stage.pairs.from_run is not None and _has_attempts(stage.pairs):
            found[index] = list(_groups(Path(stage.pairs.from_run).expanduser()))
    return found


def _has_attempts(source: Any) -> bool:
    folder = Path(source.from_run).expanduser() / "trajectories"
    return any(stored.phase == "train" for stored in list_steps(folder))


def _groups(run: Path) -> Iterator[ScoredGroup]:
    """Yield a group for each task of each step, in stored order.

    Attempts in which another than the policy had a part, such as an older version of it, are left out.
    """
    groups: dict[tuple[str, int, str], list[Any]] = {}
    for record in read_trajectories(run / "trajectories", phase="train"):
        if record.score is not None and not any(g.by for g in record.trajectory.generations):
            groups.setdefault((record.stage, record.step, record.task_id), []).append(record)
    for (_, _, task_id), records in groups.items():
        yield ScoredGroup(task_id, tuple(r.trajectory for r in records), tuple(r.score for r in records))
