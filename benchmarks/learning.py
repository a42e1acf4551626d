"""Learning curves: each recipe over several seeds, success on unseen tasks before and after with intervals.

    python benchmarks/learning.py mapreader-grpo mapreader-gigpo --seeds 0 1 2 --out runs/learning
    python benchmarks/learning.py --chart "mapreader, 5 rooms" docs/images/mapreader.svg mapreader-grpo mapreader-gigpo
    python benchmarks/learning.py quickstart --pair policy.dtype=float32 policy.dtype=bfloat16

The first form trains (a run that is already finished is not repeated) and prints a table in Markdown; with `--chart`
it also draws training success over steps, one colour for each recipe and one line for each seed.

With `--pair`, each seed's stages but the last are trained once, and the last one from there under both overrides.
Printed are, with 95% intervals, the paired differences of training success (mean over the steps, one pair a seed) and
of success on unseen tasks (one pair a seed and task, given these runs).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from charts import Series, line_chart, smooth

from rlhf.evaluation.paired import compare
from rlhf.evaluation.statistics import mean_interval
from rlhf.evaluation.store import read_trajectories
from rlhf.sinks import read_metrics
from rlhf.training.checkpoints.store import latest

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def run(recipe: str | Mapping[str, Any], seed: int, folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train a recipe, or its keys, with `seed` in `folder` unless that is done; returns the last line of its output."""
    result = folder.with_name(folder.name + ".json")
    if not result.is_file():
        if not isinstance(recipe, str):
            path = folder.with_name(folder.name + ".yaml")
            path.write_text(yaml.safe_dump(dict(recipe), sort_keys=False))
            recipe = str(path)
        words = [recipe, f"seed={seed}", *overrides, "--out", str(folder)]
        if (folder / "recipe.yaml").is_file():
            words = ["--resume", str(folder)]
        command = [sys.executable, "-m", "rlhf.cli", "train", *words, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result.write_text(done.stdout.splitlines()[-1])
    return dict(json.loads(result.read_text()))


def named(what: str, seed: int, overrides: Sequence[str]) -> str:
    """Name of a run's folder, which says what it was given."""
    return "-".join([what, *(text.replace("/", "_") for text in overrides), f"seed{seed}"])


def curve(folder: Path, label: str) -> Series:
    """Smoothed training success of the policy-gradient stage."""
    steps = [line.step for line in read_metrics(folder / "metrics.jsonl") if "rollout/success" in line.values]
    return Series(label, steps, smooth(successes(folder), 5))


def successes(folder: Path) -> list[float]:
    """Success of each training step."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [float(value) for line in lines if (value := line.values.get("rollout/success")) is not None]


def unseen(folder: Path, seed: int) -> dict[str, list[float]]:
    """Success at each unseen task after training."""
    records = read_trajectories(folder / "trajectories", stage="after")
    return {f"{seed}/{r.task_id}": [float(bool(r.trajectory.solved))] for r in records}


def paired(recipe: str, seeds: Sequence[int], pair: Sequence[str], out: Path, overrides: Sequence[str]) -> None:
    """Train the last stage of `recipe` from one start under two overrides, and print what the second one changes."""
    whole = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    *before, last = whole["stages"]
    print("| seed | " + " | ".join(f"{arm}: training, unseen" for arm in pair) + " |\n|---|---|---|")
    differences, tasks = [], [dict[str, list[float]](), dict[str, list[float]]()]
    for seed in seeds:
        policy = whole["policy"]
        if before:
            start = out / f"start-{recipe}-seed{seed}"
            run(whole | {"stages": before}, seed, start)
            policy = {"kind": "pretrained", "path": str((latest(start / "checkpoints") or start).resolve() / "policy")}
        keys = whole | {"policy": policy, "stages": [last]}
        runs = [out / named(f"{recipe}-{arm}", seed, overrides) for arm in pair]
        after = [run(keys, seed, folder, [*overrides, arm]) for folder, arm in zip(runs, pair, strict=True)]
        means = [float(np.mean(successes(folder))) for folder in runs]
        cells = (f"{mean:.1%}, {found['success_after']:.1%}" for mean, found in zip(means, after, strict=True))
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)
        differences.append(means[1] - means[0])
        for of_arm, folder in zip(tasks, runs, strict=True):
            of_arm |= unseen(folder, seed)
    training, after_it = mean_interval(differences, within=(-1.0, 1.0)), compare(*tasks).difference
    for what, found in (("training", training), ("unseen", after_it)):
        print(
            f"{what}: {pair[1]} - {pair[0]} {found.value:+.1%} ({found.low:+.1%} to {found.high:+.1%}), {found.n} pairs"
        )


def row(recipe: str, seed: int, found: dict[str, Any]) -> str:
    """One row of the table."""

    def share(value: float, interval: list[float]) -> str:
        return f"{value:.1%} ({interval[0]:.1%} to {interval[1]:.1%})"

    before = share(found["success_before"], found["interval_before"])
    after = share(found["success_after"], found["interval_after"])
    return f"| {recipe} | {seed} | {before} | {after} | {found['n_episodes']:,} | {found['train_s']:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["quickstart"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="overrides, key=value")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--chart", nargs=2, metavar=("TITLE", "FILE"))
    parser.add_argument("--pair", nargs=2, metavar=("ONE", "OTHER"), help="overrides of the last stage, key=value")
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    if settings.pair:
        for recipe in settings.recipes:
            paired(recipe, settings.seeds, settings.pair, settings.out, settings.set)
        return
    print("| recipe | seed | success before | success after | episodes | training, s |\n|---|---|---|---|---|---|")
    curves = []
    for recipe in settings.recipes:
        for seed in settings.seeds:
            folder = settings.out / named(recipe, seed, settings.set)
            print(row(recipe, seed, run(recipe, seed, folder, settings.set)), flush=True)
            curves.append(curve(folder, recipe))
    if settings.chart:
        title, file = settings.chart
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        chart = line_chart(curves, title, "step", "success in training", percent=True, y_range=(0, 1), width=720)
        Path(file).write_text(chart)


if __name__ == "__main__":
    main()
