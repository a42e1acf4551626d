"""Weight extrapolation along the first singular direction of each weight's change.

What reinforcement learning changes in a matrix, ΔW = W_t − W_0 = Σ σ_i u_i v_iᵀ, does most of its work along u_1 v_1ᵀ,
and σ_1 u_1 moves nearly on a line while training goes on. So a finished policy can be reduced to that direction, or
pushed further along it, and one that was stopped early can be continued without training:

    one checkpoint       W_0 + α · (‖ΔW‖ / σ_1) · σ_1 u_1 v_1ᵀ          as long as the whole change for α = 1
    several checkpoints  W_0 + α · y(s) · v_1ᵀ                          v_1 of the last

y(s) is the line through the σ_1 u_1 of the checkpoints against their success, at the success s aimed for: partial least
squares with one predictor, which has one component and is the line of least squares. A singular vector has no sign of
its own; that of each checkpoint is turned so that its v_1 points as the last one's does.

A vector (a norm's weight, a bias) is a matrix of one column here: all of its change is in its one direction.

Source: On predictability of reinforcement learning dynamics (AlphaRL), arXiv 2510.00553. One of the authors' scripts
adds the whole change in its rank-1 mode; this follows their formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf.errors import DataError, ModelError
from rlhf.training.backends.master_weights import rounded_at_random
from rlhf.training.backends.sharded import cast_parameters
from rlhf.training.policy.lora import unadapted
from rlhf.training.policy.model import Policy

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Direction:
    """The first singular triple of a change, float64.

    Attributes:
        u: `[M]`, σ_1 u_1.
        v: `[N]`, v_1, of length 1.
        norm: ‖ΔW‖, Frobenius.
    """

    u: torch.Tensor
    v: torch.Tensor
    norm: float

    @property
    def sigma(self) -> float:
        """σ_1."""
        return float(self.u.norm())

    @property
    def share(self) -> float:
        """σ_1² / ‖ΔW‖²: how much of the change lies in this direction; 1 where nothing changed."""
        return (self.sigma / self.norm) ** 2 if self.norm else 1.0


def first_direction(change: torch.Tensor) -> Direction:
    """Return the first singular triple of ΔW, of any shape; dimensions after the first count as columns.

    It comes from the eigenvectors of the smaller of ΔW ΔWᵀ and ΔWᵀ ΔW. A change of 0 has a direction of length 0.
    """
    matrix = change.detach().double().reshape(change.shape[0] if change.ndim else 1, -1)  # [M, N]
    wide = matrix.shape[1] > matrix.shape[0]
    tall = matrix.T if wide else matrix
    second = torch.linalg.eigh(tall.T @ tall).eigenvectors[:, -1]  # eigenvalues ascend
    first = tall @ second  # σ_1 times the other singular vector
    if wide:
        sigma = first.norm()
        return Direction(second * sigma, first / sigma if sigma else first, float(matrix.norm()))
    return Direction(first, second, float(matrix.norm()))


def directions(start: Weights, end: Weights) -> dict[str, Direction]:
    """Return the change of each parameter between two sets of weights.

    Raises:
        ModelError: they are not those of one architecture.
    """
    differing = [name for name in {**start, **end} if _shape(start, name) != _shape(end, name)]
    if differing:
        name = differing[0]
        raise ModelError(
            "these checkpoints have weights of different models",
            where=name,
            got=f"shape {_shape(end, name)}",
            expected=f"{_shape(start, name)}, as in the weights to start from",
            hint="name checkpoints of one run, and its start",
        )
    return {name: first_direction(end[name].double() - start[name].double()) for name in start}


def _shape(weights: Weights, name: str) -> tuple[int, ...] | str:
    return tuple(weights[name].shape) if name in weights else "no such parameter"


def rank_one(direction: Direction, alpha: float = 1.0) -> torch.Tensor:
    """Return α · (‖ΔW‖ / σ_1) · σ_1 u_1 v_1ᵀ, `[M, N]`.

    diag(3, 4): σ_1 = 4, ‖ΔW‖ = 5, so the factor is 1.25 and the result [[0, 0], [0, 5]].
    """
    factor = direction.norm / direction.sigma if direction.sigma else 0.0
    return alpha * factor * torch.outer(direction.u, direction.v)


def at_success(
    found: Sequence[Direction], successes: Sequence[float], target: float, alpha: float = 1.0
) -> torch.Tensor:
    """Update α · y(target) · vᵀ, `[M, N]`, of a parameter from its directions at several checkpoints, oldest first.

    y(s) = mean y + (s − mean s) · Σ (s_j − mean s) y_j / Σ (s_j − mean s)². Successes .2, .4 of (1, 0), (2, 0) give
    (3, 0) at .6.

    Raises:
        DataError: fewer than two checkpoints, or all of the same success: there is no line.
    """
    s = torch.tensor(successes, dtype=torch.float64)
    centred = s - s.mean()
    if len(found) != len(s) or len(s) < 2 or not bool(centred.abs().max() > 1e-9):
        raise DataError(
            "these checkpoints define no line",
            where="extrapolate",
            got=f"{len(found)} checkpoints of success {', '.join(f'{x:g}' for x in successes)}",
            expected="at least two of different success",
            hint="name more checkpoints, or one, whose own change is then taken",
        )
    last = found[-1].v
    y = torch.stack([d.u if float(d.v @ last) >= 0 else -d.u for d in found])  # [J, M]
    slope = centred @ (y - y.mean(0)) / (centred @ centred)
    return alpha * torch.outer(y.mean(0) + (target - s.mean()) * slope, last)


def moved(start: Weights, changes: Weights, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return `start` plus `changes`, in a number format, by default that of `start`.

    To bfloat16 sums are rounded stochastically, always the same way: most of a change is less than half a spacing.
    """
    sums = {name: w.double() + changes[name].reshape(w.shape) for name, w in start.items()}
    return {name: _rounded(x, dtype or start[name].dtype) for name, x in sums.items()}


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rounded_at_random(x.float(), x.numel()) if dtype == torch.bfloat16 else x.to(dtype)


def merged(policy: Policy, *, exact: bool = False) -> Any:
    """The plain model of a policy: an adapter is merged into its base.

    Args:
        policy: its adapter is merged in place.
        exact: whether the sums stay float32; in 16 bits their rounding can be larger than the adapter's change.
    """
    if not policy.is_lora:
        return policy.model
    if exact and getattr(policy.model, "quantization_method", None) is None:
        cast_parameters(policy.model, torch.float32)
    return unadapted(policy.model)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter once, by its name; tied ones under their first."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def put(model: Any, weights: Weights) -> None:
    """Give `model` the weights that `weights_of` returned, changed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
