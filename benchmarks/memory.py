"""Success and longest prompt of each agent memory, before and after training.

    OMP_NUM_THREADS=1 python benchmarks/memory.py                           # five memories, two tasks, three seeds
    python benchmarks/memory.py --tasks chain --memories full constant --seeds 0
    python benchmarks/memory.py --page docs/memory.md                       # and write the tables into the page

`chain` is learnt with two look-ups in an episode and judged on two and on sixteen, all of them unseen; `story` says
where people are, moves one on, and asks two turns later. A model is made from scratch for each memory, task and seed.
It imitates demonstrations, in which the memory holds what is worth keeping, and plays a few steps of GRPO;
`untrained` is the same model before its first update.

Everything lies in --out. What is there is not made again, and what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from pages import write_between

from rlhf.build.evaluate import evaluate
from rlhf.build.train import train
from rlhf.commands.evaluate import recipe_and_checkpoint
from rlhf.evaluation.store import read_trajectories
from rlhf.recipe import load
from rlhf.recipe.evaluation_request import EvaluationRequest

MARKS = "<!-- memory: written by benchmarks/memory.py -->", "<!-- end of memory -->"
#: The checkpoint before the first update of a run.
FIRST = Path("checkpoints") / "0-supervised-000000"
WHEN = ("untrained", "trained")
#: Tasks of each part: who has learnt nothing fails in all of them, and takes every turn to do so.
N_TASKS = {"untrained": 10, "trained": 100}
SHAPE = {"hidden_size": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 512, "max_context": 2048}

MEMORIES: Mapping[str, Mapping[str, Any]] = {
    "full": {"memory": {"kind": "full"}},
    "window": {"memory": {"kind": "window", "turns": 2}},
    "summary": {"memory": {"kind": "summary", "every": 3}},
    "constant": {"memory": {"kind": "constant"}, "think": "require"},
    "subgoals": {"memory": {"kind": "subgoals"}},
}


@dataclass(frozen=True)
class Setting:
    """A task to learn, and the parts that it is judged on, by name."""

    environment: Mapping[str, Any]
    parts: Mapping[str, Mapping[str, Any]]
    max_turns: int


_CHAIN = {"kind": "objectives", "n_people": 6, "n_train": 8000}
_STORY = {
    "kind": "long_memory",
    "abilities": ["retrieval", "conflict"],
    "n_questions": 2,
    "n_facts": 3,
    "n_changes": 1,
    "n_places": 3,
    "distance": 2,
    "n_train": 8000,
}
TASKS: Mapping[str, Setting] = {
    "chain": Setting(_CHAIN | {"k": 2}, {"objectives-2": _CHAIN | {"k": 2}, "objectives-16": _CHAIN | {"k": 16}}, 8),
    "story": Setting(_STORY, {"story": _STORY}, 8),
}


def recipe(task: str, memory: str, seed: int) -> dict[str, Any]:
    """The recipe of one run."""
    lr = {"schedule": "cosine", "warmup_steps": 40}
    return {
        "name": f"memory-{task}-{memory}",
        "seed": seed,
        "policy": {"kind": "from_scratch", **SHAPE},
        "environment": dict(TASKS[task].environment),
        "agent": {"kind": "chat", "system": "", **MEMORIES[memory]},
        "rewards": {"score": {"kind": "environment"}},
        "limits": {"max_turns": TASKS[task].max_turns, "max_tokens": 48, "max_concurrent": 128},
        "evaluation": {"n_tasks": 20},
        "stages": [
            {
                "kind": "supervised",
                "n_demonstrations": 3000,
                "observation_weight": 0.1,
                "epochs": 4,
                "batch_size": 16,
                "optimizer": {"lr": 3.0e-3, **lr},
            },
            {
                "kind": "policy_gradient",
                "steps": 15,
                "tasks_per_step": 8,
                "group_size": 8,
                "advantage": {"kind": "grpo"},
                "optimizer": {"lr": 5.0e-4, "schedule": "linear"},
            },
        ],
    }


def suite(task: str, path: Path) -> Path:
    """Write the suite that a task is judged by, of unseen tasks."""
    parts = {
        name: {"environment": dict(values), "limits": {"max_turns": 4 * int(values.get("k", 2))}}
        for name, values in TASKS[task].parts.items()
    }
    said = {
        "rewards": {"score": {"kind": "environment"}},
        "limits": {"max_tokens": 48, "max_concurrent": 64},
        "tasks": {"split": "test", "n": max(N_TASKS.values())},
        "parts": parts,
    }
    path.write_text(yaml.safe_dump(said, sort_keys=False))
    return path


def measure(task: str, memory: str, seed: int, out: Path) -> None:
    """Train and evaluate, as far as that is not done."""
    name = f"{task}-{memory}-{seed}"
    run = out / f"{name}-run"
    if not (run / "result.json").is_file():
        path = out / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe(task, memory, seed), sort_keys=False))
        train(load(path), run, resume=run if (run / "recipe.yaml").is_file() else None)
    judged = suite(task, out / f"{task}-suite.yaml")
    for when in WHEN:
        folder = out / f"{name}-{when}"
        if not (folder / "summary.json").is_file():
            target, checkpoint = recipe_and_checkpoint(str(run / FIRST if when == "untrained" else run), None)
            asked = EvaluationRequest(target=target, checkpoint=str(checkpoint), suite=str(judged), n=N_TASKS[when])
            evaluate(asked, out=folder)


@dataclass(frozen=True)
class Figures:
    """Of one part in one evaluation: mean score, share of episodes solved, and tokens of each one's longest prompt."""

    score: float
    solved: float
    longest: Sequence[int]


def figures(folder: Path, part: str) -> Figures:
    """Read an evaluation."""
    found = json.loads((folder / "summary.json").read_text())["parts"][part]
    records = read_trajectories(folder / "trajectories", stage=part)
    longest = [max(len(call.prompt.token_ids) for call in record.trajectory.generations) for record in records]
    return Figures(found["score"]["value"], found["success"]["value"], longest)


def table(task: str, memories: Sequence[str], seeds: Sequence[int], out: Path) -> str:
    """One row for each memory and part: means over the seeds, with the least and the greatest."""
    lines = [
        "| judged on | memory | seeds | score untrained | score trained | solved trained | longest prompt, tokens |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for part in TASKS[task].parts:
        for memory in memories:
            folders = [out / f"{task}-{memory}-{seed}" for seed in seeds]
            there = [f for f in folders if all((Path(f"{f}-{w}") / "summary.json").is_file() for w in WHEN)]
            if there:
                lines.append(row(part, memory, *([figures(Path(f"{f}-{w}"), part) for f in there] for w in WHEN)))
    return "\n".join(lines)


def row(part: str, memory: str, before: Sequence[Figures], after: Sequence[Figures]) -> str:
    """A row, of the figures of each seed."""
    cells = [part, f"`{memory}`", str(len(after))]
    cells += [spread([one.score for one in seeds]) for seeds in (before, after)]
    cells += [spread([one.solved for one in after])]
    longest = [tokens for one in after for tokens in one.longest]
    cells += [f"{statistics.median(longest):.0f} ({max(longest)})"]
    return f"| {' | '.join(cells)} |"


def spread(shares: Sequence[float]) -> str:
    """The mean of the seeds, with the least and the greatest where there are several."""
    spoken = f" ({min(shares):.0%} to {max(shares):.0%})" if len(shares) > 1 else ""
    return f"{statistics.fmean(shares):.0%}{spoken}"


def main() -> None:
    """Measure what is asked for, and print what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--memories", nargs="+", default=list(MEMORIES), choices=list(MEMORIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs") / "memory")
    parser.add_argument("--page", type=Path, help=f"write the tables after the line {MARKS[0]} of this page")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    for seed in asked.seeds:
        for task in asked.tasks:
            for memory in asked.memories:
                measure(task, memory, seed, asked.out)
                print(f"{task} {memory} {seed}: done", file=sys.stderr, flush=True)
    shown = "\n\n".join(table(task, list(MEMORIES), asked.seeds, asked.out) for task in TASKS)
    print(shown)
    if asked.page is not None:
        write_between(asked.page, MARKS, f"{shown}\n")


if __name__ == "__main__":
    main()
