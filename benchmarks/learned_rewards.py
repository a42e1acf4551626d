"""Reward models trained on a policy's own attempts, and GRPO against each: what they get right, and what it comes to.

    python benchmarks/learned_rewards.py --seeds 0 1 2 --out runs/learned_rewards

Two words have to be said one after the other; the first mistake ends the episode. In each seed a policy is shown a
little, then its attempts train a model of pairs, one of outcomes and one of steps, which are judged on tasks of their
own. GRPO then learns from the same policy against each of them, and against the environment's own word; what is
measured is always that word, on unseen tasks.

    rlhf train largest-reward-model
    python benchmarks/learned_rewards.py --choice runs/largest-reward-model-seed0

With `--choice`, answers that reward models of `recipes/largest` prefer, whoever might give them: right among the ten
digits, and among the three of the question. One that knows nothing is right in 10% and 33%.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from environments.base import Properties, StepResult
from rewards.models.model_folder import load as load_model
from rewards.models.reward_model import RewardModelScore
from rlhf.build.train import train
from rlhf.data import Message, Role, Task
from rlhf.evaluation.statistics import success_estimate
from rlhf.recipe import load
from rlhf.rollout.renderer import Renderer
from rlhf.training.checkpoints.store import latest

WORDS, N_WORDS, STEPS = ("red", "green", "blue", "white"), 2, 8
_FIRST_SEED = {"train": 0, "test": 2000}
LR = {"lr": 3.0e-3, "schedule": "linear"}
TREE = {"kind": "tree", "branches_per_round": 1, "continuations": 2}

#: What each model learns from, and the reward that asks it.
MODELS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "pairs": ({"pairs": {"tasks": 200, "group_size": 8}, "epochs": 12}, "reward_model"),
    "outcome": ({"objective": "outcome", "pairs": {"tasks": 128, "group_size": 9}, "epochs": 6}, "outcome_model"),
    "steps": (
        {"objective": "process", "pairs": {"tasks": 128, "group_size": 9}, "epochs": 6, "rollout": TREE, "eta": 0.0},
        "process_model",
    ),
}


@dataclass(frozen=True)
class Pair:
    """Say the two words that are shown, one in each turn."""

    properties = Properties(deterministic=True, replayable=True, thread_safe=True, inline=True, oracle=True)

    def tasks(self, split: str) -> list[Task]:
        """200 of each split."""
        return [Task(f"pair/{seed}", seed=seed) for seed in range(_FIRST_SEED[split], _FIRST_SEED[split] + 200)]

    def start(self, task: Task) -> PairEpisode:
        """Begin one attempt."""
        return PairEpisode(_words(task))

    def plan(self, task: Task, taken: Sequence[str]) -> Sequence[str] | None:
        """Give the words that are left."""
        words = _words(task)
        return words[len(taken) :] if list(taken) == words[: len(taken)] else None


class PairEpisode:
    """One attempt."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.n_said = words, 0
        self.opening = self._told()

    def _told(self) -> StepResult:
        return StepResult(f"Say {self.words[self.n_said]}.", admissible_actions=WORDS)

    async def step(self, action: str) -> StepResult:
        """Hear a word."""
        right = action == self.words[self.n_said]
        self.n_said += 1
        if right and self.n_said < len(self.words):
            return self._told()
        return StepResult("The end.", float(right), True, success=right, valid=action in WORDS)

    async def close(self) -> None:
        """Nothing is held open."""


def _words(task: Task) -> list[str]:
    return random.Random(task.seed).choices(WORDS, k=N_WORDS)


def recipe(seed: int, stages: list[dict[str, Any]], rewards: dict[str, Any], policy: str = "") -> dict[str, Any]:
    """From scratch, or from a policy in a folder."""
    shape = {"hidden_size": 32, "n_layers": 2, "n_heads": 2, "head_dim": 16, "max_context": 128, "vocab_size": 400}
    fresh = {"kind": "from_scratch", **shape, "initializer_range": 0.1}
    return {
        "name": "learned-rewards",
        "seed": seed,
        "policy": {"kind": "pretrained", "path": policy} if policy else fresh,
        "environment": {"kind": f"{Path(__file__).resolve()}:Pair"},
        "agent": {"kind": "chat", "system": ""},
        "rewards": rewards,
        "limits": {"max_turns": N_WORDS + 1, "max_tokens": 6},
        "evaluation": {"n_tasks": 200},
        "stages": stages,
    }


def run(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, unless that was done before; returns what is in its result.json."""
    if not (folder / "result.json").is_file():
        path = folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        train(load(path), folder)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def percent(found: Mapping[str, float], name: str) -> str:
    """A share with its interval."""
    return f"{found[name]:.0%} ({found['low']:.0%} to {found['high']:.0%})"


def preferred(task: Task, run: Path, renderer: Renderer) -> list[float]:
    """Score of each of the ten digits as the answer."""
    reward = RewardModelScore(path=str(run))
    prompt = renderer.prompt([Message(Role.USER, str(task.info["prompt"]))]).token_ids
    rows = [(prompt + renderer.encode_reply(str(digit)), ()) for digit in range(10)]
    return [value for [value] in reward.read(load_model(reward.path)[0], rows)]


def print_choices(runs: Sequence[Path]) -> None:
    """Print both shares of each split, with 95% intervals."""
    print("| run | split | right of ten digits | right of the three | questions |")
    print("|---|---|---|---|---|")
    for run in runs:
        [folder] = (run / "reward_model").iterdir()
        recipe, renderer = load(str(run / "recipe.yaml")), Renderer(load_model(str(folder))[1])
        for split in ("train", "test"):
            tasks = list(recipe.environment.tasks(split))[:200]
            found = [preferred(task, folder, renderer) for task in tasks]
            cells = []
            for digits_of in (lambda task: range(10), lambda task: map(int, task.info["prompt"].split()[2:])):
                best = [max(digits_of(t), key=values.__getitem__) for t, values in zip(tasks, found, strict=True)]
                right = [digit == int(task.reference or -1) for digit, task in zip(best, tasks, strict=True)]
                share = success_estimate(right, [task.id for task in tasks])
                cells.append(f"{share.value:.0%} ({share.low:.0%} to {share.high:.0%})")
            print(f"| {run.name} | {split} | {cells[0]} | {cells[1]} | {len(tasks)} |")


def main() -> None:
    """Print a table in Markdown, and keep a chart of each model of the first seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/learned_rewards"))
    parser.add_argument("--choice", type=Path, nargs="+", metavar="RUN", help="runs of largest-reward-model")
    given = parser.parse_args()
    if given.choice:
        return print_choices(given.choice)
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    outcome = {"solved": {"kind": "outcome"}}
    start = {"kind": "supervised", "n_demonstrations": 256, "random_share": 0.5, "epochs": 12, "batch_size": 16}
    print("| seed | GRPO against | right on held-out pairs | off in how sure | success before | success after |")
    print("|---|---|---|---|---|---|")
    for seed in given.seeds:
        models = [{"kind": "reward_model", "batch_size": 16, "optimizer": LR, **keys} for keys, _ in MODELS.values()]
        first = given.out / f"models-{seed}"
        run(recipe(seed, [start | {"optimizer": {"lr": 5.0e-3}}, *models], outcome), first)
        found = latest(first / "checkpoints")
        assert found is not None
        rewards = {"environment": outcome}
        for number, (name, (_, kind)) in enumerate(MODELS.items(), start=1):
            rewards[name] = {"learned": {"kind": kind, "path": str(first / "reward_model" / f"{number}-reward_model")}}
        for name, reward in rewards.items():
            stage = {"kind": "policy_gradient", "steps": STEPS, "tasks_per_step": 8, "group_size": 8, "optimizer": LR}
            done = run(recipe(seed, [stage], reward, str(found / "policy")), given.out / f"{name}-{seed}")
            kept = Path(reward["learned"]["path"]) / "held_out.json" if "learned" in reward else None
            cells = ["", ""]
            if kept is not None:
                judged = json.loads(kept.read_text())
                ends = {"low": judged["accuracy_low"], "high": judged["accuracy_high"]}
                off = sum(b["n"] * abs(b["said"] - b["share"]) for b in judged["bins"]) / judged["n"]
                cells = [percent({"value": judged["accuracy"], **ends}, "value"), f"{off:.1%}"]
            points = [value for value in done.values() if isinstance(value, dict) and "success" in value]
            ends = [percent(point, "success") for point in points]
            print(f"| {seed} | `{name}` | {' | '.join(cells)} | {ends[0]} | {ends[-1]} |", flush=True)


if __name__ == "__main__":
    main()
