"""Replay: recent trajectories replace those without advantage.

A trajectory keeps the log-probs of the policy that sampled it, so the loss's ratio is that of the present policy to
that one, and its clipping holds the two together. What the correction made of engine and trainer then is kept too:
nothing of it is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, fields, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.batching.samples import Sample
from rlhf.checking import CheckContext, Problem
from rlhf.losses.policy_loss import LossNeeds, refuse_without_ratio
from rlhf.settings import STRICT
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step

#: Of a row, what is made anew when it is replayed.
_NUMBERS = ("sequence", "group")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Replay:
    """Replay of recent trajectories in steps with fewer to train on than drawn.

    A step is full with `tasks_per_step` x `group_size` trajectories. What is missing was dropped by the selection or
    the filters, mostly for want of an advantage, or failed. It is made up for with trajectories of earlier steps,
    drawn without replacement with probability |A| / Σ |A|, where |A| is the mean of a trajectory's tokens: of
    A = .2, 0, −.8 the probabilities are .2, 0 and .8. Trajectories are kept, drawn and forgotten whole, and each one
    that is replayed counts as a group of its own.

    Replayed tokens are off-policy. The ratio of the loss corrects for it as far as its clipping allows, and KL and
    entropy terms see them as if the policy had just sampled them, so `max_age` is small. Where the engine's log-probs
    are the old ones, how far it is from the trainer (`loss/sampler_*`) is not logged for steps with replayed tokens.

    Source: the selective sample buffer of Skywork R1V2, arXiv 2504.16656. Age, share and capacity are our own.
    """

    max_age: Annotated[int, Field(ge=1)] = 2
    """Maximum age of a trajectory in steps: 1 replays only those of the last step."""
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Maximum share of a full step that may be replayed."""
    capacity: Annotated[int, Field(ge=1)] = 1024
    """Buffer capacity in trajectories; the oldest are dropped first."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse losses that take no old samples, and steps that are always full."""
        stage = context.stage
        kind, traits = context.kind_of("loss", stage.loss), LossNeeds(stage.loss)
        yield from refuse_without_ratio(
            context, "replay", "what is replayed would count as if the policy had just sampled it"
        )
        if traits.needs_whole == "group":
            yield Problem(
                "this loss compares the trajectories of a group, and replayed ones have no group",
                where=context.path,
                got=f"replay with {kind}",
                expected="a loss of tokens or trajectories",
                do="use loss: {kind: ppo_clip}",
            )
        if not stage.filters.drop_zero_advantage:
            yield Problem(
                "groups without an advantage stay in the step, so replay has no places to fill",
                where=f"{context.stage_path}.filters.drop_zero_advantage",
                got="false",
                expected="true with replay",
                do="remove the key, or remove replay",
            )


@plain_dataclass(frozen=True)
class Remembered:
    """A trajectory.

    Attributes:
        step: of the stage that sampled it, counted from 0.
        rows: all it has in the layout of the stage, with the log-probs of the policy that sampled it.
    """

    step: int
    rows: tuple[Sample, ...]

    @property
    def weight(self) -> float:
        """Mean of |A| over its tokens."""
        total = sum(float(np.abs(row.advantages).sum(dtype=np.float64)) for row in self.rows)
        return total / sum(row.n_policy_tokens for row in self.rows)


@plain_dataclass
class ReplayBuffer(StageHook):
    """Buffer of trajectories to replay. Only `learn` changes it, once, when a step is finished.

    Attributes:
        settings: the recipe keys.
        n_full: trajectories of a full step.
        n_steps: steps finished.
        kept: the oldest first.
        seen: what the present step may add.
    """

    key: ClassVar[str] = "buffer"

    settings: Replay
    n_full: int
    n_steps: int = 0
    kept: list[Remembered] = field(default_factory=list)
    seen: list[Remembered] = field(default_factory=list)

    async def on_step_end(self, run: RunContext, parts: LiveStage, step: Step) -> None:
        """See `learn`."""
        self.learn()

    def extend_samples(
        self, samples: Sequence[Sample], rng: np.random.Generator
    ) -> tuple[list[Sample], dict[str, float]]:
        """Return the rows of a step with those replayed behind them, and what is logged.

        Args:
            samples: ready for the update, with the trainer's log-probs if they differ from the engine's.
            rng: draws.
        """
        self.seen = self._informative(samples)
        n_fresh = len({s.sequence for s in samples})
        most = int(self.settings.max_share * self.n_full + 1e-9)
        weights = np.array([trajectory.weight for trajectory in self.kept])
        n = max(min(self.n_full - n_fresh, most, len(weights)), 0)
        places = sorted(rng.choice(len(weights), n, replace=False, p=weights / weights.sum())) if n else []
        drawn = [self.kept[place] for place in places]
        figures = {
            "replay/n_replayed": float(n),
            "replay/n_kept": float(len(self.kept)),
            "replay/age_mean": sum(self.n_steps - t.step for t in drawn) / max(n, 1),
        }
        if not drawn:
            return list(samples), figures
        sequence, group = (max((getattr(s, name) for s in samples), default=-1) + 1 for name in _NUMBERS)
        again = [replace(s, sequence=sequence + i, group=group + i) for i, t in enumerate(drawn) for s in t.rows]
        return [_with_old(s) for s in (*samples, *again)], figures

    def learn(self) -> None:
        """Add the finished step, and drop what is too old for the next one."""
        self.n_steps += 1
        young = [t for t in (*self.kept, *self.seen) if self.n_steps - t.step <= self.settings.max_age]
        self.kept, self.seen = young[-self.settings.capacity :], []

    def state_dict(self) -> dict[str, Any]:
        """Steps and rows, as tensors."""
        kept = [{"step": t.step, "rows": [_stored(row) for row in t.rows]} for t in self.kept]
        return {"n_steps": self.n_steps, "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.n_steps = int(state["n_steps"])
        self.kept = [Remembered(int(t["step"]), tuple(_restored(row) for row in t["rows"])) for t in state["kept"]]

    def _informative(self, samples: Sequence[Sample]) -> list[Remembered]:
        """Return the trajectories that the policy wrote and that have an advantage."""
        rows: dict[int, list[Sample]] = {}
        for sample in samples:
            rows.setdefault(sample.sequence, []).append(sample)
        own = [r for r in rows.values() if not any(s.off_policy is not None and s.off_policy.any() for s in r)]
        return [Remembered(self.n_steps, tuple(r)) for r in own if any(s.advantages.any() for s in r)]


def _with_old(sample: Sample) -> Sample:
    """Row with old log-probs: the engine's, where they stand for the sampling policy's."""
    return sample if sample.old_logprobs is not None else replace(sample, old_logprobs=sample.sampler_logprobs)


def _stored(sample: Sample) -> dict[str, Any]:
    values = {f.name: getattr(sample, f.name) for f in fields(sample) if f.name not in _NUMBERS}
    arrays = {name: torch.tensor(value) for name, value in values.items() if isinstance(value, np.ndarray)}
    return {**arrays, **({"adapter": sample.adapter} if sample.adapter else {})}


def _restored(row: Mapping[str, Any]) -> Sample:
    arrays = {name: tensor.numpy() for name, tensor in row.items() if name != "adapter"}
    return Sample(**arrays, sequence=0, group=0, adapter=row.get("adapter", ""))
