"""Pairwise preference losses: Bradley-Terry of reward models; DPO, IPO and KTO, to which tests compare TRL's trainers.

Everything is a function of one number per sequence, `[B]`: a score, or the log-prob of its sampled tokens. Each returns
one loss per pair, for the caller to average. They differ in the margin M by which the chosen one is ahead, and in what
is done with it:

    Bradley-Terry   M = r_c − r_r                                     −log σ(M − m)                 reward models
    DPO             M = log π/π_ref (chosen) − log π/π_ref (rejected)  −log σ(β M)
    IPO             the same                                          (M − 1 / (2 β))²
    KTO             r = log π/π_ref of one that is good or bad         1 − σ(±β (r − z))     unpaired
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from rlhf.errors import DataError


def bradley_terry(
    chosen: torch.Tensor, rejected: torch.Tensor, *, margin: torch.Tensor | float = 0.0, centring: float = 0.0
) -> torch.Tensor:
    """Return −log σ(r_c − r_r − m) + c (r_c + r_r)², `[B]`.

    The model of pairs in which the chosen one wins with probability σ(r_c − r_r). It fixes differences only; centring
    keeps the scores of a pair around 0. Scores 1.2 and .3: .341154, with m = .5 .513015; c = .01 adds .0225. Equal
    scores give ln 2.

    The scores may be those that a policy is itself: β times the sum over the turns of the mean log π/π_ref of a turn's
    tokens is what SWEET-RL compares trajectories by; see `turn_means`.

    Args:
        chosen: scores of the preferred ones.
        rejected: scores of the others.
        margin: m, at least 0, by how much the chosen one is better; a number per pair or one for all.
        centring: c, at least 0.

    Raises:
        DataError: the shapes differ, or margin or centring is negative.

    Source: Bradley and Terry, Biometrika 39, 1952; margin, Llama 2, arXiv 2307.09288; centring, Eisenstein et al.,
    arXiv 2312.09244.
    """
    _check_pairs(chosen, rejected)
    if not torch.as_tensor(margin).ge(0).all() or not centring >= 0:
        raise DataError(
            "margin and centring cannot be negative",
            where="bradley_terry",
            got=f"margin {margin}, centring {centring}",
            expected="at least 0",
        )
    return -F.logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected).square()


def dpo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """DPO loss, `[B]`: −(1 − s) log σ(β M) − s log σ(−β M), M = log π/π_ref (chosen) − log π/π_ref (rejected).

    β log π/π_ref is the reward of which π is the optimal policy. At π = π_ref it is ln 2 with slope −β/2 in the chosen
    log-prob. Log-ratios of .4 and −.2 and β = .1 give .663597.

    Args:
        chosen: Σ log π over the sampled tokens of the preferred one, in nats; carries the gradient.
        rejected: of the other.
        ref_chosen: of the frozen reference.
        ref_rejected: of the frozen reference.
        beta: more than 0, units of reward per nat.
        label_smoothing: s, the share of labels taken to be wrong, at least 0 and below .5 (conservative DPO).

    Raises:
        DataError: the shapes differ, or a number is out of its range.

    Source: Direct preference optimization, arXiv 2305.18290; smoothing, Mitchell, 2023.
    """
    _check_positive("dpo", beta=beta)
    if not 0 <= label_smoothing < 0.5:
        raise DataError(
            "label smoothing of ½ or more removes the preference",
            where="dpo.label_smoothing",
            got=str(label_smoothing),
            expected="at least 0, less than 0.5",
        )
    ahead = beta * _margin(chosen, rejected, ref_chosen, ref_rejected)
    return -(1 - label_smoothing) * F.logsigmoid(ahead) - label_smoothing * F.logsigmoid(-ahead)


def ipo(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    *,
    beta: float = 0.1,
) -> torch.Tensor:
    """Return (M − 1 / (2 β))², `[B]`, M as in `dpo`.

    DPO pulls pairs apart without end where a preference is certain; this one wants a margin and no more. M = 3 and
    β = .1: (3 − 5)² = 4. Arguments and errors as in `dpo`; M may be of means over the tokens instead of sums.

    Source: A general theoretical paradigm to understand learning from human preferences, arXiv 2310.12036.
    """
    _check_positive("ipo", beta=beta)
    return (_margin(chosen, rejected, ref_chosen, ref_rejected) - 1 / (2 * beta)).square()


def kto(
    log_ratios: torch.Tensor,
    is_good: torch.Tensor,
    drift: torch.Tensor | float,
    *,
    beta: float = 0.1,
    good_weight: float = 1.0,
) -> torch.Tensor:
    """Return λ (1 − σ(β (r − z))) of good ones and 1 − σ(β (z − r)) of bad ones, `[B]`.

    r = .4 and z = .1 with β = 1 give .425557 of a good one and .574443 of a bad one; r = z gives ½ of both.

    Args:
        log_ratios: r = Σ log π/π_ref over the sampled tokens, in nats; carries the gradient.
        is_good: bool `[B]`.
        drift: z, the mean of r over replies to other prompts, at least 0; without a gradient.
        beta: more than 0, units of reward per nat.
        good_weight: λ, more than 0.

    Raises:
        DataError: the shapes differ, or a number is out of its range.

    Source: Model alignment as prospect theoretic optimization, arXiv 2402.01306.
    """
    _check_positive("kto", beta=beta, good_weight=good_weight)
    _check_pairs(log_ratios, is_good)
    ahead = beta * (log_ratios - torch.as_tensor(drift).detach())
    return torch.where(is_good, good_weight * torch.sigmoid(-ahead), torch.sigmoid(ahead))


def sequence_sums(
    values: torch.Tensor, sequence_ids: torch.Tensor, n_sequences: int, kind: Literal["sum", "mean"] = "sum"
) -> torch.Tensor:
    """Sum or mean over the tokens of each sequence, `[B]`; 0 for a sequence without tokens.

    Args:
        values: of the sampled tokens, `[N]`; log-probs, or log-ratios.
        sequence_ids: int64 `[N]`, from 0 to `n_sequences` − 1.
        n_sequences: B.
        kind: `mean` divides by the number of tokens.
    """
    sums = values.new_zeros(n_sequences).index_add(0, sequence_ids, values)
    if kind == "sum":
        return sums
    return sums / torch.bincount(sequence_ids, minlength=n_sequences).clamp(min=1)


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


def _margin(
    chosen: torch.Tensor, rejected: torch.Tensor, ref_chosen: torch.Tensor, ref_rejected: torch.Tensor
) -> torch.Tensor:
    _check_pairs(chosen, rejected, ref_chosen, ref_rejected)
    return (chosen - ref_chosen.detach()) - (rejected - ref_rejected.detach())


def _check_pairs(*arrays: torch.Tensor) -> None:
    shapes = [tuple(x.shape) for x in arrays]
    if len(set(shapes)) != 1:
        raise DataError(
            "chosen and rejected ones do not pair up",
            where="preference loss",
            got=str(shapes),
            expected="one number for each pair, [B], in every array",
        )


def _check_positive(where: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise DataError(
                "this number must be positive", where=f"{where}.{name}", got=str(number), expected="more than 0"
            )
