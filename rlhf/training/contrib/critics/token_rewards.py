"""Critic of token rewards, learnt from outcomes alone, and its recipe keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from numpy.random import Generator
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rlhf.batching.samples import Sample
from rlhf.credit.flat_tokens import nested, shape_of
from rlhf.data import ScoredGroup, Values
from rlhf.settings import STRICT
from rlhf.training.contrib.critics.turn_buffer import Ints, Rows, outputs_at, packed, shuffled
from rlhf.training.critics.base import CriticTrainerBase, StepPredictions, Updates, optimizer_of
from rlhf.training.critics.value_model import ValueHeadSettings, ValueModel
from rlhf.training.critics.values import bare_rows
from rlhf.training.policy.model import Policy

if TYPE_CHECKING:
    from rlhf.training.context import StageKeys


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TokenRewards(ValueHeadSettings):
    """Token-reward critic (OREAL): token rewards whose mean over an attempt predicts its outcome.

    A linear layer on the hidden state before a sampled token gives its reward w_t. It is trained on the cross-entropy
    of σ(mean_t w_t) and the outcome, 1 where the environment calls the attempt solved. Rewards (2, 0) of a right
    attempt: mean 1, loss .313262.

    Source: OREAL, arXiv 2502.06781, and its `train_oreal.py`; 10 steps of warm-up as there.
    """

    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Critic warm-up: steps at the start of the stage in which only the critic is updated."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs over the attempts of a step."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Attempts per update."""

    def start(self, stage: StageKeys, policy: Policy, start: Path | None, seed: int) -> TokenRewardTrainer:
        """Return what trains it through a stage; see `CriticKind.start`."""
        return TokenRewardTrainer(self, self.value_model(policy, start, seed), stage)


@plain_dataclass(frozen=True, eq=False)
class Attempt(Rows):
    """A trajectory in which the policy sampled T tokens.

    Attributes:
        places: `[T]`, where in `token_ids` the last token before each sampled one is.
        right: 1.0 where it was solved, else 0.0.
    """

    places: Ints
    right: float


def attempts_of(groups: Sequence[ScoredGroup]) -> list[Attempt]:
    """Return the trajectories of `groups` in which something was sampled, in order."""
    rows: dict[int, list[Sample]] = {}
    for row in bare_rows(groups, "trajectory"):
        rows.setdefault(row.sequence, []).append(row)
    solved = [t.solved for group in groups for t in group.trajectories]
    return [
        Attempt(
            np.concatenate([row.token_ids for row in own], dtype=np.int64),
            np.array([len(row) for row in own], np.int64),
            np.flatnonzero(np.concatenate([row.mask for row in own])) - 1,
            float(solved[number]),
        )
        for number, own in sorted(rows.items())
    ]


def outcome_loss(rewards_N: Tensor, tokens_S: Sequence[int], right_S: Tensor) -> Tensor:
    """Return Σ_s −log p(outcome) over attempts of `tokens_S` tokens, end to end in `rewards_N`; logit: their mean."""
    means = torch.stack([part.mean() for part in torch.split(rewards_N, list(tokens_S))])
    return binary_cross_entropy_with_logits(means, right_S, reduction="sum")


@plain_dataclass(frozen=True, kw_only=True)
class TokenRewardPredictions(StepPredictions):
    """Token rewards of a step, in the place of state values.

    Attributes:
        attempts: those with tokens.
    """

    attempts: Sequence[Attempt]


class TokenRewardTrainer(CriticTrainerBase[TokenRewards, ValueModel]):
    """Updates a model of token rewards in place; see `CriticTrainerBase`."""

    def __init__(self, settings: TokenRewards, model: ValueModel, stage: StageKeys) -> None:
        self._stage = stage
        n_batches = -(-stage.tasks_per_step * stage.group_size // settings.batch_size)
        super().__init__(settings, model, optimizer_of(settings, model), stage.steps * settings.epochs * n_batches)

    @torch.no_grad()
    def predict(self, groups: Sequence[ScoredGroup]) -> TokenRewardPredictions:
        """Return the reward of each token of a step; dropout is off."""
        begun = time.perf_counter()
        self.model.eval()
        attempts = attempts_of(groups)
        parts = [self._rewards(part).double().cpu() for part in packed(attempts, self._stage.max_tokens_per_microbatch)]
        found = torch.cat([*parts, torch.zeros(0, dtype=torch.float64)])
        of_each = torch.split(found, [len(a.places) for a in attempts]) if attempts else ()
        agrees = [(float(w.mean()) > 0) == bool(a.right) for w, a in zip(of_each, attempts, strict=True)]
        figures = {"critic/outcome_accuracy": sum(agrees) / len(agrees)} if agrees else {}
        rewards = nested([shape_of(group) for group in groups], found.numpy())
        values = [Values(w, (0.0,) * len(group.trajectories)) for group, w in zip(groups, rewards, strict=True)]
        spent_s = time.perf_counter() - begun
        return TokenRewardPredictions(values=values, attempts=attempts, figures=figures, time_s=spent_s)

    def _rewards(self, attempts: Sequence[Attempt]) -> Tensor:
        return outputs_at(self.model, attempts, [a.places for a in attempts])[:, 0]

    def updates(self, seen: TokenRewardPredictions, samples: Sequence[Sample], rng: Generator, step: int) -> Updates:
        """Update on the outcomes of a step."""
        self.model.holds_backbone = self.model.shared and self.is_warming(step)
        return map(self._update, shuffled(seen.attempts, self.settings.epochs, self.settings.batch_size, rng))

    def _update(self, attempts: Sequence[Attempt]) -> dict[str, float]:
        self.model.train()
        self._stepper.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for part in packed(attempts, self._stage.max_tokens_per_microbatch):
            right = torch.tensor([a.right for a in part], device=self.model.head.weight.device)
            share = outcome_loss(self._rewards(part), [len(a.places) for a in part], right) / len(attempts)
            share.backward()  # type: ignore[no-untyped-call]
            loss += float(share.detach())
        norm = self._stepper.step()
        self.model.eval()
        return {"critic/outcome_loss": loss, "critic/grad_norm": norm, "critic/lr": self._stepper.lr}
