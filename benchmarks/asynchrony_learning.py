"""What age does to learning: playing ahead by one step and by four, beside training in turn, at equal samples.

    python benchmarks/asynchrony_learning.py --out runs/asynchrony    # five seeds of four arms; goes on where it was

A small model learns TextWorldExpress' simonsays: a short imitation, then steps of GRPO. The arms are `staleness` 0, 1
and 4 with the default correction, and 4 with every weight 1 within 1e-6. All of a seed begin with the same policy and
are given the same tasks in the same order. Prints a JSON object: success on unseen tasks of each run, and of each arm
the mean over seeds of its difference to `staleness: 0`, paired by seed, with a 95% interval by Student's t.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from rlhf.stats import t_quantile

ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "s0": ({}, {}),
    "s1": ({"staleness": 1}, {}),
    "s4": ({"staleness": 4}, {}),
    "s4-uncorrected": (
        {"staleness": 4},
        {"correction": {"kind": "clipped", "min_weight": 1.0, "max_weight": 1.000001}},
    ),
}


def recipe(asynchrony: dict[str, Any], keys: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        "name": "asynchrony-learning",
        "policy": {"kind": "from_scratch", "hidden_size": 64, "n_layers": 2, "n_heads": 4, "max_context": 1024},
        "environment": {"kind": "textworld_express", "game": "simonsays", "max_steps": 10},
        "agent": {"kind": "chat", "system": ""},
        "rewards": {"score": {"kind": "environment"}, "invalid": {"kind": "invalid_action", "penalty": 0.05}},
        "limits": {"max_turns": 10, "max_tokens": 12, "max_concurrent": 128},
        "evaluation": {"n_tasks": 100},
        "asynchrony": asynchrony,
        "stages": [
            {
                "kind": "supervised",
                "n_demonstrations": 300,
                "random_share": 0.4,
                "observation_weight": 0.5,
                "epochs": 2,
                "batch_size": 4,
                "optimizer": {"lr": 2.0e-3},
            },
            {
                "kind": "policy_gradient",
                "steps": steps,
                "tasks_per_step": 8,
                "group_size": 8,
                "minibatches": 2,
                "checkpoint_every": 5,
                "optimizer": {"lr": 5.0e-4, "schedule": "linear"},
                **keys,
            },
        ],
    }


def trained(out: Path, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Train unless that is done; returns the last line of the output."""
    folder = out / f"{arm}-seed{seed}"
    result = folder.with_suffix(".json")
    if not result.is_file():
        path = folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(recipe(*ARMS[arm], steps)))
        begin = ["--resume", str(folder)] if (folder / "recipe.yaml").is_file() else [str(path), f"seed={seed}"]
        place = [] if begin[0] == "--resume" else ["--out", str(folder)]
        line = [sys.executable, "-m", "rlhf.cli", "train", *begin, *place, "--json"]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
        result.write_text(done.stdout.splitlines()[-1])
    return dict(json.loads(result.read_text()))


def paired(differences: list[float]) -> dict[str, float]:
    """Mean and half-width of its 95% interval."""
    n = len(differences)
    half = t_quantile(0.975, n - 1) * stdev(differences) / n**0.5 if n > 1 else float("inf")
    return {"mean": mean(differences), "half_width": half, "n_seeds": n}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/asynchrony"))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--table", action="store_true", help="train nothing: print what is there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
    before: dict[int, float] = {}
    for seed in args.seeds:
        for arm in ARMS:
            if args.table and not (args.out / f"{arm}-seed{seed}.json").is_file():
                continue
            result = trained(args.out, arm, seed, args.steps)
            found[arm][seed], before[seed] = result["success_after"], result["success_before"]
            print(f"{arm}, seed {seed}: {before[seed]:.1%} to {found[arm][seed]:.1%}", file=sys.stderr, flush=True)
    both = {arm: [found[arm][s] - found["s0"][s] for s in found[arm] if s in found["s0"]] for arm in ARMS}
    differences = {arm: paired(values) for arm, values in both.items() if arm != "s0" and values}
    print(json.dumps({"before": before, "success": found, "difference_to_s0": differences}, indent=1))


if __name__ == "__main__":
    main()
