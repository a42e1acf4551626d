"""Filters: which rows are not worth training on, or must not be trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic.dataclasses import dataclass

from rlhf.batching.samples import Sample, sample_counters
from rlhf.data import Outcome, ScoredGroup
from rlhf.settings import STRICT

_TRUNCATED = frozenset({Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Filters:
    """Leaves rows out after credit is assigned, so that group statistics still see every trajectory.

    What is left out does not count in the reduction's token and sequence numbers either. If nothing is left, the step
    has no update.
    """

    drop_zero_advantage: bool = True
    """Leave out groups in which every token's advantage is 0 (all attempts scored the same): they cost a forward and a
    backward pass and teach nothing. With a KL or entropy term they would still be regularised; False keeps them."""
    drop_truncated: bool = False
    """Leave out trajectories that a turn or token limit ended ("overlong filtering"). Off, because not finishing in
    time is mostly the policy's doing and the score says so."""

    def __call__(
        self, samples: Sequence[Sample], groups: Sequence[ScoredGroup]
    ) -> tuple[list[Sample], Mapping[str, float]]:
        """Return the rows to train on, in order, and counters of what was left out and what remains.

        Args:
            samples: as `make_samples` returned them for `groups`.
            groups: of the step.
        """
        with_signal = {s.group for s in samples if s.advantages.any()}
        silent = {s.group for s in samples} - with_signal if self.drop_zero_advantage else set()
        outcomes = [trajectory.outcome for group in groups for trajectory in group.trajectories]
        kept = [s for s in samples if s.group not in silent]
        truncated: set[int] = set()
        if self.drop_truncated:
            truncated = {s.sequence for s in kept if outcomes[s.sequence] in _TRUNCATED}
            kept = [s for s in kept if s.sequence not in truncated]
        return kept, sample_counters(kept) | {
            "batch/n_dropped_groups": float(len(silent)),
            "batch/n_dropped_trajectories": float(len(truncated)),
        }
