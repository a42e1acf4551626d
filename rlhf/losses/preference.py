"""Bradley-Terry loss of reward models, and sums of log-probs over sequences and turns.

Everything is a function of one number per sequence, `[B]`: a score, or the log-prob of its sampled tokens. DPO, IPO and
KTO are TRL's (`rlhf.training.stages.trl_trainers`).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from rlhf.errors import DataError


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor, *, centring: float = 0.0) -> torch.Tensor:
    """Return −log σ(r_c − r_r) + c (r_c + r_r)², `[B]`, one loss per pair, for the caller to average.

    The model of pairs in which the chosen one wins with probability σ(r_c − r_r). It fixes differences only; centring
    keeps the scores of a pair around 0. Scores 1.2 and .3: .341154; c = .01 adds .0225. Equal scores give ln 2.

    The scores may be those that a policy is itself: β times the sum over the turns of the mean log π/π_ref of a turn's
    tokens is what SWEET-RL compares trajectories by; see `turn_means`.

    Args:
        chosen: scores of the preferred ones.
        rejected: scores of the others.
        centring: c, at least 0.

    Raises:
        DataError: the shapes differ, or centring is negative.

    Source: Bradley and Terry, Biometrika 39, 1952; centring, Eisenstein et al., arXiv 2312.09244.
    """
    if chosen.shape != rejected.shape:
        raise DataError(
            "chosen and rejected log-probs differ in shape",
            where="bradley_terry",
            got=f"shapes {tuple(chosen.shape)} and {tuple(rejected.shape)}",
            expected="[B] and [B]",
        )
    if not centring >= 0:
        raise DataError(
            "centring cannot be negative", where="bradley_terry.centring", got=str(centring), expected="at least 0"
        )
    return -F.logsigmoid(chosen - rejected) + centring * (chosen + rejected).square()


def sequence_sums(
    values: torch.Tensor, trajectory_ids: torch.Tensor, n_sequences: int, kind: Literal["sum", "mean"] = "sum"
) -> torch.Tensor:
    """Sum or mean over the tokens of each sequence, `[B]`; 0 for a sequence without tokens.

    Args:
        values: of the sampled tokens, `[N]`; log-probs, or log-ratios.
        trajectory_ids: int64 `[N]`, from 0 to `n_sequences` − 1.
        n_sequences: B.
        kind: `mean` divides by the number of tokens.
    """
    sums = values.new_zeros(n_sequences).index_add(0, trajectory_ids, values)
    if kind == "sum":
        return sums
    return sums / torch.bincount(trajectory_ids, minlength=n_sequences).clamp(min=1)


def turn_means(
    values: torch.Tensor, turn_ids: torch.Tensor, sequence_of_turn: torch.Tensor, n_sequences: int
) -> torch.Tensor:
    """Sum over a sequence's turns of the mean of `values` over the turn's tokens, `[B]`.

    Log-ratios .1, .1 in one turn and .2 in the next make .3; −.1, −.2 and −.3 make −.45; with them as scores and β = 1
    Bradley-Terry gives .386871, with β = .1 .65635. (The authors' code takes one mean over all tokens: .133333 and
    −.2, .676619; that is `sequence_sums` with `mean`.)

    Args:
        values: log π/π_ref of the sampled tokens, `[N]`.
        turn_ids: int64 `[N]`, from 0 to K − 1, numbering the turns of all sequences.
        sequence_of_turn: int64 `[K]`, from 0 to `n_sequences` − 1.
        n_sequences: B.

    Source: SWEET-RL, arXiv 2503.15478.
    """
    means = sequence_sums(values, turn_ids, len(sequence_of_turn), "mean")
    return sequence_sums(means, sequence_of_turn, n_sequences)
