"""Data of a run report: the files of a run folder, read once. Each of them may be missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.digests import check_log, read_listed
from rlhf.errors import CheckpointError, DataError
from rlhf.evaluation.changes import CHANGES, Change, parse_changes
from rlhf.finite import finite_json
from rlhf.sinks import LogLine, read_metrics


@dataclass(frozen=True, slots=True)
class Curve:
    """Metric over the steps of a stage."""

    stage: str
    steps: list[int]
    values: list[float | None]


@dataclass(frozen=True)
class RunData:
    """The files of a run folder.

    Attributes:
        folder: of the run.
        lines: of `metrics.jsonl`, oldest first.
        results: named evaluations of `result.json`, in its order, each with `success`, `low`, `high`, `n`, `n_errors`.
        facts: other plain values of `result.json`.
        settings: `recipe.yaml` as plain values.
        changes: of the recipe in mid-run.
    """

    folder: Path
    lines: list[LogLine]
    results: dict[str, dict[str, Any]]
    facts: dict[str, Any]
    settings: dict[str, Any]
    changes: Sequence[Change] = ()

    @classmethod
    def read(cls, folder: Path) -> RunData:
        """Read a run folder.

        Raises:
            CheckpointError: the folder holds no run, or a file is not what was written.
            DataError: a file is damaged.
        """
        folder = Path(folder)
        if not any((folder / name).exists() for name in ("metrics.jsonl", "recipe.yaml", "result.json")):
            raise CheckpointError(
                "no run in this folder", where=str(folder), expected="recipe.yaml, metrics.jsonl or result.json"
            )
        if (folder / "metrics.jsonl").is_file():
            check_log(folder, "metrics.jsonl")
        _parsed(folder / "versions.json", json.loads)  # a report of a run says where this is damaged, too
        result = _parsed(folder / "result.json", finite_json)
        points = {name: value for name, value in result.items() if has_interval(value)}
        return cls(
            folder=folder,
            lines=read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else [],
            results=points,
            facts={name: value for name, value in result.items() if name not in points},
            settings=_parsed(folder / "recipe.yaml", _yaml),
            changes=_parsed(folder / CHANGES, parse_changes).get("changes", ()),
        )

    @property
    def name(self) -> str:
        """Name of the run: of its recipe, else of its folder."""
        return str(self.settings.get("name") or self.folder.resolve().name)

    def curves(self, name: str) -> list[Curve]:
        """Values of a metric for each stage that logged it, in order."""
        found: dict[str, Curve] = {}
        for line in self.lines:
            if name in line.values:
                curve = found.setdefault(line.stage, Curve(line.stage, [], []))
                curve.steps.append(line.step)
                curve.values.append(line.values[name])
        return list(found.values())

    def values(self, name: str) -> list[float]:
        """All finite values of a metric, of all stages, in order."""
        return [v for curve in self.curves(name) for v in curve.values if v is not None]

    def names(self, prefix: str) -> list[str]:
        """Sorted metric names under `prefix`, without it."""
        return sorted({n.removeprefix(prefix) for line in self.lines for n in line.values if n.startswith(prefix)})

    def setting(self, path: str) -> Any:
        """Value of a recipe key such as `limits.max_tokens`, or None."""
        value: Any = self.settings
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def has_interval(value: Any) -> bool:
    """True if a value of `result.json` is a success rate with its interval."""
    return isinstance(value, dict) and all(
        isinstance(value.get(key), int | float) for key in ("success", "low", "high")
    )


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _parsed(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = parse(read_listed(path))
    except ValueError as error:
        raise DataError("this file is damaged", where=str(path), got=str(error)[:200]) from error
    if not isinstance(value, dict):
        raise DataError("this file holds no mapping", where=str(path), got=type(value).__name__)
    return value
