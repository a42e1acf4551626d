"""Where a run goes on, and what is said of one that is over, or that ended before there was anything to go on from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf import processes
from rlhf.errors import CheckpointError
from rlhf.recipe import Recipe
from rlhf.trainers import checkpoint
from rlhf.trainers.checkpoint import State

Say = Callable[[str], None]


def begin_of(folder: Path, is_resumed: bool, say: Say) -> tuple[Path | None, State]:
    """The checkpoint that a run goes on from, if there is one, and where it stands; the same in all processes.

    Raises:
        CheckpointError: there is no run in the folder, or its checkpoint cannot be read.
    """
    here, found = processes.current(), None
    if is_resumed and here.is_main:
        found = checkpoint.to_resume(folder / "checkpoints", say)
    found = here.from_main(found, "the checkpoint to go on from")
    if is_resumed and found is None and not (folder / "recipe.yaml").is_file():
        raise CheckpointError("there is no run in this folder", where=str(folder), expected="recipe.yaml")
    return found, checkpoint.load_state(found) if found else State(0, "", 0, False, 0)


def is_finished(recipe: Recipe, state: State) -> bool:
    """Whether nothing is left to train and to measure."""
    return state.finished and state.stage == len(recipe.stages) - 1 and "after" in state.results


def say_finished(state: State, found: Path | None, say: Say) -> None:
    """Tell the user that there is nothing left to do, and what to do with it."""
    say(f"this run is finished: success {state.results['after']['success']:.1%}; nothing is left to train")
    say(f"its policy: {found}; to use it elsewhere: rlhf export {found} --out FOLDER")


#: Of a run that has begun, what another start makes again at once.
_RECORD = ("recipe.yaml", ".recipe.yaml.partial", "versions.json")


@contextmanager
def telling_what_is_there(folder: Path, say: Say, *, is_resumed: bool) -> Iterator[None]:
    """Where what happens inside fails before the first checkpoint, tell the user what the folder holds.

    A new run's folder in which nothing has been saved but its record is removed: there is nothing to go on from.
    """
    try:
        yield
    except BaseException:
        if processes.current().is_main and not is_resumed and _holds_nothing(folder):
            shutil.rmtree(folder, ignore_errors=True)
        elif processes.current().is_main and checkpoint.latest(folder / "checkpoints") is None:
            names = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
            say(f"there is no checkpoint yet; {folder} holds {', '.join(names) or 'nothing'}")
            if "recipe.yaml" in names:
                say(f"to begin training again with what is there: rlhf train --resume {folder}")
        raise


def _holds_nothing(folder: Path) -> bool:
    """Whether there is no file in the folder but the record of a run, and empty ones."""
    return all(p.name in _RECORD or p.is_dir() or not p.stat().st_size for p in folder.rglob("*"))
