"""Whole runs in two processes: started, stopped and gone on with, and compared with others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.training.run import Interrupted
from tests.training import runs, words
from tests.training.alike import assert_alike


def run_each(rank: int, folder: Path) -> dict[str, Any]:
    """What is said by a run of each recipe `NAME/recipe.yaml` of `folder`, into `NAME-run`."""
    names = sorted(path.parent.name for path in folder.glob("*/recipe.yaml"))
    return {name: runs.run(folder / name / "recipe.yaml", folder / f"{name}-run").said for name in names}


def run_and_stop(rank: int, folder: Path) -> dict[str, Any]:
    """The same of the one recipe of `folder`, and of a run of it that is stopped, and goes on."""
    [name] = said = run_each(rank, folder)
    path, out = folder / name / "recipe.yaml", folder / "stopped-run"
    n = 0

    def stop() -> None:
        nonlocal n
        n += 1
        if rank == 1 and n == 24:  # in the middle of a step of the second stage
            os.kill(os.getpid(), signal.SIGTERM)

    with words.on_every_step(path, stop), pytest.raises(Interrupted):
        runs.run(path, out)
    said["steps when stopped"] = str(sorted(p.name for p in (out / "checkpoints").iterdir()))
    said["resumed"] = runs.run(path, out, resume=True).said
    return said


def figures(folder: Path) -> Iterator[tuple[str, runs.Values]]:
    """Stage and numbers of each line of a run's log."""
    for line in runs.lines(folder):
        yield str(line.get("stage")), {k: v for k, v in line.items() if isinstance(v, float)}


def assert_same_run(both: Path, alone: Path, *, with_sampler: bool) -> None:
    """Compare a run in two processes with one in one.

    An engine that holds a copy logs how far the sampler is from the trainer: `with_sampler` is False for these.
    """
    assert len(runs.lines(both)) == len(runs.lines(alone)) > 40
    learnt = [line["loss/total"] for _, line in figures(alone) if "loss/total" in line]
    assert sum(map(bool, learnt)) >= 3
    for (stage, got), (_, wanted) in zip(figures(both), figures(alone), strict=True):
        if not with_sampler:
            got = {k: v for k, v in got.items() if "/sampler_" not in k}
            wanted = {k: v for k, v in wanted.items() if "/sampler_" not in k}
        assert_alike(got, wanted, stage, atol=1e-4, rtol=1e-4)
    assert runs.stored(both) == runs.stored(alone)
    of_both, of_one = (runs.newest(run) / "policy" for run in (both, alone))
    files = list(of_one.rglob("*.safetensors"))
    assert files
    for file in files:
        found = load_file(of_both / file.relative_to(of_one))
        for key, value in load_file(file).items():
            torch.testing.assert_close(found[key], value, atol=1e-4, rtol=0)


def assert_goes_on_exactly(said: Sequence[dict[str, str]], stopped: Path, whole: Path) -> None:
    """Check what `run_and_stop` returned, and its stopped run against the whole one."""
    assert said[0]["steps when stopped"] == said[1]["steps when stopped"]
    assert "resuming from" in said[0]["resumed"]
    assert runs.lines(stopped) == runs.lines(whole)
    assert runs.weights(runs.newest(stopped)) == runs.weights(runs.newest(whole))
