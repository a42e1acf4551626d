"""Speed of a sliding window that drops turns in blocks (memory `window` with `block`), against one turn at a time.

    OMP_NUM_THREADS=1 python benchmarks/window_block.py [--blocks 1 8] [--repeats 3]

The base model plays Sokoban with two boxes, up to 60 turns an episode, and imitates demonstrations of it. Within a
block each prompt extends the one before: the engine reads new tokens only, and one row of training holds the turns of
a block. Printed are medians over the repeats, in which the variants take turns: seconds of an evaluation per turn, and
of a supervised update.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import rlhf
from rlhf.evaluation.store import read_trajectories
from rlhf.sinks import read_metrics


def measured(block: int, seed: int, folder: Path) -> tuple[float, float]:
    """Seconds of an evaluation per turn, and of an update on 8 demonstrations."""
    recipe: dict[str, Any] = {
        "name": "window-block",
        "seed": seed,
        "policy": {"kind": "pretrained", "path": "base"},
        "environment": {"kind": "sokoban", "rows": 7, "columns": 7, "boxes": 2, "pulls": 10, "max_steps": 60},
        "agent": {"kind": "chat", "system": "", "memory": {"kind": "window", "turns": 4, "block": block}},
        "rewards": {"success": {"kind": "outcome"}},
        "limits": {"max_turns": 60, "max_tokens": 16, "max_concurrent": 32},
        "evaluation": {"n_tasks": 32, "before": False},
        "stages": [{"kind": "supervised", "n_demonstrations": 64, "epochs": 1, "batch_size": 8}],
    }
    run = rlhf.train(recipe, out=folder, progress=False).run
    lines = read_metrics(run / "metrics.jsonl")
    [eval_s] = [line.values["time/eval_s"] for line in lines if "time/eval_s" in line.values]
    n_turns = sum(len(record.trajectory.turns) for record in read_trajectories(run / "trajectories", phase="eval"))
    at = [line.time for line in lines if "supervised/loss" in line.values]
    return (eval_s or 0.0) / n_turns, (at[-1] - at[0]) / (len(at) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    found: dict[int, list[tuple[float, float]]] = {block: [] for block in asked.blocks}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(asked.repeats):
            for block in asked.blocks:
                found[block].append(measured(block, repeat, Path(folder) / f"{block}-{repeat}"))
    medians = {
        block: [statistics.median(values) for values in zip(*pairs, strict=True)] for block, pairs in found.items()
    }
    base = medians[asked.blocks[0]]
    print("| block | evaluation, ms per turn | ratio | update on 8 demonstrations, s | ratio |\n|---|---|---|---|---|")
    for block, (turn, update) in medians.items():
        print(f"| {block} | {turn * 1e3:.1f} | {base[0] / turn:.2f}x | {update:.2f} | {base[1] / update:.2f}x |")


if __name__ == "__main__":
    main()
