"""Learning with `staleness` of 0, 1 and 4, at equal samples.

    python benchmarks/asynchrony_learning.py --out runs/asynchrony    # five seeds of four arms; goes on where it was

A model of 0.2 million parameters learns TextWorldExpress' simonsays, three commands in four actions. A start for each
seed imitates demonstrations of which two actions in five are random; from its checkpoint all arms of the seed train
with GRPO, on the same tasks in the same order. The arms are `staleness` 0, 1 and 4 with the default correction, and 4
with every weight 1 within 1e-6. `weight_update: deterministic` makes tokens exactly as old as the bound allows,
whatever else the machine does; with `--weight-update immediate` the clock says how old they are.

The splits of the package share no fruit and no gesture, so tasks are games of its split `train`: 700 to train on, 50 to
watch, 250 unseen ones to test, of which 3 ask for what one that is trained on does. Prints success before and after on
the test tasks, and the mean over the curve, which has a point before, one after every tenth step on the watched tasks,
and one after all; then of each arm the mean over seeds of its difference to `staleness: 0`, paired by seed, with a 95%
interval by Student's t.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from learning import run

from rlhf.evaluation.statistics import mean_interval
from rlhf.sinks import read_metrics

STEPS = 40
#: Keys of `asynchrony`, and of the stage.
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "s0": ({}, {}),
    "s1": ({"staleness": 1}, {}),
    "s4": ({"staleness": 4}, {}),
    "s4-uncorrected": (
        {"staleness": 4},
        {"correction": {"kind": "clipped", "min_weight": 1.0, "max_weight": 1.000001}},
    ),
}

#: Splits whose words are the same.
PARTS = '''
from pydantic.dataclasses import dataclass

from environments.contrib.textworld_express.environment import TextWorldExpress
from rlhf.settings import STRICT

PARTS = {"train": slice(0, 700), "dev": slice(700, 750), "test": slice(750, 1000)}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SameWords(TextWorldExpress):
    """The package's games of `train`, in three parts."""

    def tasks(self, split):
        return super().tasks("train")[PARTS[split]]
'''

WORLD: dict[str, Any] = {
    "environment": {
        "kind": "./parts.py:SameWords",
        "game": "simonsays",
        "params": {"gameLength": 3},
        "max_steps": 4,
    },
    "agent": {"kind": "chat", "system": ""},
    "rewards": {"score": {"kind": "environment"}},
    "limits": {"max_turns": 4, "max_tokens": 8, "max_concurrent": 128},
}


def start() -> dict[str, Any]:
    """The recipe of a start: imitation of noisy demonstrations."""
    stage = {
        "kind": "supervised",
        "n_demonstrations": 700,
        "random_share": 0.4,
        "observation_weight": 0.2,
        "epochs": 20,
        "batch_size": 16,
        "optimizer": {"lr": 5.0e-3, "schedule": "cosine", "warmup_steps": 10},
    }
    policy = {"kind": "from_scratch", "hidden_size": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 512}
    policy["max_context"] = 256
    return {"name": "start", "policy": policy, **WORLD, "evaluation": {"n_tasks": 250}, "stages": [stage]}


def recipe(arm: str, policy: Path, steps: int, weight_update: str) -> dict[str, Any]:
    """The recipe of an arm, from the checkpoint of a start."""
    asynchrony, keys = ARMS[arm]
    stage = {
        "kind": "policy_gradient",
        "steps": steps,
        "tasks_per_step": 8,
        "group_size": 8,
        "minibatches": 2,
        "evaluate_every": 10,
        "checkpoint_every": 10,
        "optimizer": {"lr": 1.0e-3, "schedule": "linear"},
        **keys,
    }
    return {
        "name": arm,
        "policy": {"kind": "pretrained", "path": str(policy.resolve())},
        **WORLD,
        "evaluation": {"n_tasks": 250, "validation_split": "dev", "validation_n_tasks": 50},
        "asynchrony": {**asynchrony, "weight_update": weight_update} if asynchrony else {},
        "stages": [stage],
    }


def over_curve(folder: Path) -> float:
    """Mean of the success in all evaluations: the area under the curve."""
    lines = read_metrics(folder / "metrics.jsonl")
    return mean(value for line in lines if (value := line.values.get("eval/success")) is not None)


def paired(differences: list[float]) -> dict[str, float]:
    """Mean and half-width of its 95% interval."""
    found = mean_interval(differences)
    return {"mean": found.value, "half_width": found.high - found.value, "n_seeds": found.n}


def to_s0(found: dict[str, dict[int, float]]) -> dict[str, dict[str, float]]:
    """Of each arm the difference to `s0`, over the seeds that both have."""
    both = {arm: [found[arm][s] - found["s0"][s] for s in found[arm] if s in found["s0"]] for arm in found}
    return {arm: paired(values) for arm, values in both.items() if arm != "s0" and values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/asynchrony"))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--weight-update", choices=["deterministic", "immediate"], default="deterministic")
    parser.add_argument("--table", action="store_true", help="train nothing: print what is there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "parts.py").write_text(PARTS)
    after: dict[str, dict[int, float]] = {arm: {} for arm in args.arms}
    curve: dict[str, dict[int, float]] = {arm: {} for arm in args.arms}
    before: dict[int, float] = {}
    varied = "-immediate" * (args.weight_update == "immediate") + f"-{args.steps}-steps" * (args.steps != STEPS)
    for seed in args.seeds:
        begin = args.out / f"start-seed{seed}"
        if not args.table:
            run(start(), seed, begin)
        for arm in args.arms:
            folder = args.out / f"{arm}{varied}-seed{seed}"
            if args.table and not folder.with_suffix(".json").is_file():
                continue
            *_, newest = sorted(begin.glob("checkpoints/*/policy"))
            result = run(recipe(arm, newest, args.steps, args.weight_update), seed, folder)
            before[seed], after[arm][seed], curve[arm][seed] = (
                result["success_before"],
                result["success_after"],
                over_curve(folder),
            )
            print(f"{arm}, seed {seed}: {before[seed]:.1%} to {after[arm][seed]:.1%}", file=sys.stderr, flush=True)
    print(json.dumps({"before": before, "after": after, "over the curve": curve}, indent=1))
    print(json.dumps({"after, to s0": to_s0(after), "over the curve, to s0": to_s0(curve)}, indent=1))


if __name__ == "__main__":
    main()
