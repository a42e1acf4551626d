"""Loss aggregation (token mean, sequence mean and others), as a coefficient per token.

Every reduction in use is a weighted sum, L = Σ w_t · l_t, whose coefficients depend on token and sequence counts alone.
They are computed once, over the whole minibatch (all micro-batches, all processes); then micro-batches simply add up,
and splitting differently changes nothing. S is the number of sequences with tokens, T_s the policy tokens of sequence
s, N = Σ T_s:

    token_mean               1 / N                                              DAPO, verl's default
    seq_mean_token_mean      1 / (S · T_s)                                      GRPO
    seq_mean_token_sum       1 / S
    seq_mean_token_sum_norm  1 / (S · C), or 1 / C with divide_by: constant     Dr.GRPO; verl divides by C only
    per_trajectory_mean      1 / (S · T of the token's trajectory)              Agent Lightning divides by rows for S

A sequence is a trajectory; with `per: row` it is a row of the batch, as in code bases that cannot tell which rows
belong together. Only trajectories give the same gradient however they are cut into rows.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.errors import DataError
from rlhf.settings import STRICT

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Kind = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "per_trajectory_mean"
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Reduction:
    """Aggregation of token losses."""

    kind: Kind = "token_mean"
    """Loss aggregation: the coefficient of each token."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """C of `seq_mean_token_sum_norm`: a constant such as the maximum number of policy tokens of a trajectory. It must
    not depend on the batch, or the length bias returns."""
    divide_by: Literal["constant", "constant_and_sequences"] = "constant_and_sequences"
    """For `seq_mean_token_sum_norm`: divide by C alone (verl; the update then grows with the batch), or by C and the
    number of sequences (the paper)."""
    per: Literal["trajectory", "row"] = "trajectory"
    """Unit that counts as a sequence."""

    def __post_init__(self) -> None:
        normed = self.kind == "seq_mean_token_sum_norm"
        if normed and self.max_tokens is None:
            raise ValueError("kind: seq_mean_token_sum_norm needs max_tokens, the constant it divides by")
        if not normed and (self.max_tokens is not None or self.divide_by == "constant"):
            raise ValueError(f"max_tokens and divide_by have no effect with kind: {self.kind}; remove them")
        if self.kind == "token_mean" and self.per == "row":
            raise ValueError("per: row has no effect with kind: token_mean; remove it")

    def __call__(self, n_tokens_R: Ints, trajectory_ids_R: Ints) -> Floats:
        """Return `[R]`, the coefficient of each policy token of each row.

        Args:
            n_tokens_R: policy tokens of each row of the whole minibatch.
            trajectory_ids_R: which trajectory each row belongs to; any numbers, equal for equal trajectories.

        Rows without policy tokens count nowhere and get coefficient 0; without any tokens all coefficients are 0.

        Raises:
            DataError: the arrays differ in shape, or a count is negative.
        """
        n_tokens, ids = np.asarray(n_tokens_R), np.asarray(trajectory_ids_R)
        if n_tokens.ndim != 1 or n_tokens.shape != ids.shape or (n_tokens < 0).any():
            raise DataError(
                "token counts and trajectory ids do not match",
                where="reduction",
                got=f"shapes {n_tokens.shape} and {ids.shape}, smallest count {n_tokens.min(initial=0)}",
                expected="[R] and [R], counts at least 0",
            )
        weights = np.zeros(len(n_tokens))
        trained = n_tokens > 0
        if not trained.any():
            return weights
        rows = n_tokens[trained]
        _, trajectory = np.unique(ids[trained], return_inverse=True)  # [rows], numbered from 0
        per_trajectory = np.bincount(trajectory, weights=rows)[trajectory]  # T of each row's trajectory
        n_sequences = len(rows) if self.per == "row" else int(trajectory.max()) + 1
        if self.kind == "token_mean":
            weights[trained] = 1.0 / rows.sum()
        elif self.kind == "seq_mean_token_sum":
            weights[trained] = 1.0 / n_sequences
        elif self.kind == "seq_mean_token_sum_norm":
            assert self.max_tokens is not None  # see __post_init__
            weights[trained] = 1.0 / (self.max_tokens * (1 if self.divide_by == "constant" else n_sequences))
        else:
            lengths = rows if self.kind == "seq_mean_token_mean" and self.per == "row" else per_trajectory
            weights[trained] = 1.0 / (n_sequences * lengths)
        return weights
