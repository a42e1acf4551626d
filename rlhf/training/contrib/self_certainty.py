"""Self-certainty: a reward for how far the policy's distributions are from uniform, computed by the trainer.

It needs every token's whole distribution, which engines do not report, so it is no reward of a recipe's `rewards` but a
key of the stage: the trainer reads the attempts of a step once, before they are credited.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.batching.samples import make_samples
from rlhf.data import Credit, Score, ScoredGroup, Verdict
from rlhf.settings import STRICT
from rlhf.training.backends.token_stats import Figure
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.context import LiveStage, RunContext
from rlhf.training.hooks.base import StageHook, Step

_NAME = "self_certainty"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SelfCertainty:
    """Add `weight` times the mean over an attempt's tokens of a divergence between the policy and uniform, in nats.

    `uniform`: KL(U ‖ π) = −log V − mean_v log π(v). `policy`: KL(π ‖ U) = log V − H(π). π = (.7, .2, .1): .324287 and
    .296794. It stands on the last turn, among the parts of the score. Alone, where no reward has a weight, a policy is
    taught to be sure, which is not to be right: it learns while the two go together, so watch success.

    Sources: self-certainty, arXiv 2502.18581, as the only reward Intuitor, arXiv 2505.19590 (`uniform`); beside others
    Shop-R1, arXiv 2507.17842 (`policy`, over V, weight .005).
    """

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.005
    """Reward of a nat."""
    direction: Literal["uniform", "policy"] = "uniform"
    """Divergence: of uniform from the policy, or of the policy from uniform."""

    @property
    def figure(self) -> Figure:
        """Figure that the trainer computes."""
        return "mean_logprobs" if self.direction == "uniform" else "entropy"

    def value(self, figure: float, n_vocabulary: int) -> float:
        """Return the divergence from the mean log-prob, or the entropy, of a distribution over V tokens."""
        log_v = math.log(n_vocabulary)
        return -log_v - figure if self.direction == "uniform" else log_v - figure


@plain_dataclass
class SelfCertaintyHook(StageHook):
    """Adds self-certainty to the scores of the groups that a step trains on.

    Attributes:
        settings: the recipe keys.
        trainer: of the policy; None before the stage is opened.
    """

    settings: SelfCertainty
    trainer: TorchTrainer | None = None

    def open(self, run: RunContext, parts: LiveStage) -> None:
        """Take the trainer."""
        self.trainer = parts.trainer

    async def transform_groups(
        self, run: RunContext, step: Step, groups: Sequence[ScoredGroup]
    ) -> Sequence[ScoredGroup]:
        """Return the groups with one part more in each score."""
        assert self.trainer is not None
        means = self.means(self.trainer, groups, step.stage.temperature, step.stage.max_tokens_per_microbatch)
        step.metrics["reward/self_certainty"] = sum(means) / max(len(means), 1)
        left = iter(means)
        return [
            replace(g, scores=tuple(_scored(s, next(left), self.settings.weight) for s in g.scores)) for g in groups
        ]

    def means(
        self, trainer: TorchTrainer, groups: Sequence[ScoredGroup], temperature: float, max_tokens: int
    ) -> list[float]:
        """Return the self-certainty of each trajectory, in order; 0 for one in which nothing was sampled."""
        nothing = [
            Credit(tuple(tuple((0.0,) * g.n_tokens for g in t.generations) for t in group.trajectories))
            for group in groups
        ]
        rows, _ = make_samples(groups, nothing, "trajectory")
        found = trainer.compute_token_stats(
            rows, (self.settings.figure,), temperature=temperature, max_tokens=max_tokens
        )
        sums, counts = (np.zeros(sum(len(g.trajectories) for g in groups)) for _ in range(2))
        for row, figures in zip(rows, found[self.settings.figure], strict=True):
            sums[row.sequence] += float(figures.sum(dtype=np.float64))
            counts[row.sequence] += len(figures)
        size = int(trainer.policy.model.config.vocab_size)
        return [self.settings.value(x / n, size) if n else 0.0 for x, n in zip(sums, counts, strict=True)]


def _scored(score: Score, value: float, weight: float) -> Score:
    """Return the score with self-certainty on its last turn."""
    turns = (*score.turns[:-1], score.turns[-1] + weight * value) if score.turns else ()
    parts = {**score.parts, _NAME: Verdict(value, f"{value:.3f} nats from uniform")}
    return replace(score, parts=parts, turns=turns, total=score.total + weight * value)
