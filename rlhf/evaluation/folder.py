"""The files of an evaluation's folder. Importing this loads nothing."""

from __future__ import annotations

from pathlib import Path

from rlhf.errors import RecipeError

PLAN, SUMMARY, VERSIONS, TRAJECTORIES = "evaluation.yaml", "summary.json", "versions.json", "trajectories"
#: What a strategy chose the trajectories from; beside them.
CANDIDATES = "candidates"


def is_evaluation(folder: Path) -> bool:
    """Whether `rlhf evaluate --out` began an evaluation in this folder."""
    return (folder / PLAN).is_file()


def refuse_unfinished(folder: Path, where: str) -> None:
    """Raise RecipeError where `folder` holds no finished evaluation.

    Args:
        folder: of the evaluation.
        where: what named it.
    """
    if not is_evaluation(folder) or not (folder / SUMMARY).is_file():
        raise RecipeError(
            "there is no finished evaluation in this folder",
            where=where,
            got="no such folder" if not folder.is_dir() else f"no {SUMMARY if is_evaluation(folder) else PLAN}",
            expected="a folder that `rlhf evaluate --out` finished",
            hint="finish it with the command that it was begun with",
        )
