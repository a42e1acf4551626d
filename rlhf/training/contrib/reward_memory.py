"""Stateful rewards: updates, warm-up, and state in checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rewards.contrib.episodic_memory import Episodes, remembering
from rewards.contrib.found_subgoals import SubgoalState
from rlhf.data import ScoredGroup
from rlhf.rollout.scoring import WeightedReward
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step


@dataclass
class StatefulRewards(StageHook):
    """The memories of a stage's rewards, by the paths of these in the recipe's `rewards`."""

    key: ClassVar[str] = "memories"

    of_path: dict[str, Episodes | SubgoalState] = field(default_factory=dict)

    @classmethod
    def begun(cls, rewards: Mapping[str, WeightedReward]) -> StatefulRewards:
        """Stateful rewards of a new stage, emptied of earlier stages' state."""
        plain = {name: weighted.reward for name, weighted in rewards.items()}
        memories = cls({path: reward.episodes for path, reward in remembering("", plain)})
        for memory in memories.of_path.values():
            memory.clear()
        return memories

    @asynccontextmanager
    async def rollout(self, run: RunContext) -> AsyncIterator[None]:
        """While attempts are made that are trained on: outside of this, rewards that remember say 0."""
        for memory in self.of_path.values():
            memory.is_open = True
        try:
            yield
        finally:
            for memory in self.of_path.values():
                memory.is_open = False

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `learn`."""
        step.metrics |= self.learn(step.all_groups)

    def learn(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Update on a finished step, once. Returns what is logged of it."""
        found: dict[str, float] = {}
        for path, memory in self.of_path.items():
            found |= {f"{name}/{path}": value for name, value in memory.learn(groups).items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that is remembered."""
        return {path: memory.state_dict() for path, memory in self.of_path.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for path, memory in self.of_path.items():
            memory.load_state_dict(state[path])
