"""Worlds that are drawn by seed: chance, the oracle, and the base model: as it comes, after imitation, and after play.

    OMP_NUM_THREADS=1 python benchmarks/worlds.py                     # all, one seed
    python benchmarks/worlds.py routing arc --seeds 0 1 2 --n 200

Every arm plays the same unseen tasks of `test`, which neither the base nor the demonstrations have. An evaluation is
kept under --out and not made again. `ml_task` has no demonstrations that could be learnt, since its oracle prints what
is hidden: programs that learn from the table (one nearest neighbour, or always 0) take their place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from proof import trained

from rlhf.build.evaluate import evaluate
from rlhf.recipe.evaluation_request import EvaluationRequest


@dataclass(frozen=True)
class World:
    """A world, and how its small model is trained.

    Attributes:
        environment: its keys.
        max_tokens: of a reply.
        agent: keys of the chat agent beside those of all.
    """

    environment: Mapping[str, Any]
    max_tokens: int = 24
    agent: Mapping[str, Any] = field(default_factory=dict)


ARMS = ("random", "oracle", "untrained", "imitated", "played")
WORLDS: Mapping[str, World] = {
    "table_questions": World({"kind": "table_questions"}),
    "hierarchy": World({"kind": "hierarchy"}, 32),
    "routing": World({"kind": "routing"}),
    "arc": World({"kind": "arc"}),
    "repair": World({"kind": "repair"}, 64),
    "colleague": World({"kind": "colleague"}, 48),
    "guess_my_city": World({"kind": "guess_my_city"}),
    "ml_task": World({"kind": "ml_task"}, 400, agent={"format": "text"}),
}
IMITATION: Mapping[str, Any] = {
    "kind": "supervised", "n_demonstrations": 800, "epochs": 2, "batch_size": 8, "checkpoint_every": 0,
    "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 10},
}  # fmt: skip
PLAY: Mapping[str, Any] = {
    "kind": "policy_gradient", "steps": 30, "tasks_per_step": 8, "group_size": 8, "checkpoint_every": 0,
    "advantage": {"kind": "grpo"}, "optimizer": {"lr": 3e-4, "schedule": "linear"},
}  # fmt: skip
_NEIGHBOUR = """\
```python
import csv
train = [[float(x) for x in r] for r in list(csv.reader(open('train.csv')))[1:]]
for r in list(csv.reader(open('test.csv')))[1:]:
    q = [float(x) for x in r]
    print(int(min(train, key=lambda t: sum((a - b) ** 2 for a, b in zip(t, q)))[3]))
```"""
_CONSTANT = "```python\nfor line in list(open('test.csv'))[1:]:\n    print(0)\n```"


async def programs(world: World, n: int, path: Path) -> None:
    """Write chats of `ml_task` on training tasks: nine in ten with a nearest neighbour, then `submit`."""
    from environments.contrib.ml_task import MlTask

    made, rng = MlTask(**{key: value for key, value in world.environment.items() if key != "kind"}), random.Random(0)
    with path.open("w", encoding="utf-8") as out:
        for task in made.tasks("train")[:n]:
            episode = made.start(task)
            program = _NEIGHBOUR if rng.random() < 0.9 else _CONSTANT
            told = (await episode.step(program)).reply
            said = [episode.opening.reply, program, told, "submit"]
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
            out.write(json.dumps({"messages": messages}) + "\n")


def recipe_of(name: str, world: World, seed: int, out: Path, start: Path | None) -> dict[str, Any]:
    """The recipe of a stage of imitation from the base, or of play from `start`."""
    stage = dict(IMITATION if start is None else PLAY)
    if name == "ml_task" and start is None:
        path = out / "ml_task.jsonl"
        if not path.is_file():
            asyncio.run(programs(world, 300, path))
        del stage["n_demonstrations"]
        stage["data"] = {"path": str(path.resolve()), "held_out": 0}
    return {
        "name": f"worlds-{name}",
        "seed": seed,
        "policy": {"kind": "pretrained", "path": "base" if start is None else str(start.resolve())},
        "environment": dict(world.environment),
        "agent": {"kind": "chat", "system": "", **world.agent},
        "rewards": {"success": {"kind": "outcome"}},
        "limits": {"max_turns": 8, "max_tokens": world.max_tokens, "max_concurrent": 64},
        "evaluation": {"n_tasks": 8},
        "stages": [stage],
    }


def suite_of(name: str, world: World, n: int, out: Path) -> str:
    """Write a suite of the first `n` test tasks of a world, and return its path."""
    path = out / f"suite-{name}-{n}.yaml"
    agent = {"kind": "chat", "show_admissible": True, **world.agent}
    keys = {"limits": {"max_turns": 8, "max_tokens": world.max_tokens}, "tasks": {"split": "test", "n": n}}
    path.write_text(yaml.safe_dump({**keys, "agent": agent, "parts": {name: {"environment": dict(world.environment)}}}))
    return str(path)


def written(run: Path, recipe: Mapping[str, Any]) -> Path:
    """Write the recipe of a run beside its folder."""
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def cell(name: str, arm: str, seed: int, asked: argparse.Namespace) -> str:
    """Success of an arm with its interval, evaluated once."""
    world, out = WORLDS[name], asked.out
    kept = out / f"{name}-{arm}-seed{seed}-{asked.n}.json"
    if not kept.is_file():
        target, checkpoint = arm, None
        if arm not in ("random", "oracle"):
            run = out / f"{name}-seed{seed}"
            path = written(run, recipe_of(name, world, seed, out, None))
            if arm == "played":
                start = trained(path, run) / "policy"
                run = out / f"{name}-played-seed{seed}"
                path = written(run, recipe_of(name, world, seed, out, start))
            target = str(path)
            checkpoint = None if arm == "untrained" else str(trained(path, run))
        request = EvaluationRequest(target=target, checkpoint=checkpoint, suite=suite_of(name, world, asked.n, out))
        kept.write_text(json.dumps(evaluate(request, out=kept.with_suffix(""))["success"]))
    found = json.loads(kept.read_text())
    return f"{found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def main() -> None:
    """Print a row for each world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", default=list(WORLDS), help=", ".join(WORLDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--n", type=int, default=100, help="test tasks of each world")
    parser.add_argument("--out", type=Path, default=Path("runs/worlds"))
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked.out.mkdir(parents=True, exist_ok=True)
    print(f"| | {' | '.join(asked.arms)} |\n|---|{'---|' * len(asked.arms)}")
    for name in asked.worlds:
        cells = []
        for arm in asked.arms:
            seeds = asked.seeds if arm in ("imitated", "played") else asked.seeds[:1]
            cells.append("; ".join(cell(name, arm, seed, asked) for seed in seeds))
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
