"""Inputs of preference and reward-model stages: library, pair files, attempts of other runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rewards.base import Capabilities
from rewards.combinators.parts import with_parts
from rlhf.build.contamination import caution_learnt
from rlhf.data import Score, ScoredGroup, Trajectory
from rlhf.errors import RecipeError
from rlhf.evaluation.folder import RECIPE, where_to_look
from rlhf.evaluation.store import list_steps, read_trajectories
from rlhf.recipe import Recipe
from rlhf.recipe.view import stages_of
from rlhf.training.stages import pair_files
from rlhf.training.stages.pair_settings import PairStage
from rlhf.training.stages.preference import Preference
from rlhf.training.stages.trl_trainers import load_trl


def check_sources(recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> None:
    """Refuse what would be missed only when its stage begins, and caution about evaluation tasks among the pairs.

    Raises:
        MissingPackageError: TRL is not installed.
        RecipeError: a file of pairs cannot be read, or a run holds no trajectories.
    """
    for path, stage in stages_of(recipe, PairStage):
        load_trl(f"{path}.kind")
        if stage.pairs.file is not None:
            path_of, where = stage.pairs.file.expanduser(), f"{path}.pairs.file"
            if isinstance(stage, Preference) and stage.loss == "kto":
                found: Sequence[Any] = pair_files.read_rated(path_of, where)
                _refuse_one_sided(found, path_of, where)
            else:
                found = pair_files.read(path_of, where)
            said = ((message.content, one.line) for one in found for message in one.prompt)
            caution_learnt(recipe, said, where, say)
        for key in ("from_run", "rejected_from"):
            folder = getattr(stage.pairs, key)
            if folder is not None and not _has_attempts(folder):
                raise _no_attempts(folder.expanduser(), f"{path}.pairs.{key}")


def _refuse_one_sided(found: Sequence[pair_files.LabelledReply], path: Path, where: str) -> None:
    """Raise RecipeError where all replies are good, or all are bad."""
    if len({reply.label for reply in found}) == 2:
        return
    what = "good" if found[0].label else "bad"
    raise RecipeError(
        f"all replies of this file are {what}",
        where=where,
        got=f"{path}: {len(found)} with label: {str(bool(found[0].label)).lower()}",
        expected="replies of both labels",
        hint="imitate good ones with {kind: supervised, data: ...}" if found[0].label else "add good ones",
    )


def _no_attempts(run: Path, where: str) -> RecipeError:
    is_run = (run / RECIPE).is_file()
    return RecipeError(
        "this run holds no trajectories of training" if is_run else "there is no run in this folder",
        where=where,
        got=f"{run}{'' if is_run else ', which is not there' if not run.exists() else f', without {RECIPE}'}",
        expected="the folder of a run with rollouts, such as a policy_gradient stage",
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
        if isinstance(stage, PairStage) and stage.pairs.from_run is not None and _has_attempts(stage.pairs.from_run):
            found[index] = list(_groups(stage.pairs.from_run.expanduser()))
            if stage.pairs.rejected_from is not None:
                found[index] = opposed(found[index], _groups(stage.pairs.rejected_from.expanduser()))
    return found


def opposed(later: Iterable[ScoredGroup], earlier: Iterable[ScoredGroup]) -> list[ScoredGroup]:
    """Groups of two: the best attempt of `later` and the worst of `earlier` at a task."""
    best, worst = _extremes(later, max), _extremes(earlier, min)
    return [
        ScoredGroup(task_id, (chosen[0], worst[task_id][0]), (chosen[1], worst[task_id][1]))
        for task_id, chosen in best.items()
        if task_id in worst
    ]


def _extremes(groups: Iterable[ScoredGroup], of: Any) -> dict[str, tuple[Trajectory, Score]]:
    found: dict[str, list[tuple[Trajectory, Score]]] = {}
    for group in groups:
        found.setdefault(group.task_id, []).extend(zip(group.trajectories, group.scores, strict=True))
    return {task_id: of(attempts, key=lambda one: one[1].total) for task_id, attempts in found.items()}


def _has_attempts(run: Path) -> bool:
    folder = run.expanduser() / "trajectories"
    return any(stored.phase == "train" for stored in list_steps(folder))


def _groups(run: Path) -> Iterator[ScoredGroup]:
    return groups_of(run / "trajectories")


def groups_of(folder: Path, stage: str | None = None, step: int | None = None) -> Iterator[ScoredGroup]:
    """Yield a group for each task of each step, or of one, in stored order.

    Attempts in which another than the policy had a part, such as an older version of it, are left out.
    """
    groups: dict[tuple[str, int, str], list[Any]] = {}
    for record in read_trajectories(folder, phase="train", stage=stage, steps=None if step is None else [step]):
        if record.score is not None and not any(g.opponent for g in record.trajectory.generations):
            groups.setdefault((record.stage, record.step, record.task_id), []).append(record)
    for (_, _, task_id), records in groups.items():
        yield ScoredGroup(task_id, tuple(r.trajectory for r in records), tuple(r.score for r in records))
