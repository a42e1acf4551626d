"""Learning curves: each recipe over several seeds, success on unseen tasks before and after with intervals.

    python benchmarks/learning.py mapreader-grpo mapreader-gigpo --seeds 0 1 2 --out runs/learning
    python benchmarks/learning.py --chart "mapreader, 5 rooms" docs/images/mapreader.svg mapreader-grpo mapreader-gigpo

The first form trains (a run that is already finished is not repeated) and prints a table in Markdown; with `--chart`
it also draws training success over steps, one colour for each recipe and one line for each seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf.evaluation.figures import Series, line_chart, smooth
from rlhf.sinks import read_metrics


def run(recipe: str, seed: int, out: Path, overrides: list[str]) -> dict[str, Any]:
    """Train `recipe` with `seed` unless that is done already; returns the last line of its output."""
    folder = out / f"{recipe}-seed{seed}"
    result = folder.with_suffix(".json")
    if not result.is_file():
        command = ["train", recipe, f"seed={seed}", *overrides, "--out", str(folder), "--json"]
        if folder.is_dir():
            command = ["train", recipe, f"seed={seed}", *overrides, "--resume", str(folder), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "rlhf.cli", *command], stdout=subprocess.PIPE, text=True, check=True
        )
        result.write_text(done.stdout.splitlines()[-1])
    return dict(json.loads(result.read_text()))


def curve(folder: Path, label: str) -> Series:
    """Smoothed training success of the policy-gradient stage."""
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "rollout/success" in line.values]
    return Series(label, [line.step for line in lines], smooth([line.values["rollout/success"] for line in lines], 5))


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
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    print("| recipe | seed | success before | success after | episodes | training, s |\n|---|---|---|---|---|---|")
    curves = []
    for recipe in settings.recipes:
        for seed in settings.seeds:
            print(row(recipe, seed, run(recipe, seed, settings.out, settings.set)), flush=True)
            curves.append(curve(settings.out / f"{recipe}-seed{seed}", recipe))
    if settings.chart:
        title, file = settings.chart
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        chart = line_chart(curves, title, "step", "success in training", percent=True, y_range=(0, 1), width=720)
        Path(file).write_text(chart)


if __name__ == "__main__":
    main()
