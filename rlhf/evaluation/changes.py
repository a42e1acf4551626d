"""Changes of a run's recipe in mid-run: `changes.json` in its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf.digests import read_listed, write_listed

#: Name of the file in a run folder.
CHANGES = "changes.json"


@dataclass(frozen=True)
class Change:
    """Another value of a recipe key from a step on.

    Attributes:
        key: dotted, as an override has it.
        before, now: its values, numbers or None.
        stage: index of the stage.
        step: first step of this stage with the new value, counted from 1.
    """

    key: str
    before: float | None
    now: float | None
    stage: int
    step: int

    @property
    def text(self) -> str:
        """The change in words."""
        before, now = ("null" if value is None else value for value in (self.before, self.now))
        stage = "" if self.key.startswith("stages.") else f" of stages.{self.stage}"
        return f"{self.key}: {now} instead of {before} from step {self.step}{stage} on"


def read_changes(run: Path) -> list[Change]:
    """Return the changes of a run, oldest first; none where there is no file.

    Raises:
        CheckpointError: the file is not what was written.
    """
    path = run / CHANGES
    return parse_changes(read_listed(path))["changes"] if path.is_file() else []


def write_changes(run: Path, changes: Sequence[Change]) -> None:
    """Write the changes of a run, whole or not at all."""
    write_listed(run / CHANGES, json.dumps({"changes": [asdict(change) for change in changes]}, indent=1) + "\n")


def parse_changes(text: str) -> dict[str, list[Change]]:
    """Parse the file: the changes under its one key. Raises ValueError where it holds something else."""
    try:
        values: Any = json.loads(text)
        return {"changes": [Change(**one) for one in values["changes"]]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"no changes of a recipe: {error}") from error
