"""Value loss of PPO: squared error against the returns, clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhf.errors import DataError


@dataclass(frozen=True, slots=True)
class ValueOutput:
    """A scalar to differentiate, and figures for the log.

    Attributes:
        loss: scalar, Σ weights · l over the tokens of the micro-batch.
        clipped: `[N]`, True where the value is so far from the old one that the token has no gradient.
    """

    loss: torch.Tensor
    clipped: torch.Tensor


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    clip: float | None = 0.5,
) -> ValueOutput:
    """Return Σ w · ½ max((V − G)², (clip(V, V_old ± c) − G)²).

    The larger of two errors, as in PPO's surrogate: a value that moved towards its return by more than c stops there
    for this step, one that moved away is pulled back in full. V of 1, V_old of .5, c = .2 and G = 2: max(1, 1.3²) / 2 =
    .845. Without c it is half the squared error.

    Args:
        values: of the critic now, `[N]`, in units of reward; they carry the gradient.
        old_values: of the critic that the returns were computed with, `[N]`.
        returns: G, what the values should have been, `[N]`.
        weights: coefficients of a reduction, `[N]`; those of the policy loss will do (`rlhf.losses.reduction`).
        clip: c, in units of reward; None is no bound.

    Raises:
        DataError: the arrays differ in shape, or c is not positive.

    Source: PPO, arXiv 1707.06347, and its code; verl, `compute_value_loss`.
    """
    shapes = [tuple(x.shape) for x in (values, old_values, returns, weights)]
    if len(set(shapes)) != 1:
        raise DataError(
            "the arrays of a value loss differ in shape",
            where="value_loss",
            got=str(shapes),
            expected="values, old values, returns and weights of one shape, [N]",
        )
    error = (values - returns).square()
    if clip is None:
        return ValueOutput((weights * error).sum() / 2, torch.zeros_like(values, dtype=torch.bool))
    if not clip > 0:
        raise DataError("the bound of a value loss must be positive", where="value_loss.clip", got=str(clip))
    old = old_values.detach()
    bounded = (torch.clamp(values, old - clip, old + clip) - returns).square()
    # Not `maximum`, which halves the gradient where both are equal by rounding and only one of them has it.
    loss = (weights * torch.where(bounded > error, bounded, error)).sum() / 2
    return ValueOutput(loss, ((values - old).abs() > clip) & (bounded > error))


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """Explained variance 1 − Var(G − V) / Var(G): 1 perfect, 0 as good as a constant, below 0 worse.

    NaN where the returns do not vary, as no critic can explain what is not there, or are fewer than two. Returns of 0,
    1 and 2 and values of .5, 1 and 1.5: 1 − (1/6) / (2/3) = .75. A constant error is not seen.

    Args:
        values: `[N]`.
        returns: `[N]`.
    """
    spread = returns.double().var(correction=0) if len(returns) > 1 else torch.zeros(())
    if not spread > 0:
        return float("nan")
    return float(1 - (returns.double() - values.double()).var(correction=0) / spread)
