"""Critic of turn contributions to the score, and its recipe keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from numpy.random import Generator
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from rlhf.batching.samples import Sample
from rlhf.data import ScoredGroup
from rlhf.settings import STRICT
from rlhf.training.contrib.critics.turn_buffer import (
    Episode,
    episodes_of,
    outputs_at,
    packed,
    shuffled,
    values_of_turns,
)
from rlhf.training.critics.base import CriticTrainerBase, StepPredictions, Updates, optimizer_of, value_metrics
from rlhf.training.critics.value_model import ValueHeadSettings, ValueModel
from rlhf.training.policy.model import Policy

if TYPE_CHECKING:
    from rlhf.training.context import StageKeys


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Contributions(ValueHeadSettings):
    """Contribution critic: redistributes the score of a trajectory over its turns.

    A linear layer on the hidden state after a turn's last token says what the turn contributed, ĉ_k. It is trained on
    (Σ_k ĉ_k − R)², R the score. Contributions (.1, .2, .5) and a score of 1: .04. Only sums are ever told: what single
    turns contribute is what makes the sums of many trajectories come out.

    Source: SPA-RL, arXiv 2505.20732.
    """

    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Critic warm-up: steps at the start of the stage in which only the critic is updated."""
    frozen: bool = True
    """Train it only during warm-up, from the policy at the stage's start, then freeze it."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs over the trajectories of a step."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Trajectories per update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frozen and not self.warmup_steps:
            raise ValueError("frozen: true trains in warmup_steps only, and there are none; raise them")

    def start(self, stage: StageKeys, policy: Policy, start: Path | None, seed: int) -> ContributionTrainer:
        """Return what trains it through a stage; see `CriticKind.start`."""
        return ContributionTrainer(self, self.value_model(policy, start, seed), stage)


@plain_dataclass(frozen=True, kw_only=True)
class ContributionPredictions(StepPredictions):
    """Predictions of contributions, in the place of the values of actions; those of states are 0.

    Attributes:
        episodes: trajectories in which something was sampled.
        totals: the score of each.
    """

    episodes: Sequence[Episode]
    totals: Sequence[float]


def sum_loss(contributions_K: Tensor, turns_E: Sequence[int], totals_E: Tensor) -> Tensor:
    """Return Σ_e (Σ_k ĉ_k − R_e)² over trajectories of `turns_E` turns, end to end in `contributions_K`."""
    sums = torch.stack([part.sum() for part in torch.split(contributions_K, list(turns_E))])
    return (sums - totals_E).square().sum()


class ContributionTrainer(CriticTrainerBase[Contributions, ValueModel]):
    """Updates a model of contributions in place; see `CriticTrainerBase`."""

    def __init__(self, settings: Contributions, model: ValueModel, stage: StageKeys) -> None:
        self._stage = stage
        n_steps = settings.warmup_steps if settings.frozen else stage.steps
        n_batches = -(-stage.tasks_per_step * stage.group_size // settings.batch_size)
        super().__init__(settings, model, optimizer_of(settings, model), n_steps * settings.epochs * n_batches)

    @torch.no_grad()
    def predict(self, groups: Sequence[ScoredGroup]) -> ContributionPredictions:
        """Return what each turn of a step contributed, as far as it knows; dropout is off."""
        begun = time.perf_counter()
        self.model.eval()
        of_each = episodes_of(groups, bootstrap=False)
        scores = [score.total for group in groups for score in group.scores]
        episodes = [e for e in of_each if e is not None]
        totals = [total for e, total in zip(of_each, scores, strict=True) if e is not None]
        parts = [
            self._contributions(part).double().cpu() for part in packed(episodes, self._stage.max_tokens_per_microbatch)
        ]
        found = torch.cat([*parts, torch.zeros(0, dtype=torch.float64)])
        sums = [float(part.sum()) for part in torch.split(found, [e.n_turns for e in episodes])] if episodes else []
        told = (torch.tensor(x, dtype=torch.float64) for x in (sums, totals))
        return ContributionPredictions(
            values=values_of_turns(groups, found.numpy()),
            episodes=episodes,
            totals=totals,
            figures=value_metrics(*told) if episodes else {},
            time_s=time.perf_counter() - begun,
        )

    def _contributions(self, episodes: Sequence[Episode]) -> Tensor:
        return outputs_at(self.model, episodes, [e.ends for e in episodes])[:, 0]

    def updates(self, seen: ContributionPredictions, samples: Sequence[Sample], rng: Generator, step: int) -> Updates:
        """Update on a step, in its warm-up or unless frozen."""
        self.model.holds_backbone = self.model.shared and self.is_warming(step)
        if self.is_warming(step) or not self.settings.frozen:
            for chosen in shuffled(range(len(seen.episodes)), self.settings.epochs, self.settings.batch_size, rng):
                yield self._update(seen, chosen)

    def _update(self, seen: ContributionPredictions, chosen: Sequence[int]) -> dict[str, float]:
        self.model.train()
        self._stepper.optimizer.zero_grad(set_to_none=True)
        episodes, loss, at = [seen.episodes[i] for i in chosen], 0.0, 0
        totals = torch.tensor([seen.totals[i] for i in chosen], device=self.model.head.weight.device)
        for part in packed(episodes, self._stage.max_tokens_per_microbatch):
            wanted, at = totals[at : at + len(part)], at + len(part)
            share = sum_loss(self._contributions(part), [e.n_turns for e in part], wanted) / len(chosen)
            share.backward()  # type: ignore[no-untyped-call]
            loss += float(share.detach())
        norm = self._stepper.step()
        self.model.eval()
        return {"critic/sum_loss": loss, "critic/grad_norm": norm, "critic/lr": self._stepper.lr}
