"""Weights in bfloat16 with float32 masters against float32: the quickstart's second stage from one start, in pairs.

    python benchmarks/precision.py --seeds 0 1 2 --out runs/precision

Each seed's first stage is trained once; its policy is then trained in both formats with the same seed. Printed are,
with 95% intervals, the paired difference of training success (mean over the steps, one pair a seed) and of success on
unseen tasks (one pair a seed and task, given these runs), and what float32 comes to. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlhf.evaluation.paired import compare
from rlhf.evaluation.statistics import mean_interval
from rlhf.evaluation.store import read_trajectories
from rlhf.sinks import read_metrics
from rlhf.training.checkpoints.store import latest

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"
FORMATS = ("float32", "bfloat16")


def trained(folder: Path, recipe: dict[str, Any], seed: int) -> Path:
    """Train `recipe` in `folder`, or go on there, unless it is finished; returns the folder."""
    if not (folder / "result.json").is_file():
        if folder.is_dir() and not (folder / "recipe.yaml").is_file():
            shutil.rmtree(folder)  # it has not begun
        path = folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(recipe))
        where = "--resume" if folder.is_dir() else "--out"
        command = [sys.executable, "-m", "rlhf.cli", "train", str(path), f"seed={seed}", where, str(folder), "--json"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return folder


def pair(seed: int, out: Path, steps: int | None) -> tuple[Path, ...]:
    """Runs of one seed in both formats."""
    whole = yaml.safe_load(QUICKSTART.read_text())
    first, second = whole["stages"]
    second |= {"steps": steps} if steps else {}
    start = trained(out / f"start-seed{seed}", whole | {"name": "start", "stages": [first]}, seed)
    policy = {"kind": "pretrained", "path": str((latest(start / "checkpoints") or start).resolve() / "policy")}
    return tuple(
        trained(out / f"{dtype}-seed{seed}", whole | {"policy": policy | {"dtype": dtype}, "stages": [second]}, seed)
        for dtype in FORMATS
    )


def curve(folder: Path) -> list[float]:
    """Success of each training step."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [float(value) for line in lines if (value := line.values.get("rollout/success")) is not None]


def unseen(folder: Path, seed: int) -> dict[str, list[float]]:
    """Success at each unseen task after training."""
    records = read_trajectories(folder / "trajectories", stage="after")
    return {f"{seed}/{r.task_id}": [float(bool(r.trajectory.solved))] for r in records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of the second stage; those of the quickstart by default")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    print("| seed | float32: training, unseen | bfloat16: training, unseen |\n|---|---|---|")
    differences, tasks = [], [dict[str, list[float]](), dict[str, list[float]]()]
    for seed in settings.seeds:
        runs = pair(seed, settings.out, settings.steps)
        means = [float(np.mean(curve(run))) for run in runs]
        after = [json.loads((run / "result.json").read_text())["after"]["success"] for run in runs]
        print(
            f"| {seed} | " + " | ".join(f"{m:.1%}, {a:.1%}" for m, a in zip(means, after, strict=True)) + " |",
            flush=True,
        )
        differences.append(means[1] - means[0])
        for all_of, run in zip(tasks, runs, strict=True):
            all_of |= unseen(run, seed)
    for what, found in (
        ("training", mean_interval(differences, within=(-1.0, 1.0))),
        ("unseen", compare(*tasks).difference),
    ):
        print(f"{what}: bfloat16 - float32 {found.value:+.1%} ({found.low:+.1%} to {found.high:+.1%}), {found.n} pairs")


if __name__ == "__main__":
    main()
