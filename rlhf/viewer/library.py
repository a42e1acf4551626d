"""Runs that a viewer shows: those named, and those of named folders, new ones too."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from rlhf.evaluation.folder import kept_in
from rlhf.viewer.attempts import Attempts
from rlhf.viewer.run_folder import RunFolder, is_run
from rlhf.viewer.trajectory import Tokenizers


class ShownRun(RunFolder):
    """A run with its attempts and its tokenizer."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.attempts, self.tokenizers = Attempts(folder / "trajectories"), Tokenizers(folder)


class Library:
    """Runs by an id that fits into an address. What a request names is looked up here, and never a path."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [Path(folder).absolute() for folder in folders]
        self._runs: dict[Path, ShownRun] = {}
        self._turn = threading.Lock()

    def runs(self) -> list[ShownRun]:
        """All of them in the order they were seen first; one that vanished stays."""
        found = [f for one in self.folders for f in ([one] if is_run(one) or not one.is_dir() else kept_in(one))]
        with self._turn:
            for folder in found:
                if folder not in self._runs:
                    self._runs[folder] = ShownRun(folder, self._id(folder))
            return list(self._runs.values())

    def get(self, wanted: str) -> ShownRun | None:
        """The run of an id, or None."""
        known = next((run for run in list(self._runs.values()) if run.id == wanted), None)
        return known or next((run for run in self.runs() if run.id == wanted), None)

    def _id(self, folder: Path) -> str:
        name = re.sub(r"[^\w.-]+", "_", folder.name, flags=re.ASCII)[:60] or "run"
        taken = {run.id for run in self._runs.values()}
        return name if name not in taken else f"{name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:6]}"
