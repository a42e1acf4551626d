"""The files of an evaluation's folder. Importing this loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import isfile
from pathlib import Path

from rlhf.errors import RecipeError, closest, disk, meant

RECIPE, PLAN, SUMMARY = "recipe.yaml", "evaluation.yaml", "summary.json"
VERSIONS, TRAJECTORIES = "versions.json", "trajectories"
#: What a strategy chose the trajectories from; beside them.
CANDIDATES = "candidates"
#: Beginning of the names of folders with what was played before an evaluation was given more attempts at each task.
EARLIER = "earlier-"
#: Folders that runs and evaluations are usually in.
HOMES = ("runs", "evaluations")
#: Folders that a message names at most.
_NAMED = 5


def is_evaluation(folder: Path) -> bool:
    """True if `rlhf evaluate --out` began an evaluation in this folder."""
    return (folder / PLAN).is_file()


def list_earlier(folder: Path) -> list[Path]:
    """Folders of attempts set aside when an evaluation was given more attempts per task, by number.

    They are there until the attempts are among those of the evaluation.
    """
    numbered = (path for path in folder.glob(f"{EARLIER}*") if path.name.removeprefix(EARLIER).isdecimal())
    return sorted(numbered, key=lambda path: int(path.name.removeprefix(EARLIER)))


def set_aside(folder: Path) -> None:
    """Set the attempts of an evaluation aside, in the next of `list_earlier`; it has no summary from then on.

    What is set aside is held, whatever number of attempts is asked for next: a kill at any moment changes no result.

    Raises:
        CheckpointError: a file cannot be moved.
    """
    with disk("the evaluation", folder):
        (folder / SUMMARY).unlink(missing_ok=True)
        place = folder / f"{EARLIER}{len(list_earlier(folder))}"
        for name in (TRAJECTORIES, CANDIDATES):
            if (folder / name).is_dir():
                place.mkdir(exist_ok=True)
                (folder / name).rename(place / name)


def kept_in(folder: Path) -> list[Path]:
    """The runs and evaluations directly below `folder`, by name; none where there is no such folder."""
    if not folder.is_dir():
        return []
    # What may not be looked into is none: `Path.is_file` would raise.
    return sorted(path for path in folder.iterdir() if any(isfile(path / name) for name in (RECIPE, PLAN)))


def nearest_beside(folder: Path) -> str:
    """Hint for a missing folder: the run or evaluation with the nearest name.

    It is looked for beside the folder, and in `runs/` and `evaluations/` there.

    Returns:
        `did you mean 'runs/one'?`; if none is like it, the names of those beside it, where the folder that they are in
        holds little else; '' otherwise, or where the folder is there.
    """
    if folder.exists():
        return ""
    near: dict[str, str] = {}
    for home in (folder.parent, *(folder.parent / name for name in HOMES)):
        for path in kept_in(home):
            near.setdefault(path.name, str(path))
    found = closest(folder.name, near)  # names alone: what they lie in is the same
    if found:
        return meant(near[found])
    beside = kept_in(folder.parent)
    n_others = sum(path.is_dir() for path in folder.parent.iterdir()) - len(beside) if beside else 0
    return f"there are {first_of(beside)}" if len(beside) > n_others else ""


def same_name(folder: Path) -> Path | None:
    """Run or evaluation in `runs/` or `evaluations/` with the very name of a missing folder."""
    if folder.exists():
        return None
    homes = (folder.parent / name for name in HOMES)
    return next((path for home in homes for path in kept_in(home) if path.name == folder.name), None)


def first_of(folders: Sequence[Path]) -> str:
    """The first of them, and how many more there are."""
    more = f", and {len(folders) - _NAMED} more" if len(folders) > _NAMED else ""
    return ", ".join(map(str, folders[:_NAMED])) + more


def where_to_look(folder: Path) -> str:
    """Hint where `folder` holds no run: the nearest one, one below it, or the one around it."""
    below, around, here = kept_in(folder), run_around(folder), kept_in(Path(HOMES[0]))
    if near := nearest_beside(folder):
        return near
    if below:
        return f"name one of those below it: {first_of(below)}"
    if around is not None:
        return meant(str(around))
    return f"there are {first_of(here)}" if here else "`rlhf train RECIPE` makes one"


def run_around(folder: Path) -> Path | None:
    """The run or evaluation that `folder` lies in."""
    return next((path for path in folder.parents if any(isfile(path / name) for name in (RECIPE, PLAN))), None)


def no_run(folder: Path, where: str, expected: str = "a folder that `rlhf train` made") -> RecipeError:
    """The error that `folder` holds no run.

    Args:
        folder: that was named.
        where: what named it.
        expected: what the command takes.
    """
    n_below = len(kept_in(folder))
    return RecipeError(
        "there is no run in this folder",
        where=where,
        got="no such folder"
        if not folder.is_dir()
        else f"no {RECIPE}" + f", and {n_below} runs or evaluations in folders below it" * bool(n_below),
        expected=expected,
        hint=where_to_look(folder),
    )


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
            hint=nearest_beside(folder) or "finish it with the command that started it",
        )
