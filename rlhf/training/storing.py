"""The agent's store in the steps of a stage: it takes in each one that is finished."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.spans import span
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step
from rlhf.training.hooks.memory_store import MemoryStoreHook


@dataclass(frozen=True)
class StoreHook(StageHook):
    """Writes what a finished step taught into the store of the run, which checkpoints keep themselves."""

    keeper: MemoryStoreHook

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `MemoryStoreHook.learn`."""
        with span("store"):
            seed = f"{run.seed}/{run.state.label}/{step.number}"
            step.figures |= await self.keeper.learn(step.drawn, run.collector, seed)
