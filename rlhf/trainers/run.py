"""A live run: the parts a recipe built, and what is done with them between stages."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from rlhf.data import Credit, PolicyWeights, ScoredGroup
from rlhf.errors import RlhfError
from rlhf.metrics import Metrics
from rlhf.rollout.collect import Collector
from rlhf.rollout.fingerprint import fingerprint
from rlhf.trainers import checkpoint
from rlhf.trainers.checkpoint import State
from rlhf.trainers.policy import Policy


class Progress(Protocol):
    """Shows a person what is going on."""

    def stage(self, name: str, total: int, done: int) -> None:
        """A stage of `total` steps begins or goes on."""
        ...

    def advance(self, note: str) -> None:
        """One step is done; `note` says how it went."""
        ...

    def note(self, text: str) -> None:
        """What is waited for now."""
        ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...


class Interrupted(RlhfError):
    """The run was stopped by its user; everything up to the last finished step is saved."""


#: Keeps the trajectories of one step: (stage, step, phase, groups, credits).
RecordGroups = Callable[[str, int, str, Sequence[ScoredGroup], Sequence[Credit | None] | None], object]


@dataclass
class Run:
    """Everything a stage needs.

    Attributes:
        folder: where everything is written.
        policy: shared by trainer and engine.
        collector: turns tasks into scored groups with the policy's engine.
        evaluate: measures the policy on unseen tasks; takes a name for the result and whether it is the full set.
        demonstrations: played beforehand for each supervised stage, by its index.
        state: where the run stands; replaced, never changed.
    """

    folder: Path
    seed: int
    policy: Policy
    collector: Collector
    metrics: Metrics
    record: RecordGroups
    evaluate: Callable[[str, bool], Awaitable[Any]]
    progress: Progress
    state: State
    demonstrations: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    _clock: float = field(default_factory=time.perf_counter)

    @property
    def checkpoints(self) -> Path:
        """Folder of all checkpoints."""
        return self.folder / "checkpoints"

    def reseed(self, step: int) -> None:
        """Make dropout and every other draw of torch a function of (seed, stage, step)."""
        torch.manual_seed((self.seed * 1_000_003 + self.state.stage) * 1_000_003 + step)

    async def deliver(self) -> None:
        """Hand the policy's present weights to the engine under a new version."""
        self.policy.version += 1
        await self.collector.engine.load(PolicyWeights(self.policy.version, fingerprint(self.policy.model)))

    def advance(self, **changes: Any) -> None:
        """Move the state on, the time since the last call included."""
        now = time.perf_counter()
        spent, self._clock = now - self._clock, now
        self.state = replace(
            self.state, train_s=self.state.train_s + spent, policy_version=self.policy.version, **changes
        )

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """What happens inside does not count as training time."""
        self.advance()
        try:
            yield
        finally:
            self._clock = time.perf_counter()

    def save(self, optimizer: torch.optim.Optimizer | None) -> Path:
        """Write a checkpoint of the present state."""
        self.advance()
        return checkpoint.save(self.checkpoints, self.state, self.policy, optimizer)

    async def measure(self, name: str, *, full: bool = True) -> None:
        """Evaluate, log, and keep the full results under `name`."""
        with self.off_the_clock():
            self.progress.note(f"evaluating ({name})")
            result = await self.evaluate(name, full)
            self.metrics.log(self.state.step, self.state.label, result.metrics)
            if full:
                self.state = replace(self.state, results={**self.state.results, name: result.record})
                self.progress.say(
                    f"{name}: success {result.success:.1%} on {result.n} unseen tasks, "
                    f"95% interval {result.low:.1%} to {result.high:.1%}"
                )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line of metrics for the present stage."""
        memory = psutil.Process().memory_info().rss / 1e9
        self.metrics.log(step, self.state.label, {**values, "memory/rss_gb": memory})
