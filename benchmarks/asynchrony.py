"""Time saved by asynchronous rollouts, and the order of groups under slow tasks.

    python benchmarks/asynchrony.py            # 20 steps; some two minutes
    python benchmarks/asynchrony.py --steps 8 --seconds 0.3

Prints one JSON object:

- `machine`: microseconds that the state machine takes for each of 100,000 groups;
- `overlap`: seconds of the steps with `staleness: 0` and `staleness: 1` and their ratio, where attempts wait for their
  environment, as agents do, and updates for a device, so that cores do not matter;
- `computing`: the same where both compute on a core each; `best` is what the longer of the two leaves, with `parts_s`,
  what each takes in turn. It needs two free cores, and one thread for each (OMP_NUM_THREADS=1);
- `order`: for a slow tenth of the tasks, which wait 20 times as long and say more, which groups are trained when.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlhf.asynchrony.pipeline import Pipeline, Rules
from rlhf.build.train import train
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
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


#: What takes no time to compute, and what takes a core about as long to sample from as to train.
SMALL = {"kind": "from_scratch", "hidden_size": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 300}
LARGE = SMALL | {"hidden_size": 384, "n_layers": 4, "n_heads": 6, "head_dim": 64}


def recipe(
    folder: Path, asynchrony: dict[str, Any], steps: int, seconds: float, times: float = 1.0, *, is_large: bool = False
) -> Path:
    folder.mkdir(parents=True)
    (folder / "parts.py").write_text(PARTS)
    loss_s = seconds if times == 1 else 0.0
    limits = {"max_turns": 2, "max_tokens": 64 if is_large else 8, "max_concurrent": 256}
    values = {
        "name": "waiting",
        "policy": LARGE if is_large else SMALL,
        "environment": {"kind": "./parts.py:Waiting", "seconds": seconds, "times": times},
        "agent": {"kind": "chat", "system": ""},
        "rewards": {"length": {"kind": "./parts.py:length"}},
        "limits": limits,
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
    return run(recipe(folder, asynchrony, steps, seconds, times))


def run(path: Path) -> Path:
    with quiet():
        train(load(path), path.parent / "run", console=CleanConsole(file=io.StringIO()))
    return path.parent / "run"


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The log of its steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/train_s" in line]


def step_seconds(run: Path) -> float:
    """All steps by the clock, the attempts of the first and the update of the last included."""
    first, *_, last = lines_of(run)
    return float(last["time"] - first["time"] + first["time/step_s"])


def trained(run: Path) -> tuple[list[list[str]], list[list[int]]]:
    """Tasks of each step, and their lengths in turns."""
    tasks: dict[int, dict[str, int]] = {}
    for record in read_trajectories(run / "trajectories", phase="train"):
        tasks.setdefault(record.step, {})[record.task_id] = len(record.trajectory.turns)
    return [list(tasks[k]) for k in sorted(tasks)], [list(tasks[k].values()) for k in sorted(tasks)]


def overlap(folder: Path, steps: int, seconds: float) -> dict[str, float]:
    found = {s: step_seconds(played(folder / f"s{s}", {"staleness": s} if s else {}, steps, seconds)) for s in (0, 1)}
    return {"s0_s": found[0], "s1_s": found[1], "ratio": found[1] / found[0], "n_steps": steps, "of_each_s": seconds}


def computing(folder: Path, steps: int) -> dict[str, Any]:
    """Overlap where both sides compute."""
    runs = {s: run(recipe(folder / f"s{s}", {"staleness": s} if s else {}, steps, 0.0, is_large=True)) for s in (0, 1)}
    parts = {name: sum(line[f"time/{name}_s"] for line in lines_of(runs[0])) for name in ("rollout", "train")}
    s0, s1 = step_seconds(runs[0]), step_seconds(runs[1])
    best = (s0 - min(parts.values())) / s0
    return {"s0_s": s0, "s1_s": s1, "ratio": s1 / s0, "best": best, "parts_s": parts, "n_steps": steps}


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
        "length_bias": [round(line["asynchrony/length_bias"], 3) for line in lines_of(first)],
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
            while (ordinal := pipeline.begin()) is not None:
                pipeline.sampled(ordinal, pipeline.version, 100)
                pipeline.sampled(ordinal, pipeline.version, 100)
                pipeline.finish(ordinal, {pipeline.version: 200})
        found[f"{rule}_us"] = (time.process_time() - begin) / n * 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of the attempts and of the update of a step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": machine(),
            "overlap": overlap(Path(folder) / "overlap", args.steps, args.seconds),
            "computing": computing(Path(folder) / "computing", args.steps),
            "order": order(Path(folder) / "order", args.steps, 0.05),
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
