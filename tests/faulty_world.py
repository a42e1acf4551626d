"""A world and a recipe made to show what a run must not hide: forgetful prompts, cut replies, stairs that may break."""

from __future__ import annotations

from pathlib import Path

WORLD = '''
from dataclasses import dataclass

from environments.base import Properties, StepResult
from rlhf.data import Task


@dataclass(frozen=True)
class Stairs:
    """Climb three steps; what is no action leaves you where you are, or raises."""

    is_fragile: bool = False
    properties = Properties(deterministic=True, replayable=True, inline=True, oracle=True)

    def tasks(self, split):
        first = {"train": 0, "test": 100}[split]
        return [Task(f"stairs/{i}", seed=i) for i in range(first, first + 40)]

    def start(self, task):
        return Climb(task.seed, self.is_fragile)

    def plan(self, task, taken):
        return ["up"] * (3 - sum(action == "up" for action in taken))


class Climb:
    def __init__(self, seed, is_fragile):
        self.seed, self.is_fragile, self.height = seed, is_fragile, 0
        self.opening = self.look(True)

    async def step(self, action):
        if self.is_fragile and action not in ("up", "wait"):
            raise RuntimeError("the stairs broke")
        self.height += action == "up"
        return self.look(action in ("up", "wait"))

    async def close(self):
        pass

    def look(self, valid):
        top = self.height == 3
        return StepResult(
            f"House {self.seed}, step {self.height}.", float(top), top, state_key=str(self.height),
            success=True if top else None, valid=valid, admissible_actions=("up", "wait"),
        )
'''

RECIPE = """\
# Forgetful on purpose, with replies that are cut on purpose: what a run must not hide.
policy: {kind: from_scratch, hidden_size: 32, n_layers: 1, n_heads: 2, vocab_size: 300, max_context: 96}
environment: {kind: ./stairs.py:Stairs}
agent: {kind: chat, system: "", memory: {kind: window, turns: 0}}
rewards: {climbed: {kind: outcome}}
limits: {max_turns: 3, max_tokens: 2}
evaluation: {n_tasks: 5}
stages:
  - {kind: supervised, n_demonstrations: 10, batch_size: 4, epochs: 2, random_share: 0.5}
  - kind: policy_gradient
    steps: 2
    tasks_per_step: 3
    group_size: 4
    layout: generation
    epochs: 2
    minibatches: 3
    filters: {drop_zero_advantage: false}
"""


def write(folder: Path) -> Path:
    """Put the world and the recipe into `folder`; returns the recipe."""
    folder.mkdir(exist_ok=True)
    (folder / "stairs.py").write_text(WORLD)
    (folder / "stairs.yaml").write_text(RECIPE)
    return folder / "stairs.yaml"
