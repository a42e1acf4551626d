"""Cost of computing advantages, in seconds and against a training step on the same data.

    OMP_NUM_THREADS=1 python benchmarks/credit_cost.py [--json] [--repeats 3] [--only grpo gae]

The data: 4,096 made-up trajectories in groups of 8, of 20 turns with 30 sampled tokens and 10 of observation each, 2.4
million sampled tokens in all. Every estimator of the catalogue computes the credit of all of it; the median over the
repeats is printed. A training step is one update (forward pass, clipped loss, backward pass, AdamW) of a random Qwen3
model of about 2 million parameters. Training on all of the data would take many minutes on one core: it trains on a
few of the trajectories, between the repeats, and scales by sampled tokens; the output says on how many. Making the data
and cutting it into rows is counted on neither side. The values of critics are made up: forward passes and training of a
critic, which GAE and its kin need, are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.batching.pack import pack_minibatches
from rlhf.batching.samples import Sample, make_samples
from rlhf.catalog import CATALOG
from rlhf.credit.estimator import AdvantageEstimator, compute_advantages
from rlhf.credit.grpo import GRPO
from rlhf.data import (
    Action,
    Finish,
    Generation,
    Outcome,
    Prompt,
    Score,
    ScoredGroup,
    Trajectory,
    Turn,
    Values,
    Verdict,
)
from rlhf.losses.ppo_clip import PPOClip
from rlhf.losses.reduction import Reduction
from rlhf.recipe.builder import build_part
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.policy.model import FromScratch

GROUP, TURNS, TOKENS, OBSERVATION, STATES, VOCABULARY = 8, 20, 30, 10, 40, 256
#: Keys that an estimator cannot do without.
NEEDED: dict[str, dict[str, Any]] = {
    "hrpo": {"reward": "steps"},
    "hicra": {"grams": [[5, 3], [8]], "plan_start_ids": [7]},
}
#: Settings that cost more than the defaults, by the name of their line.
ALSO: dict[str, dict[str, Any]] = {"gigpo, similarity 0.9": {"kind": "gigpo", "similarity": 0.9}}
WORDS = ("kitchen", "pantry", "hall", "garden", "cellar", "fridge", "table", "stove", "shelf", "apple", "key", "lamp")


def description(rng: np.random.Generator) -> str:
    """Text of a state, some 220 characters, most of them the same in every state."""
    return (
        "You are in the {}. To the north you see a {} and a {}. There is a {} on the {}. A door leads to the {} and "
        "one to the {}. You carry the {} and the {}. Your task is to bring the {} to the {} and to put it there."
    ).format(*rng.choice(WORDS, 11))


def trajectory(rng: np.random.Generator, states: Sequence[str], task: str, attempt: int) -> tuple[Trajectory, Score]:
    """A dialogue of random ids, whose prompts extend each other and whose states are some of a few."""
    sampled = rng.integers(1, VOCABULARY, (TURNS, TOKENS)).tolist()
    seen = rng.integers(1, VOCABULARY, (TURNS, OBSERVATION)).tolist()
    logprobs = tuple((-rng.exponential(1.0, TOKENS)).tolist())
    met = [states[i] for i in rng.integers(0, STATES, TURNS)]
    context: tuple[int, ...] = ()
    turns = []
    for k in range(TURNS):
        context = (*context, *seen[k])
        generation = Generation(Prompt(context, stop_ids=(0,)), tuple(sampled[k]), logprobs, Finish.STOP, 0)
        context = (*context, *sampled[k])
        turns.append(Turn(Action("act", (generation,)), "reply", state_key=met[k]))
    solved = bool(rng.random() < 0.4)
    rewards = [*(-0.1 * (rng.random(TURNS - 1) < 0.1)).tolist(), float(solved)]
    outcome = Outcome.SOLVED if solved else Outcome.TURN_LIMIT
    made = Trajectory(task, attempt, "opening", tuple(turns), outcome, duration_s=float(rng.random()))
    total = sum(rewards)
    return made, Score({"steps": Verdict(total, "", tuple(rewards))}, tuple(rewards), total)


def make_groups(n_trajectories: int) -> list[ScoredGroup]:
    rng = np.random.default_rng(0)
    groups = []
    for number in range(n_trajectories // GROUP):
        task = f"made-up/{number % 4}/{number}"
        states = [description(rng) for _ in range(STATES)]
        pairs = [trajectory(rng, states, task, attempt) for attempt in range(GROUP)]
        groups.append(ScoredGroup(task, tuple(t for t, _ in pairs), tuple(s for _, s in pairs)))
    return groups


def make_values(groups: Sequence[ScoredGroup]) -> list[Values]:
    draw = np.random.default_rng(1).random

    def values(group: ScoredGroup) -> Values:
        states, actions = (
            tuple(tuple(tuple(draw(len(g.token_ids)).tolist()) for g in t.generations) for t in group.trajectories)
            for _ in range(2)
        )
        return Values(states, tuple(0.0 if t.solved else float(draw()) for t in group.trajectories), actions)

    return [values(group) for group in groups]


def seconds(estimator: AdvantageEstimator, groups: Sequence[ScoredGroup], values: Sequence[Values]) -> float:
    begin = time.perf_counter()
    compute_advantages(estimator, groups, values)
    return time.perf_counter() - begin


class Step:
    """A training step on a few rows, and its time scaled to `n_tokens` sampled ones."""

    def __init__(self, groups: Sequence[ScoredGroup], n_tokens: int) -> None:
        shape: dict[str, Any] = {
            "hidden_size": 192,
            "intermediate_size": 512,
            "n_layers": 5,
            "n_heads": 6,
            "n_kv_heads": 6,
        }
        policy = FromScratch(**shape, vocab_size=300).build(0, ["a few words"])
        self.n_parameters = sum(p.numel() for p in policy.model.parameters())
        self.trainer = TorchTrainer(policy, AdamW(), total_updates=100)
        self.samples: list[Sample] = make_samples(groups, compute_advantages(GRPO(), groups))[0]
        self.n_trained, self.n_tokens = sum(s.n_policy_tokens for s in self.samples), n_tokens

    def seconds(self) -> float:
        begin = time.perf_counter()
        for batches in pack_minibatches(self.samples, 1, Reduction(), max_tokens=4096):
            self.trainer.update(batches, PPOClip())
        return (time.perf_counter() - begin) * self.n_tokens / self.n_trained


def measure(args: argparse.Namespace) -> dict[str, Any]:
    groups = make_groups(args.trajectories)
    values = make_values(groups)
    n_tokens = args.trajectories * TURNS * TOKENS
    step = Step(groups[: args.trained // GROUP], n_tokens)
    step.seconds()  # the first one allocates
    settings = {kind: {"kind": kind, **NEEDED.get(kind, {})} for kind in CATALOG["advantage"]} | ALSO
    made = {
        name: build_part("advantage", chosen, name, base=Path.cwd())
        for name, chosen in settings.items()
        if chosen["kind"] in (args.only or CATALOG["advantage"])
    }
    steps: list[float] = []
    found: dict[str, list[float]] = {kind: [] for kind in made}
    for _ in range(args.repeats):
        steps.append(step.seconds())
        for kind, estimator in made.items():
            found[kind].append(seconds(estimator, groups, values))
    step_s = statistics.median(steps)
    credit_s = {kind: statistics.median(times) for kind, times in found.items()}
    return {
        "n_trajectories": args.trajectories,
        "n_sampled_tokens": n_tokens,
        "n_parameters": step.n_parameters,
        "n_trained_tokens": step.n_trained,
        "trained_share": step.n_trained / n_tokens,
        "step_s": step_s,
        "credit_s": credit_s,
        "ratio": {kind: s / step_s for kind, s in credit_s.items()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--trained", type=int, default=32, help="trajectories that the training step is measured on")
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND")
    args = parser.parse_args()
    found = measure(args)
    if args.json:
        print(json.dumps(found))
        return
    print(
        f"{found['n_trajectories']:,} trajectories, {found['n_sampled_tokens']:,} sampled tokens; one training step of "
        f"{found['n_parameters']:,} parameters takes {found['step_s']:,.0f} s\n(trained on "
        f"{found['n_trained_tokens']:,} sampled tokens, {found['trained_share']:.2%} of them, and scaled); "
        f"{found['threads']} thread, load {found['load']:.1f}\n"
    )
    print(f"{'advantage':<24}{'seconds':>9}{'of the step':>13}")
    for kind, s in found["credit_s"].items():
        print(f"{kind:<24}{s:>9.2f}{found['ratio'][kind]:>13.3%}")


if __name__ == "__main__":
    main()
