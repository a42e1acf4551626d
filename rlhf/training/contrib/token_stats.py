"""Entropy and gap of every sampled token, stored with the attempts of a step.

Neither is known where tokens are sampled: entropy needs the whole distribution, which engines do not report, and the
gap the trainer's log-prob. So the key costs a forward pass over the step's rows, and two figures a token in
`trajectories/`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass as plain_dataclass
from itertools import count
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.batching.samples import Sample
from rlhf.data import ScoredGroup, TokenFigures, Trajectory
from rlhf.settings import STRICT
from rlhf.training.backends.token_stats import Figure
from rlhf.training.backends.torch import TorchTrainer
from rlhf.training.context import LiveStage, StageKeys
from rlhf.training.hooks.base import StageHook, Step

#: Figures of a token: entropy and gap.
_Pair = tuple[float, float]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TokenStatsSettings:
    """Entropy and trainer-engine gap of single tokens, stored for the viewer.

    Costs a forward pass of the trainer over the rows of each such step, and, in the quickstart, 2.7 bytes
    for each sampled token.
    """

    every: Annotated[int, Field(ge=1)] = 1
    """Steps from one whose tokens are measured to the next; the first is."""


@plain_dataclass
class TokenStatsHook(StageHook):
    """Measures the tokens of a step before its update.

    Attributes:
        settings: the recipe keys.
        roles: whose generations are trained on; None is all.
    """

    settings: TokenStatsSettings
    roles: Collection[str] | None = None

    def transform_samples(self, parts: LiveStage, step: Step, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Leave the rows as they are and note the figures of all of them, those that filters dropped too."""
        if step.number % self.settings.every == 0:
            step.figures = self.figures(parts.trainer, step.stage, step.rows, step.groups)
        return samples

    def figures(
        self, trainer: TorchTrainer, stage: StageKeys, rows: Sequence[Sample], groups: Sequence[ScoredGroup]
    ) -> list[TokenFigures]:
        """Return for each group the figures of its tokens.

        Args:
            trainer: holds the policy before the update.
            stage: says how its tokens were sampled.
            rows: all of the step, in the order of the trajectories and their generations.
            groups: of the step; `Sample.sequence` numbers their trajectories in order.
        """
        budget, wanted = stage.max_tokens_per_microbatch, list[Figure](("entropy",))
        found = trainer.compute_token_stats(rows, wanted, temperature=stage.temperature, max_tokens=budget)
        of_sequence: dict[int, list[_Pair]] = {}
        for row, logprobs, entropies in zip(rows, found["logprobs"], found["entropy"], strict=True):
            gaps = logprobs - row.sampler_logprobs[row.mask]
            if row.off_policy is not None:  # nobody sampled these: their log-prob is a convention
                gaps[row.off_policy[row.mask]] = math.nan
            of_sequence.setdefault(row.sequence, []).extend(zip(entropies.tolist(), gaps.tolist(), strict=True))
        number = count()
        pairs = [[of_sequence.get(next(number)) for _ in group.trajectories] for group in groups]
        return [self._of_group(group, pairs_G) for group, pairs_G in zip(groups, pairs, strict=True)]

    def _of_group(self, group: ScoredGroup, found_G: Sequence[list[_Pair] | None]) -> TokenFigures:
        pairs_GNT = [self._placed(t, found) for t, found in zip(group.trajectories, found_G, strict=True)]
        entropies, gaps = (
            tuple(tuple(tuple(pair[k] for pair in pairs_T) for pairs_T in pairs_NT) for pairs_NT in pairs_GNT)
            for k in (0, 1)
        )
        return TokenFigures(entropies, gaps)

    def _placed(self, trajectory: Trajectory, pairs: list[_Pair] | None) -> list[list[_Pair]]:
        """Figures by generation and token, NaN where the trainer reads a generation and does not train on it.

        Args:
            trajectory: as it was sampled.
            pairs: of its tokens that are trained on; None for an attempt that has no row.
        """
        nothing, found = (math.nan, math.nan), iter(pairs or ())
        return [
            [nothing] * g.n_tokens
            if pairs is None or g.opponent or (self.roles is not None and g.role not in self.roles)
            else [next(found) for _ in range(g.n_tokens)]
            for g in trajectory.generations
        ]
