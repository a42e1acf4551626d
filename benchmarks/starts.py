"""A sparse task from its beginning, and from start states along demonstrations: success on unseen tasks, seed by seed.

    python benchmarks/starts.py --seeds 0 1 2 --out runs/starts

Six words have to be said one after the other; the first mistake ends the episode, and only the last word is rewarded. A
policy that has been shown a little says about every fifth word right: from the beginning nearly nothing is ever
rewarded. All runs of a seed begin with the same policy and make the same number of episodes. A finished run is not
repeated.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.base import Properties, StepResult
from rlhf.data import Task

WORDS = ("red", "green", "blue", "white")
N_WORDS, STEPS = 6, 120
_FIRST_SEED = {"train": 0, "test": 2000}

SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "shuffled": {"kind": "shuffled"},
    "mixed": {"kind": "reverse_curriculum", "segments": N_WORDS, "n_demonstrations": 64},
    "staged": {
        "kind": "reverse_curriculum",
        "segments": N_WORDS,
        "n_demonstrations": 64,
        "schedule": "staged",
        "stage_steps": 12,
    },
    "exit": {"kind": "exploratory_iteration"},
}


@dataclass(frozen=True)
class Chain:
    """Say the words that are shown, one in each turn."""

    properties = Properties(deterministic=True, replayable=True, thread_safe=True, inline=True, oracle=True)

    def tasks(self, split: str) -> list[Task]:
        """128 of each split."""
        return [Task(f"chain/{seed}", seed=seed) for seed in range(_FIRST_SEED[split], _FIRST_SEED[split] + 128)]

    def start(self, task: Task) -> ChainEpisode:
        """Begin one attempt."""
        return ChainEpisode(_words(task))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give the words that are left."""
        words = _words(task)
        return words[len(taken) :] if list(taken) == words[: len(taken)] else None


class ChainEpisode:
    """One attempt."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.n_said = words, 0
        self.opening = StepResult(f"Say {words[0]}.")

    async def step(self, action: str) -> StepResult:
        """Hear a word."""
        right = action == self.words[self.n_said]
        self.n_said += 1
        if right and self.n_said < len(self.words):
            return StepResult(f"Say {self.words[self.n_said]}.")
        return StepResult("The end.", float(right), True, success=right, valid=action in WORDS)

    async def close(self) -> None:
        """Nothing is held open."""


def _words(task: Task) -> list[str]:
    return random.Random(task.seed).choices(WORDS, k=N_WORDS)


def recipe(sampler: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A weak beginning, then `STEPS` steps of GRPO."""
    policy = {"kind": "from_scratch", "hidden_size": 32, "n_layers": 1, "n_heads": 2, "head_dim": 16}
    lr = {"lr": 3.0e-3}
    return {
        "name": "starts",
        "seed": seed,
        "policy": policy | {"max_context": 128, "vocab_size": 400, "initializer_range": 0.1},
        "environment": {"kind": f"{Path(__file__).resolve()}:Chain"},
        "agent": {"kind": "chat", "system": ""},
        "rewards": {"solved": {"kind": "outcome"}},
        "limits": {"max_turns": N_WORDS + 1, "max_tokens": 4},
        "evaluation": {"n_tasks": 128},
        "stages": [
            {"kind": "supervised", "n_demonstrations": 64, "epochs": 3, "batch_size": 4, "optimizer": lr},
            {
                "kind": "policy_gradient",
                "steps": STEPS,
                "tasks_per_step": 8,
                "group_size": 8,
                "checkpoint_every": 0,
                "optimizer": lr,
                "sampler": dict(sampler),
            },
        ],
    }


def main() -> None:
    """Print a table in Markdown."""
    # Here, because runs load this file by its path, and find no other of this folder.
    from learned_rewards import run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/starts"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"| sampler | {' | '.join(f'seed {seed}' for seed in given.seeds)} |")
    print(f"|---|{'---|' * len(given.seeds)}")
    for name, sampler in SAMPLERS.items():
        cells = []
        for seed in given.seeds:
            done = run(recipe(sampler, seed), given.out / f"{name}-{seed}")
            cells.append(f"{done['before']['success']:.0%} to {done['after']['success']:.0%}")
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
