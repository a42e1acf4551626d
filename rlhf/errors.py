"""Every error this project raises, in one tree.

RlhfError
├── UsageError           a command line cannot be read: an option or argument is missing, unknown or of another type
├── RecipeError          a recipe cannot be run as written: fix the YAML
│   └── UnknownKeyError  it has unknown keys
├── MissingPackageError  an optional package or program is absent: install it
├── ModelError           a model folder cannot be read or does not fit: check the path
├── DataError            a record breaks its own contract (lengths, ranges, NaN): a bug in a plugged-in part
├── EnvError             an environment raised, hung or returned garbage
├── RewardError          a reward raised or returned something that is no number
├── AgentError           an agent raised or returned something that is no action
│   └── StoreError       a store of memories is locked, full, damaged or misused; see agents.stores.faults
├── EngineError          the rollout engine could not generate
│   ├── ContextFull      the prompt leaves no room for a new token
│   └── DeliveryError    weights did not reach the engine
├── TrainingError        training cannot go on (too many failures, non-finite loss)
└── CheckpointError      a checkpoint cannot be written or read

A message has four parts: where, what was given, what was expected, what to do. Authors of plugged-in parts raise plain
Python errors; `boundary` attributes them to the part that raised.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb

#: Where code lies that no user has written: Python's library, installed packages, and this package.
_OF_TOOLKIT = tuple(
    str(Path(__file__).parents[1] / name) + os.sep for name in ("rlhf", "agents", "environments", "rewards")
)
_OF_OTHERS = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")), *_OF_TOOLKIT)


class RlhfError(Exception):
    """Base of all errors of this project.

    Args:
        what: one sentence that says what is wrong.
        where: YAML path, task id, file or call where it happened.
        got: what was given.
        expected: what would have been accepted.
        hint: what to do about it.
    """

    def __init__(self, what: str, *, where: str = "", got: str = "", expected: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.got, self.expected, self.hint = what, where, got, expected, hint

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        for label, text in (("got", self.got), ("expected", self.expected), ("do", self.hint)):
            if text:
                lines.append(f"  {label + ':':<10}{text}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.got, self.expected, self.hint))


def _rebuild(kind: type[RlhfError], what: str, where: str, got: str, expected: str, hint: str) -> RlhfError:
    return kind(what, where=where, got=got, expected=expected, hint=hint)


class UsageError(RlhfError):
    """A command line cannot be read."""


class RecipeError(RlhfError):
    """A recipe cannot be run as written."""


class UnknownKeyError(RecipeError):
    """A recipe has an unknown key."""


class MissingPackageError(RlhfError):
    """An optional package or program is absent."""


class ModelError(RlhfError):
    """A model folder cannot be read, or the model does not fit its use."""


class DataError(RlhfError, ValueError):
    """A record breaks its own contract."""


class EnvError(RlhfError):
    """An environment raised, hung or returned garbage."""


class RewardError(RlhfError):
    """A reward raised or returned something that is no number."""


class AgentError(RlhfError):
    """An agent raised or returned something that is no action."""


class StoreError(AgentError):
    """A store of memories cannot be used."""


class EngineError(RlhfError):
    """The rollout engine could not generate."""


class ContextFull(EngineError):
    """Context overflow: no room for a new token; an agent may catch it and ask with a shorter prompt."""


class DeliveryError(EngineError):
    """Weights did not reach the engine."""


class TrainingError(RlhfError):
    """Training cannot go on."""


class CheckpointError(RlhfError):
    """A checkpoint cannot be written or read."""


class RenamedWarning(FutureWarning):
    """A recipe key, value or option under its old name, which still works for one release."""


@contextmanager
def boundary(kind: type[RlhfError], where: str, hint: str = "") -> Iterator[None]:
    """Attribute any plain exception raised inside to `kind`, keeping the original as its cause."""
    try:
        yield
    except RlhfError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise kind("raised an exception", where=where, got=text + raised_at(error), hint=hint) from error


def raised_at(error: BaseException) -> str:
    """Place of an exception, ` (maze.py:12)`: the line within a user's file that led to it, if any.

    Else it is the line that raised; empty where that is one of this package, which has called what cannot be called so,
    and for an error of ours, which says itself where it happened.
    """
    if isinstance(error, RlhfError):
        return ""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in lines if not file.startswith(("<", *_OF_OTHERS))]
    last = (own or [(file, line) for file, line in lines[-1:] if not file.startswith(_OF_TOOLKIT)])[-1:]
    return "".join(f" ({Path(file).name}:{line})" for file, line in last)


@contextmanager
def disk(what: str, path: Path) -> Iterator[None]:
    """Turn a failure to write `what` under `path` into a CheckpointError that says what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what} cannot be written",
            where=str(path),
            got=error.strerror or str(error),
            hint="free disk space or fix the folder's rights, then resume the run or give the command again",
        ) from error


@contextmanager
def whole(what: str, path: Path) -> Iterator[Path]:
    """Context with a place to write `what`, a file or a folder, which becomes `path` at the end, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with disk(what, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)  # of a process that was killed
        try:
            yield partial
            partial.replace(path)
        finally:
            with suppress(OSError):
                _remove(partial)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the closest known name, or an empty string."""
    found = closest(name, known)
    return meant(found) if found is not None else ""


def meant(name: str) -> str:
    """Return the question whether `name` was meant."""
    return f"did you mean '{name}'?"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Closest known name; None where none shares more than half of its letters.

    Case does not count. A name that only goes on is the closest: `ppo_clip` to `ppo`, though `gspo` is as short. Where
    none is close, one that ends so is: `reflect_and_retry` to `retry`.
    """
    spelt = {other.casefold(): other for other in reversed([*known])}
    names, name = list(reversed(spelt)), name.casefold()
    longer = [other for other in names if name and other.startswith(f"{name}_")]
    close = [name] * (name in spelt) or longer[:1] or difflib.get_close_matches(name, names, n=1, cutoff=0.51)
    close = close or [other for other in names if name and other.endswith(f"_{name}")]
    return spelt[close[0]] if close else None
