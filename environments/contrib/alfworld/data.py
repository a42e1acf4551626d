"""The official games of ALFWorld, where they were downloaded: below the folder that `ALFWORLD_DATA` names."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from environments.contrib.alfworld.generate import TASK_TYPES
from rlhf.errors import DataError, EnvError

#: The environment variable of the package that says where its data are.
VARIABLE = "ALFWORLD_DATA"
#: What the package calls the splits.
OFFICIAL: Mapping[str, str] = {"train": "train", "dev": "valid_seen", "test": "valid_unseen"}

_FOLDER = "json_2.1.1"


@dataclass(frozen=True, slots=True)
class Found:
    """An official game.

    Attributes:
        path: its folder, below that of the split.
        task_type: one of the six.
        digest: eight digits over `game.tw-pddl`.
    """

    path: str
    task_type: str
    digest: str


def is_there() -> bool:
    """True if the variable is set."""
    return bool(os.environ.get(VARIABLE))


def games(split: str) -> Sequence[Found]:
    """The games of a split that the package plays too, in the order of their paths.

    As the package does it, games with movable receptacles and slices, and those not marked as solvable, are left out.

    Raises:
        EnvError: the variable is not set, or there are no games of this split below it.
    """
    folder = _folder(split)
    found = _games(folder)
    if not found:
        raise EnvError(
            "there are no ALFWorld games in this folder",
            where=f"${VARIABLE}",
            got=str(folder),
            expected="folders with game.tw-pddl and traj_data.json",
            hint="alfworld-download fetches them, or use `games: generated`, which are different games",
        )
    return found


def read(split: str, path: str, digest: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Contents of `game.tw-pddl` and `traj_data.json`. Raises DataError where they are gone or not what they were."""
    folder = _folder(split) / path
    try:
        text = (folder / "game.tw-pddl").read_bytes()
        trajectory = json.loads((folder / "traj_data.json").read_bytes())
        if _digest(text) != digest:
            raise ValueError(f"its hash is {_digest(text)}")
        return json.loads(text), trajectory
    except (OSError, ValueError) as error:
        raise DataError(
            "the game file has changed since it was listed", where=str(folder), got=str(error), expected=digest
        ) from error


@lru_cache(maxsize=16)
def _games(folder: Path) -> tuple[Found, ...]:
    found = []
    for told in sorted(folder.rglob("traj_data.json")):
        path, game = told.parent.relative_to(folder).as_posix(), told.with_name("game.tw-pddl")
        if "movable" in path or "Sliced" in path or not game.exists():
            continue
        task_type = json.loads(told.read_bytes()).get("task_type")
        text = game.read_bytes()
        if task_type in TASK_TYPES and json.loads(text).get("solvable"):
            found.append(Found(path, task_type, _digest(text)))
    return tuple(found)


def _folder(split: str) -> Path:
    root = os.environ.get(VARIABLE)
    if not root:
        raise EnvError(
            "the ALFWorld games are not downloaded",
            where="games",
            got=f"official, and {VARIABLE} is not set",
            hint=f"alfworld-download fetches them; set {VARIABLE} to their folder, or take `games: generated`",
        )
    return Path(root).expanduser() / _FOLDER / OFFICIAL[split]


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:8]
