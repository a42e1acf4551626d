"""Resume of a run: its folder, its newest checkpoint, and refusals of one that is over."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from agents.stores import copies
from agents.stores.store import Store
from environments.base import Capabilities, properties_of
from rlhf import locks, processes
from rlhf.digests import MANIFEST, Manifest
from rlhf.errors import CheckpointError, RecipeError, RlhfError, StoreError, disk
from rlhf.given_parts import how_to_resume
from rlhf.recipe import Recipe
from rlhf.training.checkpoints import store as checkpoint
from rlhf.training.checkpoints.store import State

Say = Callable[[str], None]


@contextmanager
def run_folder(recipe: Recipe, out: Path | None, resume: Path | None, *, lock: bool = True) -> Iterator[Path]:
    """Folder of a run, the same in all processes: `resume`, or a new one, removed if left empty.

    Args:
        recipe: of the run.
        out: a new folder; None takes one that is named after the recipe.
        resume: the folder of a run to go on with.
        lock: whether to keep all other processes from writing there. Of several of one run the first has the lock; a
            launcher, which writes nothing, has none.

    Raises:
        FolderInUse: another process writes there.
        RecipeError: there is something in `out`, or no folder can be made.
    """
    here = processes.current()
    with ExitStack() as stack:
        folder, error = Path(), None
        if here.is_main:
            try:
                folder = _begun(recipe, out, resume, lock, stack)
            except RlhfError as caught:
                error = caught
        folder, error = here.from_main((folder, error), "the folder of the run")
        if error is not None:
            raise error
        yield folder


def _begun(recipe: Recipe, out: Path | None, resume: Path | None, lock: bool, stack: ExitStack) -> Path:
    """`resume`, `out`, or `runs/NAME-seedN`, with a number behind it where that is taken: nothing is overwritten."""
    if resume is not None:
        if lock and resume.is_dir():
            stack.enter_context(locks.held(resume, "rlhf train --resume"))
        return resume
    base = out or Path("runs") / f"{recipe.name}-seed{recipe.seed}"
    for n in count(1):
        folder = base if n == 1 else base.with_name(f"{base.name}-{n}")
        was_there = folder.is_dir()
        _make(folder, out)
        with ExitStack() as own:
            own.enter_context(without_empty(folder, was_there=was_there))
            try:
                if lock:
                    own.enter_context(locks.held(folder, "rlhf train"))
                if _is_unused(folder):
                    stack.push(own.pop_all())
                    return folder
            except locks.FolderInUse:
                if out is not None:
                    raise
        if out is not None:
            raise _not_empty(out)
    raise AssertionError("numbers do not end")


def _is_unused(folder: Path) -> bool:
    """True if a folder holds nothing but locks, and logs of learners on Ray that died before they began."""
    return all(locks.is_lock(path) or _is_log(path) for path in folder.iterdir())


def _is_log(path: Path) -> bool:
    return re.fullmatch(r"learner-\d+\.log", path.name) is not None


def _make(folder: Path, out: Path | None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            "the folder of the run cannot be made",
            where=f"--out {out}" if out else "runs/",
            got="a file" if folder.is_file() else error.strerror or str(error),
            expected="a folder that can be created",
            hint="give another: --out FOLDER",
        ) from error


def _not_empty(out: Path) -> RecipeError:
    is_run = (out / "recipe.yaml").is_file()
    return RecipeError(
        "the folder of the run is not empty",
        where=f"--out {out}",
        got="a run" if is_run else "other files",
        expected="a new folder",
        hint="give another" + (f", or resume that run: {how_to_resume(out)}" if is_run else ""),
    )


@contextmanager
def without_empty(folder: Path, *, was_there: bool) -> Iterator[None]:
    """Context that removes a run folder it leaves empty on failure, unless it existed before."""
    try:
        yield
    except BaseException:
        if not was_there:
            with suppress(OSError):  # something is in it
                folder.rmdir()
        raise


def begin_of(folder: Path, is_resumed: bool, say: Say) -> tuple[Path | None, State]:
    """Checkpoint to resume from, if any, and its state; the same in all processes.

    Raises:
        CheckpointError: there is no run in the folder, or what is to be gone on from is not what was written.
    """
    here, found = processes.current(), None
    if is_resumed and here.is_main:
        _check_record(folder, say)
        found = checkpoint.to_resume(folder / "checkpoints", say)
    found = here.from_main(found, "the checkpoint to go on from")
    if is_resumed and found is None and not (folder / "recipe.yaml").is_file():
        raise CheckpointError("there is no run in this folder", where=str(folder), expected="recipe.yaml")
    return found, checkpoint.load_state(found) if found else State(0, "", 0, False, 0)


_VERSIONS = "versions.json"
#: What a run reads again when it goes on, besides its checkpoints and logs.
_READ_AGAIN = ("recipe.yaml", _VERSIONS, "base", "demonstrations", "reward_model", "judges")


def _check_record(folder: Path, say: Say) -> None:
    """Verify a run's files against their digests; create the list where there is none."""
    manifest = Manifest(folder)
    if manifest.is_there:
        for name in ("recipe.yaml", _VERSIONS):
            if (folder / name).is_file():
                manifest.require(folder / name)
        Manifest(folder / "trajectories").check_all()  # the report reads them, at the end
    elif (folder / "recipe.yaml").is_file():
        say(f"caution: {folder} has no digests of its files: what they hold now is taken for what was written")
        manifest.record_all(*_READ_AGAIN)


def made_of(environment: object) -> dict[str, str]:
    """Package of an environment, and digest of the data it reads: `fingerprint()`, where it has one."""
    fingerprint = Capabilities(environment).fingerprint
    return {"package": properties_of(environment).package, "data": fingerprint() if fingerprint else ""}


def own_environments(recipe: Recipe) -> dict[str, Any]:
    """Environments that stages have for themselves, by their paths."""
    own = ((i, stage.environment) for i, stage in enumerate(recipe.stages))
    return {f"stages[{i}].environment": environment for i, environment in own if environment is not None}


def recorded(folder: Path, key: str) -> Mapping[str, Any]:
    """Entries of a run's record under `key`; empty where there are none."""
    path = folder / _VERSIONS
    if not path.is_file():
        return {}
    with disk("the record of versions", path):
        found: Mapping[str, Any] = json.loads(path.read_text("utf-8")).get(key, {})
        return found


def check_environments(folder: Path, recipe: Recipe) -> None:
    """Check that the environments of a run are those that it began with, as `check_environment` does."""
    for path, environment in {"environment": recipe.environment, **own_environments(recipe)}.items():
        check_environment(folder, environment, path)


def check_environment(folder: Path, environment: object, key: str = "environment") -> None:
    """Refuse an environment whose package or data changed since the run began; `key` is its place in the recipe.

    Raises:
        CheckpointError: it is another version of the package, or another content of the file.
    """
    record = recorded(folder, key)
    for name, now in made_of(environment).items():
        if record.get(name) and record[name] != now:
            raise CheckpointError(
                "the environment differs from the one this run began with",
                where=f"{folder / _VERSIONS}, {key}.{name}",
                got=now or "nothing: it was removed",
                expected=record[name],
                hint="restore it, or start a new run from the newest checkpoint: policy.path",
            )


def check_data_unchanged(folder: Path, now: Mapping[str, str]) -> None:
    """Raise CheckpointError where training data changed since the run began, or a file is gone."""
    for name, digest in recorded(folder, "data").items():
        if now.get(name) != digest:
            raise CheckpointError(
                "the data differs from what this run began with",
                where=f"{folder / _VERSIONS}, {name}",
                got=now.get(name, "no such file"),
                expected=digest,
                hint="restore the file, or start a new run",
            )


def is_finished(recipe: Recipe, state: State) -> bool:
    """True if nothing is left to train or to evaluate."""
    return state.finished and state.stage == len(recipe.stages) - 1 and "after" in state.results


def say_finished(state: State, found: Path | None, say: Say) -> None:
    """Tell the user that there is nothing left to do, and what to do with it."""
    after = state.results["after"]  # empty without rewards
    success = f": success {after['success']:.1%}" if after else ""
    say(f"this run is finished{success}; nothing is left to train")
    say(f"its policy: {found}; to use it elsewhere: rlhf export {found} --out FOLDER")


#: Of a run that has begun, what another start makes again at once.
_RECORD = ("recipe.yaml", ".recipe.yaml.partial", "versions.json", ".versions.json.partial", MANIFEST)


@contextmanager
def telling_what_is_there(folder: Path, say: Say, *, is_resumed: bool) -> Iterator[None]:
    """Context that reports the folder's contents on a failure before the first checkpoint.

    A new run's folder in which nothing has been saved but its record is emptied: there is nothing to go on from.
    """
    try:
        yield
    except BaseException:
        if processes.current().is_main and not is_resumed and _holds_nothing(folder):
            _empty(folder)
        elif processes.current().is_main and checkpoint.latest(folder / "checkpoints") is None:
            names = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []
            say(f"there is no checkpoint yet; {folder} holds {', '.join(names) or 'nothing'}")
            if "recipe.yaml" in names:
                say(f"to begin training again with what is there: {how_to_resume(folder)}")
        raise


def _holds_nothing(folder: Path) -> bool:
    """True if a folder holds only the record of a run, logs of learners, empty files, and a store without entries."""
    others = (p for p in folder.rglob("*") if p.name not in _RECORD and not p.is_dir() and not locks.is_lock(p))
    found = [p for p in others if not _is_empty(p) and not _is_log(p)]
    return all(p == folder / copies.FILE and _is_new(p) for p in found)


def _is_empty(path: Path) -> bool:
    """True for a file without content; not for one that another process has just renamed."""
    try:
        return path.stat().st_size == 0
    except FileNotFoundError:
        return False


def _is_new(path: Path) -> bool:
    try:
        with Store(path) as store:
            return not store.entries()
    except StoreError:
        return False


def _empty(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif not locks.is_lock(path) and not _is_log(path):  # a log says why
            with suppress(OSError):
                path.unlink()
