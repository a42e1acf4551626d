"""Whole runs of tiny recipes: how to write one, run it, and read what it left."""

from __future__ import annotations

import io
import json
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.build.train import train
from rlhf.errors import RlhfError
from rlhf.evaluation.store import list_steps
from rlhf.recipe import load
from rlhf.terminal import CleanConsole
from tests.training import words

Values = dict[str, Any]

#: Two words, one layer: an episode is two turns, a step takes a tenth of a second.
BASE: Values = {
    "name": "words",
    "policy": {
        "kind": "from_scratch",
        "hidden_size": 32,
        "n_layers": 1,
        "n_heads": 2,
        "head_dim": 16,
        "max_context": 128,
        "vocab_size": 400,
        "initializer_range": 0.1,
    },
    "environment": {"kind": "./words.py:Words"},
    "agent": {"kind": "chat", "system": ""},
    "rewards": {"words": {"kind": "environment"}},
    "limits": {"max_turns": 3, "max_tokens": 6},
    "evaluation": {"n_tasks": 64},
}

#: Of the log, what says how long things took.
_CLOCK = ("time/", "memory/", "rollout/tokens_per_s", "train/")


@dataclass(frozen=True)
class Done:
    """A run that came to its end: its folder, the result, and what was shown to the user."""

    folder: Path
    result: Values
    said: str


def write(folder: Path, stages: list[Values], **changes: Any) -> Path:
    """Write a recipe with `stages` and the environment it names into `folder`; `changes` are top-level keys."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(words.__file__, folder / "words.py")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changes, "stages": stages}, sort_keys=False))
    return path


def run(recipe: Path, out: Path, *, resume: bool = False) -> Done:
    """Train in this process."""
    shown = io.StringIO()
    result = train(load(recipe), out, resume=out if resume else None, console=CleanConsole(file=shown, width=500))
    return Done(out, result, shown.getvalue())


def stop(recipe: Path, out: Path, checkpoint: str) -> None:
    """Train in this process, and press Ctrl-C in the first step of an environment after a checkpoint is there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press() -> None:
        if (out / "checkpoints" / checkpoint / "state.json").exists():
            signal.raise_signal(signal.SIGINT)

    with words.on_every_step(recipe, press), pytest.raises(RlhfError, match=r"^step \d+: stopped, and saved in \S+$"):
        run(recipe, out)
    signal.signal(signal.SIGINT, before)


def log(folder: Path) -> list[Values]:
    """Lines of the log as they are, clock included."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path, name: str) -> list[float]:
    """The values of one metric, in order."""
    return [line[name] for line in log(folder) if name in line]


def ever_above(folder: Path, name: str, least: float | str) -> bool:
    """Whether a metric was in some step above a number, or above another metric."""
    values = curve(folder, name)
    bounds = curve(folder, least) if isinstance(least, str) else [least] * len(values)
    return any(value > bound for value, bound in zip(values, bounds, strict=True))


def lines(folder: Path) -> list[Values]:
    """Lines of the log without what the clock says."""
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith(_CLOCK)} for line in log(folder)]


def newest(folder: Path) -> Path:
    """The newest checkpoint, by its own rule."""
    from rlhf.training.checkpoints.store import latest

    found = latest(folder / "checkpoints")
    assert found is not None
    return found


def weights(checkpoint: Path) -> Mapping[str, bytes]:
    """File name -> content of every file of parameters."""
    folder = checkpoint / "policy"
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))}


def stored(folder: Path) -> list[tuple[str, int, str]]:
    """Stage, step and phase of every trajectory file."""
    return [(s.stage, s.step, s.phase) for s in list_steps(folder / "trajectories")]
