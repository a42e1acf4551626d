"""Filters: which rows are not worth training on, or must not be trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.batching.samples import Sample
from rlhf.data import Finish, Outcome, ScoredGroup, Trajectory
from rlhf.settings import STRICT

_TRUNCATED = frozenset({Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Filters:
    """Drops rows after advantages are computed, so that group statistics include every trajectory.

    What is left out does not count in the reduction's token and sequence numbers either. If nothing is left, the step
    has no update.
    """

    drop_zero_advantage: bool = True
    """Drop groups with zero advantage on every token (zero score variance): they cost a forward and backward pass
    without a learning signal. With a KL or entropy term they would still be regularised. false keeps and counts them,
    as GRPO does: if 3 of 4 groups have no signal, the gradient of the others is then a quarter; dropped, the update
    size does not depend on them."""
    drop_truncated: bool = False
    """Overlong filtering: drop truncated trajectories, those that ended at a limit or whose last reply was cut at
    `limits.max_tokens`. Off by default, as truncation is mostly due to the policy and reflected in the score."""
    max_advantage_z: Annotated[float, Field(gt=0)] | None = None
    """Drop trajectories whose advantage is more than this many standard deviations from the step's mean, such as spikes
    of a learned reward; null is off. StableReinforce (arXiv 2505.02835) uses 3. The standard deviation divides by the
    number of trajectories; token-level advantages count with their mean."""

    high_entropy_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Train only on this share of the step's sampled tokens, those with the highest entropy of the next-token
    distribution before the first update; null trains on all. 0.2 is common (arXiv 2506.01939). The other tokens do not
    count in the reduction, nor in KL and entropy terms. Costs a forward pass without gradient if the correction needs
    none."""

    def __call__(
        self, samples: Sequence[Sample], groups: Sequence[ScoredGroup]
    ) -> tuple[list[Sample], Mapping[str, float]]:
        """Return the rows to train on, in order, and counters of dropped and kept rows.

        Args:
            samples: as `make_samples` returned them for `groups`.
            groups: of the step.
        """
        with_signal = {s.group for s in samples if s.advantages.any()}
        silent = {s.group for s in samples} - with_signal if self.drop_zero_advantage else set()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        kept = [s for s in samples if s.group not in silent]
        truncated: set[int] = set()
        if self.drop_truncated:
            truncated = {s.sequence for s in kept if _is_truncated(trajectories[s.sequence])}
            kept = [s for s in kept if s.sequence not in truncated]
        outliers = _outliers(samples, self.max_advantage_z) & {s.sequence for s in kept}
        kept = [s for s in kept if s.sequence not in outliers]
        return kept, {
            "batch/n_dropped_groups": float(len(silent)),
            "batch/n_dropped_trajectories": float(len(truncated)),
            "batch/n_outliers": float(len(outliers)),
        }


def _is_truncated(trajectory: Trajectory) -> bool:
    own = [generation for generation in trajectory.generations if not generation.opponent]
    return trajectory.outcome in _TRUNCATED or (bool(own) and own[-1].finish is Finish.LENGTH)


def high_entropy(samples: Sequence[Sample], share: float) -> tuple[list[Sample], dict[str, float]]:
    """Mask all tokens but the `share` of highest entropy; returns the rows and a counter.

    A token is kept if its entropy reaches the (1 − share)-quantile over all tokens of `samples`, interpolated linearly;
    ties are kept, so at least one is. Rows of which nothing is kept are left out. Entropies .1, 2, .3, .05, 1 and a
    share of .2 have the quantile 1.2 and keep the second.

    Source: Wang et al., Beyond the 80/20 rule, arXiv 2506.01939; there over a minibatch.
    """
    entropies = [s.entropy[s.mask] for s in samples if s.entropy is not None]
    if not any(map(len, entropies)):
        return [], {"batch/n_low_entropy_tokens": 0.0}
    threshold = np.quantile(np.concatenate(entropies).astype(np.float64), 1 - share)
    kept = [s.masked(s.mask & (s.entropy >= threshold)) for s in samples if s.entropy is not None]
    n_left_out = sum(s.n_policy_tokens for s in samples) - sum(s.n_policy_tokens for s in kept)
    return [s for s in kept if s.mask.any()], {"batch/n_low_entropy_tokens": float(n_left_out)}


def _outliers(samples: Sequence[Sample], max_z: float | None) -> set[int]:
    """Trajectories more than `max_z` deviations from the mean of all; advantages that are all equal have none."""
    if max_z is None or not samples:
        return set()
    sequences, index = np.unique([s.sequence for s in samples], return_inverse=True)
    sums = np.bincount(index, weights=[s.advantages.sum(dtype=np.float64) for s in samples])
    means = sums / np.maximum(np.bincount(index, weights=[s.n_policy_tokens for s in samples]), 1)
    far = np.abs(means - means.mean()) > max_z * means.std() + 1e-9 * np.abs(means).max()  # not by rounding
    return set(sequences[far].tolist())
