"""Time saved by asynchronous rollouts, order under slow tasks, and learning by staleness.

    python benchmarks/asynchrony.py            # 20 steps; both sides wait, so that cores do not matter
    python benchmarks/asynchrony.py --steps 8 --seconds 0.3

Prints one JSON object: seconds of 20 steps with `staleness: 0` and `staleness: 1` and their ratio; for a slow tenth of
the tasks, which wait 20 times as long and say more, which groups are trained in which step; and microseconds that the
state machine takes for each of 100,000 groups.

    python benchmarks/asynchrony.py --learning --out runs/asynchrony    # five seeds of four arms; goes on where it was

With `--learning`, what age does to learning at equal samples. A small model learns TextWorldExpress' simonsays: a short
imitation, then steps of GRPO. The arms are `staleness` 0, 1 and 4 with the default correction, and 4 with every weight
1 within 1e-6. All of a seed begin with the same policy and are given the same tasks in the same order. Prints success
on unseen tasks of each run, and of each arm the mean over seeds of its difference to `staleness: 0`, paired by seed,
with a 95% interval by Student's t.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from rlhf.asynchrony.pipeline import Pipeline, Rules
from rlhf.build.train import train
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from rlhf.stats import t_quantile
from rlhf.terminal import CleanConsole

#: An environment that waits, and a loss that does.
PARTS = '''
import asyncio
import time
from dataclasses import dataclass

from pydantic.dataclasses import dataclass as settings

from environments.base import Properties, StepResult
from rlhf.data import Task
from rlhf.losses.ppo_clip import PPOClip
from rlhf.settings import STRICT


@dataclass(frozen=True)
class Waiting:
    """Each attempt waits; every tenth task waits `times` as long, in as many turns as two."""

    seconds: float = 0.5
    times: float = 1.0

    @property
    def properties(self):
        splits = ("train", "test")
        return Properties(True, True, True, inline=True, oracle=True, splits=splits, package="waiting 1", repeats=True)

    def tasks(self, split):
        first = {"train": 0, "test": 10_000}[split]
        return [Task(f"waiting/{seed}", seed=seed) for seed in range(first, first + 1000)]

    def plan(self, task, taken):
        return ["go"] * (2 - len(taken))

    def start(self, task):
        is_slow = self.times > 1 and task.seed % 10 == 0
        return Attempt(self.seconds * (self.times if is_slow else 1.0), 2 if is_slow else 1)


class Attempt:
    def __init__(self, seconds, n_turns):
        self.seconds, self.left = seconds, n_turns
        self.opening = StepResult("Go.")

    async def step(self, action):
        await asyncio.sleep(self.seconds / 2 if self.left == 2 else self.seconds)
        self.left -= 1
        return StepResult("Go.", len(action) / 8, self.left == 0, success=False)

    async def close(self):
        pass


@settings(frozen=True, kw_only=True, config=STRICT)
class WaitingLoss(PPOClip):
    """PPO, after a wait."""

    seconds: float = 0.5

    def __call__(self, inputs):
        time.sleep(self.seconds)
        return super().__call__(inputs)


def length(task, trajectory):
    return sum(len(turn.action.text) for turn in trajectory.turns) / 8
'''


def recipe(folder: Path, asynchrony: dict[str, Any], steps: int, seconds: float, times: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "parts.py").write_text(PARTS)
    loss_s = seconds if times == 1 else 0.0
    values = {
        "name": "waiting",
        "policy": {"kind": "from_scratch", "hidden_size": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 300},
        "environment": {"kind": "./parts.py:Waiting", "seconds": seconds, "times": times},
        "agent": {"kind": "chat", "system": ""},
        "rewards": {"length": {"kind": "./parts.py:length"}},
        "limits": {"max_turns": 2, "max_tokens": 8, "max_concurrent": 256},
        "evaluation": {"n_tasks": 2},
        "asynchrony": asynchrony,
        "stages": [
            {"kind": "supervised", "n_demonstrations": 2, "epochs": 1},
            {
                "kind": "policy_gradient",
                "steps": steps,
                "tasks_per_step": 4,
                "group_size": 4,
                "checkpoint_every": 0,
                "loss": {"kind": "./parts.py:WaitingLoss", "seconds": loss_s},
            },
        ],
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


def played(folder: Path, asynchrony: dict[str, Any], steps: int, seconds: float, times: float = 1.0) -> Path:
    path = recipe(folder, asynchrony, steps, seconds, times)
    with quiet():
        train(load(path), folder / "run", console=CleanConsole(file=io.StringIO()))
    return folder / "run"


def step_seconds(run: Path) -> float:
    """From the first line of the log of a step to the last, and one more step of the mean."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [line["time"] for line in lines if "time/train_s" in line]
    return (times[-1] - times[0]) * len(times) / (len(times) - 1)


def trained(run: Path) -> tuple[list[list[str]], list[list[int]]]:
    """Tasks of each step, and their lengths in turns."""
    tasks: dict[int, dict[str, int]] = {}
    for record in read_trajectories(run / "trajectories", phase="train"):
        tasks.setdefault(record.step, {})[record.task_id] = len(record.trajectory.turns)
    return [list(tasks[k]) for k in sorted(tasks)], [list(tasks[k].values()) for k in sorted(tasks)]


def overlap(folder: Path, steps: int, seconds: float) -> dict[str, float]:
    found = {s: step_seconds(played(folder / f"s{s}", {"staleness": s} if s else {}, steps, seconds)) for s in (0, 1)}
    return {"s0_s": found[0], "s1_s": found[1], "ratio": found[1] / found[0], "n_steps": steps, "of_each_s": seconds}


def order(folder: Path, steps: int, seconds: float) -> dict[str, Any]:
    """Train beside a slow tenth, in order and as groups finish."""
    plain, _ = trained(played(folder / "plain", {}, steps, 0.0, 1.0))
    in_order, _ = trained(played(folder / "in_order", {"staleness": 2}, steps, seconds, 20.0))
    first = played(folder / "first", {"staleness": 2, "order": "first_finished"}, steps, seconds, 20.0)
    tasks, lengths = trained(first)
    turns = {task: n for step, of in zip(tasks, lengths, strict=True) for task, n in zip(step, of, strict=True)}

    def mean_turns(steps: list[list[str]]) -> float:
        """Mean over k of the mean turns of what the first k steps trained."""
        means = [sum(turns[task] for step in steps[:k] for task in step) / sum(map(len, steps[:k])) for k in ends]
        return sum(means) / len(means)

    ends = range(1, len(tasks))
    return {
        "in_order_is_unchanged": in_order == plain,
        "first_finished_is_changed": tasks != plain,
        "steps_changed": sum(a != b for a, b in zip(tasks, plain, strict=True)),
        "mean_turns_trained": mean_turns(tasks),
        "mean_turns_begun": mean_turns(plain),
    }


def machine(n: int = 100_000, size: int = 32) -> dict[str, float]:
    """Microseconds of the processor for each group: begun, sampled twice, finished, trained."""
    found = {}
    for rule in ("in_order", "first_finished"):
        pipeline = Pipeline(Rules(size, n // size, 2, 2, rule))  # type: ignore[arg-type]
        pipeline.join("server", 0)
        begin = time.process_time()
        while pipeline.step < pipeline.rules.n_steps:
            if (batch := pipeline.batch()) is not None:
                pipeline.train(batch)
                pipeline.install("server", pipeline.step)
            while (ordinal := pipeline.begin("worker")) is not None:
                pipeline.sampled(ordinal, pipeline.version, 100)
                pipeline.sampled(ordinal, pipeline.version, 100)
                pipeline.finish(ordinal, {pipeline.version: 200})
        found[f"{rule}_us"] = (time.process_time() - begin) / n * 1e6
    return found


# --- learning -------------------------------------------------------------------------------------------------------

ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "s0": ({}, {}),
    "s1": ({"staleness": 1}, {}),
    "s4": ({"staleness": 4}, {}),
    "s4-uncorrected": (
        {"staleness": 4},
        {"correction": {"kind": "clipped", "min_weight": 1.0, "max_weight": 1.000001}},
    ),
}


def learning_recipe(asynchrony: dict[str, Any], keys: dict[str, Any], steps: int) -> dict[str, Any]:
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


def learnt(out: Path, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Train unless that is done; returns the last line of the output."""
    folder = out / f"{arm}-seed{seed}"
    result = folder.with_suffix(".json")
    if not result.is_file():
        path = folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(learning_recipe(*ARMS[arm], steps)))
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


def learning(args: argparse.Namespace) -> dict[str, Any]:
    """Train every arm with every seed that is not done; returns success and paired differences."""
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
    before: dict[int, float] = {}
    for seed in args.seeds:
        for arm in ARMS:
            if args.table and not (args.out / f"{arm}-seed{seed}.json").is_file():
                continue
            result = learnt(args.out, arm, seed, args.steps)
            found[arm][seed], before[seed] = result["success_after"], result["success_before"]
            print(f"{arm}, seed {seed}: {before[seed]:.1%} to {found[arm][seed]:.1%}", file=sys.stderr, flush=True)
    both = {arm: [found[arm][s] - found["s0"][s] for s in found[arm] if s in found["s0"]] for arm in ARMS}
    differences = {arm: paired(values) for arm, values in both.items() if arm != "s0" and values}
    return {"before": before, "success": found, "difference_to_s0": differences}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of the attempts and of the update of a step")
    parser.add_argument("--learning", action="store_true", help="train seeds of each arm")
    parser.add_argument("--out", type=Path, default=Path("runs/asynchrony"), help="runs of --learning")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--table", action="store_true", help="with --learning, train nothing: print what is there")
    args = parser.parse_args()
    if args.learning:
        print(json.dumps(learning(args), indent=1))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": machine(),
            "overlap": overlap(Path(folder) / "overlap", args.steps, args.seconds),
            "order": order(Path(folder) / "order", args.steps, 0.05),
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
