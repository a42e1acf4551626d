"""The files of an evaluation's folder. Importing this loads nothing."""

from __future__ import annotations

from pathlib import Path

from rlhf.errors import RecipeError, nearest

RECIPE, PLAN, SUMMARY = "recipe.yaml", "evaluation.yaml", "summary.json"
VERSIONS, TRAJECTORIES = "versions.json", "trajectories"
#: What a strategy chose the trajectories from; beside them.
CANDIDATES = "candidates"


def is_evaluation(folder: Path) -> bool:
    """Whether `rlhf evaluate --out` began an evaluation in this folder."""
    return (folder / PLAN).is_file()


def kept_in(folder: Path) -> list[Path]:
    """The runs and evaluations directly below `folder`, by name; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if any((path / name).is_file() for name in (RECIPE, PLAN)))


def nearest_beside(folder: Path) -> str:
    """What to write in place of a folder that is not there: the run or evaluation beside it with the nearest name.

    Returns:
        `did you mean 'runs/one'?`, or the names of the first ones if none is like it; '' where there are none, or where
        the folder is there.
    """
    beside = [str(path) for path in kept_in(folder.parent)]
    more = f", and {len(beside) - 5} more" if len(beside) > 5 else ""
    if folder.is_dir() or not beside:
        return ""
    return nearest(str(folder), beside) or f"there are {', '.join(beside[:5])}{more}"


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
            hint=nearest_beside(folder) or "finish it with the command that it was begun with",
        )
