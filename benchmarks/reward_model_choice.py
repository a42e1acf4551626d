"""Answers that a reward model prefers to questions of `recipes/largest`, whoever might give them: right or not.

    rlhf train largest-reward-model
    python benchmarks/reward_model_choice.py runs/largest-reward-model-seed0

Held-out pairs say how often a model is right about what a policy has said. Here it is asked about each of the ten
digits as the answer, and about the three that stand in the question. One that knows nothing is right in 10% and 33%.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rewards.models.model_folder import load as load_model
from rewards.models.reward_model import RewardModelScore
from rlhf.data import Message, Role, Task
from rlhf.evaluation.statistics import success_estimate
from rlhf.recipe import load
from rlhf.rollout.renderer import Renderer


def preferred(task: Task, run: Path, renderer: Renderer) -> list[float]:
    """Score of each of the ten digits as the answer."""
    reward = RewardModelScore(path=str(run))
    prompt = renderer.prompt([Message(Role.USER, str(task.info["prompt"]))]).token_ids
    rows = [(prompt + renderer.encode_reply(str(digit)), ()) for digit in range(10)]
    return [value for [value] in reward.read(load_model(reward.path)[0], rows)]


def main() -> None:
    """Print both shares of each split, with 95% intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    print("| run | split | right of ten digits | right of the three | questions |")
    print("|---|---|---|---|---|")
    for run in parser.parse_args().runs:
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


if __name__ == "__main__":
    main()
