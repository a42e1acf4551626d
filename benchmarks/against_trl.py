"""GRPO here and with TRL's GRPOTrainer: lines a user writes, time to the same success, success on unseen questions.

    OMP_NUM_THREADS=1 python benchmarks/against_trl.py [--seeds 0 1 2] [--tasks thoughts answer]

Both begin with one fine-tuned checkpoint, read the same JSONL, call the same function and make the same number of steps
of 16 questions with 8 attempts each, at the same learning rate, on a CPU. Each run is a process of its own, and the two
of a seed run at the same time, on a core each, so that a busy neighbour slows both. Time is counted from the start of
the process, imports and checks included, to the step at which the mean of the last 5 steps is first the target, and to
the last step. Neither evaluates before training. TRL leaves out what it can: checkpoints, and those of gradients.

Both tasks ask for the largest of three digits. In `answer` the reply is that digit: the worst case for an engine with
work around each reply. In `thoughts` the digits are said over and over before it, as often as chance says, with a long
tail, as lengths of thoughts have: one long reply holds up whoever samples in fixed batches and pads rows. A reply of
more than 96 characters is wrong, so that replies stay as long as they were.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import median, quantiles

import rlhf

#: Questions of a step, attempts at each, and how many steps are averaged.
N_TASKS, GROUP, SMOOTH = 16, 8, 5
N_TEST = 200

OURS = """\
import rlhf
from verifier import right

grpo = {"kind": "policy_gradient", "steps": $STEPS, "optimizer": {"lr": $LR}}
rlhf.train(
    policy="model", environment={"kind": "dataset", "train": "train.jsonl", "test": "test.jsonl"}, rewards=right,
    limits={"max_tokens": $TOKENS}, evaluation={"before": False}, stages=[grpo], seed=$SEED, out="ours-$SEED",
)
"""
THEIRS = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from verifier import right

data = load_dataset("json", data_files="train.jsonl", split="train")
config = GRPOConfig(
    output_dir="theirs-$SEED", max_steps=$STEPS, num_generations=8, per_device_train_batch_size=128,
    max_completion_length=$TOKENS, learning_rate=$LR, lr_scheduler_type="constant", use_cpu=True, bf16=False,
    gradient_checkpointing=False, save_strategy="no", report_to="none", seed=$SEED,
)
trainer = GRPOTrainer(model="model", reward_funcs=right, args=config, train_dataset=data)
trainer.train()
trainer.save_model("theirs-$SEED")
"""
#: The function of both, which also notes when it was called and how many were right.
VERIFIER = """\
import json, os, time


def right(completions, answer, **kwargs):
    found = [last(said[0]["content"], wanted) for said, wanted in zip(completions, answer)]
    if len(found) >= 8:  # an evaluation asks of one attempt at a time
        note = {"at": time.time(), "cpu_s": time.process_time(), "right": sum(found), "n": len(found)}
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps(note) + "\\n")
    return found


def last(answer, reference):
    return float(answer[-1:] == reference and len(answer) <= 96)
"""
SIDES = {"ours": OURS, "theirs": THEIRS}


@dataclass(frozen=True)
class Step:
    """Time of a step since the start, by clock and processor, and its success."""

    wall_s: float
    cpu_s: float
    right: float


@dataclass(frozen=True)
class Setting:
    """Sizes of a task, and the success that both are timed to."""

    target: float
    max_tokens: int
    steps: int
    lr: float
    hidden_size: int
    n_layers: int


SETTINGS = {"thoughts": Setting(0.55, 256, 24, 3e-4, 128, 4), "answer": Setting(0.45, 4, 40, 1e-3, 64, 2)}


def rows(task: str) -> list[dict[str, str]]:
    """Questions with the whole reply and the answer that is verified."""
    chance, found = random.Random(0), []
    for three in itertools.product(range(10), repeat=3):
        n = min(int(chance.expovariate(1 / 24)), 240) if task == "thoughts" else 0
        thoughts = "".join(f"{chance.choice(three)} " for _ in range(n)) + "is " * (task == "thoughts")
        question, answer = f"largest of {three[0]} {three[1]} {three[2]}", str(max(three))
        found.append({"question": question, "reply": thoughts + answer, "answer": answer})
    chance.shuffle(found)
    return found


def prepare(task: str, folder: Path) -> None:
    """Write data and the fine-tuned checkpoint that both begin with."""
    if (folder / "model").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    given, setting = rows(task), SETTINGS[task]
    for name, part in (("test", given[:N_TEST]), ("train", given[N_TEST:])):
        prompts = [{"prompt": [{"role": "user", "content": r["question"]}], "answer": r["answer"]} for r in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    chats = [{"prompt": r["question"], "completion": r["reply"]} for r in given[N_TEST:]]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (folder / "verifier.py").write_text(VERIFIER)
    imitate = {"kind": "supervised", "data": {"path": str(folder / "chats.jsonl")}, "epochs": 4}
    policy = {"kind": "from_scratch", "hidden_size": setting.hidden_size, "n_layers": setting.n_layers, "n_heads": 4}
    run = rlhf.train(
        policy=policy | {"max_context": 512},
        environment={"kind": "dataset", "train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")},
        rewards={"right": {"kind": f"{folder / 'verifier.py'}:last"}},
        limits={"max_tokens": setting.max_tokens},
        evaluation={"n_tasks": N_TEST},
        stages=[imitate | {"batch_size": 16, "optimizer": {"lr": 2e-3}}],
        out=folder / "imitated",
    )
    command = [sys.executable, "-m", "rlhf.cli", "export", str(run.run), "--out", str(folder / "model")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def play(seed: int, task: str, folder: Path) -> dict[str, list[Step]]:
    """Run both scripts at the same time, each in a process of its own, unless that is done already."""
    running = {}
    for side, script in SIDES.items():
        notes = folder / f"{side}-{seed}.notes"
        if notes.is_file():
            continue
        setting = SETTINGS[task]
        for word, value in {
            "SEED": seed,
            "STEPS": setting.steps,
            "LR": setting.lr,
            "TOKENS": setting.max_tokens,
        }.items():
            script = script.replace(f"${word}", str(value))
        (folder / f"{side}_{seed}.py").write_text(script)
        partial = notes.with_suffix(".partial")
        partial.write_text(json.dumps({"begun": time.time()}) + "\n")
        with (folder / f"{side}-{seed}.log").open("w") as log:
            running[notes] = subprocess.Popen(
                [sys.executable, f"{side}_{seed}.py"],
                cwd=folder, env=os.environ | {"NOTES": str(partial)}, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
    for notes, process in running.items():
        if process.wait():
            raise SystemExit(f"{notes.with_suffix('.log')}: exit code {process.returncode}")
        notes.with_suffix(".partial").rename(notes)
    return {side: _steps(folder / f"{side}-{seed}.notes") for side in SIDES}


def _steps(notes: Path) -> list[Step]:
    first, *calls = map(json.loads, notes.read_text().splitlines())
    steps, n, right = [], 0, 0.0
    for call in calls:
        n, right = n + call["n"], right + call["right"]
        if n >= N_TASKS * GROUP:
            steps.append(Step(call["at"] - first["begun"], call["cpu_s"], right / n))
            n, right = 0, 0.0
    return steps


def reached(steps: list[Step], target: float) -> Step | None:
    """The step from which on the mean of the last few is at the target."""
    for i in range(SMOOTH, len(steps) + 1):
        if sum(step.right for step in steps[i - SMOOTH : i]) / SMOOTH >= target:
            return steps[i - 1]
    return None


def unseen(folder: Path, side: str, seed: int) -> str:
    """Success of the trained policy on the questions that were held out, with its 95% interval."""
    if side == "ours":  # measured by the same evaluation at the end of the run
        after = json.loads((folder / f"ours-{seed}" / "result.json").read_text())["after"]
        success, low, high = after["success"], after["low"], after["high"]
    else:
        found = rlhf.evaluate(folder / "imitated", checkpoint=folder / f"theirs-{seed}", n=N_TEST, progress=False)
        success, (low, high) = found.success, found.interval
    return f"{success:.0%} ({low:.0%} to {high:.0%})"


@dataclass(frozen=True)
class Found:
    """Seconds of a run, of the clock and of the processor; NaN where the target was never reached."""

    to_target: tuple[float, float]
    whole: tuple[float, float]
    a_step: tuple[float, float]

    @classmethod
    def of(cls, steps: list[Step], target: float) -> Found:
        """From the steps of a run."""
        there, first, last = reached(steps, target), steps[0], steps[-1]
        n = len(steps) - 1
        a_step = (last.wall_s - first.wall_s) / n, (last.cpu_s - first.cpu_s) / n
        return cls((there.wall_s, there.cpu_s) if there else (nan, nan), (last.wall_s, last.cpu_s), a_step)


#: What the table has beside lines, and where it stands in `Found`.
FIGURES = {"s to the target": "to_target", "s for the run": "whole", "s a step": "a_step"}


def spread(values: list[float]) -> str:
    """Median with its quartiles; with minimum and maximum where there are fewer than four values."""
    if not values or any(map(isnan, values)):
        return "never"
    few = [min(values), median(values), max(values)]
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 3 else few
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def tell(found: dict[str, list[Found]]) -> None:
    """Print the table: medians over the seeds with their spread, and those of the ratio of each seed."""
    print("| | ours | TRL | TRL over ours |\n|---|---|---|---|")
    n_lines = {side: sum(bool(line.strip()) for line in script.splitlines()) for side, script in SIDES.items()}
    print(f"| lines | {n_lines['ours']} | {n_lines['theirs']} | {n_lines['theirs'] / n_lines['ours']:.2f} |")
    for name, key in FIGURES.items():
        for clock, i in (("wall clock", 0), ("processor", 1)):
            ours, theirs = ([getattr(one, key)[i] for one in found[side]] for side in SIDES)
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            print(f"| {clock}, {name} | {spread(ours)} | {spread(theirs)} | {spread(ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--out", type=Path, default=Path("runs/against_trl"))
    given = parser.parse_args()
    for task in given.tasks:
        folder, target = (given.out / task).resolve(), SETTINGS[task].target
        prepare(task, folder)
        found: dict[str, list[Found]] = {side: [] for side in SIDES}
        for seed in given.seeds:
            for side, steps in play(seed, task, folder).items():
                found[side].append(Found.of(steps, target))
        print(f"{task}, to {target:.0%} of the attempts, {len(given.seeds)} seeds")
        tell(found)
        for side in SIDES:
            print(f"unseen, {side}: " + ", ".join(unseen(folder, side, seed) for seed in given.seeds), flush=True)


if __name__ == "__main__":
    main()
