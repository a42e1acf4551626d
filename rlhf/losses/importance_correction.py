"""Importance-sampling correction for sampler/trainer mismatch: truncate, clip or mask.

The trainer recomputes the log-probs of the tokens with the weights that sampled, before the first update of a step.
They are π_old of the loss, so its ratio is 1 at first and its clipping sees the policy's own movement alone; how far
the engine was off is in w = π_old / μ (`rlhf.losses.mismatch`), which the kinds here turn into a factor. It multiplies
the token's weight in the loss: it acts after clipping, on any loss, and on KL and entropy terms as well, whose tokens
come from the engine too: the mean of k under μ is not that under π_old, that of w · k is. verl weighs the policy's term
alone; the two differ by kl_coef times the mean of (w − 1) · k, .4 nats where π is (.8, .2) and μ and the reference are
(.5, .5), and 1e-4 where log-probs differ by 1e-2 and k by as much.

`bypass` takes the engine's log-probs for π_old instead, so that the loss's ratio holds both.
"""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.capabilities import Capability, CapabilityView
from rlhf.errors import DataError
from rlhf.losses.mismatch import (
    CorrectionInputs,
    CorrectionOutput,
    Level,
    Statistic,
    divergence,
    hits_sequence,
    off_policy_negatives,
    sequence_sums,
    weights_at,
)
from rlhf.losses.ratios import MAX_LOG_RATIO
from rlhf.settings import STRICT


@runtime_checkable
class Correction(Protocol):
    """Importance-sampling correction: from two log-probs per token to weights and a mask; its fields are keys.

    It is called once in each step with all tokens of the step. One whose attribute `per_token` is True promises that a
    token's weight depends on that token alone and that every token is kept: a step of one update then calls it with the
    tokens of each micro-batch, and needs no forward pass of its own.
    """

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        """Return what becomes of each token."""


class CorrectionCapabilities(CapabilityView):
    """Optional attributes of a correction, with a default for each that it leaves out."""

    per_token = Capability[object](False)
    """See `Correction`."""


def corrected(correction: Correction, inputs: CorrectionInputs) -> CorrectionOutput:
    """Call `correction`.

    Raises:
        DataError: it gives something else than one number and one truth value per token, or leaves tokens out though it
            is `per_token`.
    """
    output = correction(inputs)
    arrays = {name: getattr(output, name, None) for name in ("weights", "kept", "bounded")}
    wrong = {name: _what(a) for name, a in arrays.items() if not _fits(name, a, inputs)}
    if wrong:
        raise DataError(
            "a correction does not fit the tokens",
            where=type(correction).__name__,
            got=", ".join(f"{name} {what}" for name, what in wrong.items()),
            expected=f"a CorrectionOutput of tensors [{len(inputs.trajectory_ids)}], kept and bounded of bool or None",
        )
    if CorrectionCapabilities(correction).per_token and output.kept is not None:
        raise DataError(
            "a correction that leaves tokens out is not per token: it changes what the others are divided by",
            where=f"{type(correction).__name__}.per_token",
            got="True",
            expected="False",
        )
    return output


def _fits(name: str, array: object, inputs: CorrectionInputs) -> bool:
    if array is None:
        return name != "weights"
    is_right = isinstance(array, torch.Tensor) and array.shape == inputs.trajectory_ids.shape
    return is_right and (name == "weights" or array.dtype == torch.bool)  # type: ignore[attr-defined]


def _what(array: object) -> str:
    return f"{array.dtype} {list(array.shape)}" if isinstance(array, torch.Tensor) else type(array).__name__


def _inverse_mean(
    weights: torch.Tensor, trajectory_ids: torch.Tensor, kept: torch.Tensor | None, over: Level
) -> torch.Tensor | float:
    """Inverse mean weight of the kept tokens, or of trajectories with any; 1 where there are none."""
    if kept is not None:
        weights, trajectory_ids = weights[kept], trajectory_ids[kept]
    if over != "token":
        sums, counts, _ = sequence_sums(weights, trajectory_ids)
        weights = sums / counts
    total = weights.sum()
    return len(weights) / total if total > 0 else 1.0


def _check_order(lower_name: str, lower: float, upper_name: str, upper: float) -> None:
    if not lower < upper:
        raise ValueError(f"{lower_name}: {lower} is not below {upper_name}: {upper}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RejectionBase:
    """Base of corrections that may also leave out or silence whole trajectories."""

    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Veto: reject a trajectory, denominators included, if any token has w below this, as the trainer would hardly have
    sampled it; 1e-4 is common, null is off."""
    opsm_delta: Annotated[float, Field(ge=0)] | None = None
    """δ of off-policy sequence masking (OPSM), in nats: tokens with A < 0 get weight 0 if the mean of log μ − log π_old
    over the trajectory is above δ; 1e-4 is common, null is off. Measured before the first update, so it covers engine
    mismatch and staleness; clipping covers the step itself."""

    def _output(
        self,
        inputs: CorrectionInputs,
        weights: torch.Tensor,
        kept: torch.Tensor | None = None,
        bounded: torch.Tensor | None = None,
        *,
        mean_over: Level | None = None,
    ) -> CorrectionOutput:
        """Correction output under this class's keys; with `mean_over` the kept weights average 1."""
        if self.veto is not None:
            vetoed = hits_sequence(inputs.log_weights().exp() < self.veto, inputs.trajectory_ids)
            kept = ~vetoed if kept is None else kept & ~vetoed
        if mean_over is not None:
            weights = weights * _inverse_mean(weights, inputs.trajectory_ids, kept, mean_over)
        if self.opsm_delta is not None:
            silent = off_policy_negatives(
                inputs.sampler_logprobs, inputs.old_logprobs, inputs.advantages, inputs.trajectory_ids, self.opsm_delta
            )
            weights = torch.where(silent, 0.0, weights)
        return CorrectionOutput(weights, kept, bounded)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WeightingBase(RejectionBase):
    """Base of corrections that weigh tokens by w."""

    level: Level = "token"
    """Level of the importance weight w: `token`; `sequence`, the product over the trajectory (unbiased up to the
    bounds, with a variance that grows with length); `geometric`, the geometric mean over the trajectory."""
    batch_normalize: bool = False
    """Divide the weights of a step by their mean, which preserves the gradient scale: over tokens with `level: token`,
    over trajectories otherwise, whatever their length."""

    @property
    def per_token(self) -> bool:
        """True if a token's weight depends on that token alone."""
        whole = self.batch_normalize or self.veto is not None or self.opsm_delta is not None
        return self.level == "token" and not whole

    @property
    def _mean_over(self) -> Level | None:
        return self.level if self.batch_normalize else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Truncated(WeightingBase):
    """Truncated importance sampling: min(w, C).

    Removes the engine's bias but where the trainer finds a token more than C times as likely, and bounds the variance
    there. Weights w = .3, 1, 1.8, 6 become .3, 1, 1.8, 2; normalised .235294, .784314, 1.411765, 1.568627.

    Source: Ionides, Truncated importance sampling, 2008; Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025; verl, `rollout_is`; slime, `vanilla_tis_function`.
    """

    max_weight: Annotated[float, Field(gt=0)] = 2.0
    """C, the maximum weight; .inf does not truncate."""

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        """Return the weights of the tokens of a step."""
        raw = weights_at(self.level, inputs)
        weights = raw.clamp(max=self.max_weight)
        return self._output(inputs, weights, bounded=raw > self.max_weight, mean_over=self._mean_over)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Bounded(WeightingBase):
    """Base of weighing corrections with two bounds."""

    min_weight: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of w."""
    max_weight: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of w; .inf is none."""

    def __post_init__(self) -> None:
        _check_order("min_weight", self.min_weight, "max_weight", self.max_weight)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Clipped(_Bounded):
    """Clipped importance sampling: w brought into [a, b].

    As truncation, and a token that the trainer finds much less likely keeps some weight: less variance between tokens,
    some bias. w = .3, 1, 1.8, 6 become .5, 1, 1.8, 2.

    Source: slime, `examples/train_infer_mismatch_helper`.
    """

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        """Return the weights of the tokens of a step."""
        raw = weights_at(self.level, inputs)
        weights = raw.clamp(self.min_weight, self.max_weight)
        return self._output(inputs, weights, bounded=weights != raw, mean_over=self._mean_over)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Masked(_Bounded):
    """Masked importance sampling, IcePop: w where a ≤ w ≤ b, else 0.

    A token on which engine and trainer disagree that much is noise and teaches nothing. It still counts in the
    reduction's numbers, so the gradient of the other tokens is what it was; `rejection` takes it out of them too.
    w = .3, 1, 1.8, 6 become 0, 1, 1.8, 0.

    Source: Ling Team, Every step evolves, arXiv 2510.18855 (.5 and 5); slime, `icepop_function`.
    """

    max_weight: Annotated[float, Field(gt=0)] = 5.0
    """Upper bound of w; .inf is none."""

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        """Return the weights of the tokens of a step."""
        raw = weights_at(self.level, inputs)
        inside = (raw >= self.min_weight) & (raw <= self.max_weight)
        return self._output(inputs, torch.where(inside, raw, 0.0), mean_over=self._mean_over)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Criterion:
    """Condition under which a token, or a whole trajectory, is kept.

    `k1` is put as the ratio itself: `at_least` and `at_most` are bounds of w, of ∏ w (`sum`), or of the geometric mean
    (`mean`). verl puts k1 = −log w against the logarithms of the bounds, so asymmetric ones act on 1/w: with 0.5 and 5
    it keeps w = .3, whose inverse is in [0.5, 5], and rejects w = 3. A bound that means its inverse is a trap, and
    would say something else here than under `masked`; so here .3 is rejected and 3 is kept. To have what verl does,
    write the inverses.
    """

    statistic: Statistic = "k1"
    """`k1`: the ratio w. `k2`, `k3`: the divergence log² w / 2 or w − 1 − log w, in nats, which have no lower bound."""
    over: Literal["token", "sum", "mean", "max"] = "mean"
    """`token` rejects single tokens; the others aggregate over a trajectory's tokens and reject it whole."""
    at_least: Annotated[float, Field(gt=0)] | None = None
    """Minimum value kept; null is no bound."""
    at_most: Annotated[float, Field(gt=0)] | None = None
    """Maximum value kept; null is no bound."""

    def __post_init__(self) -> None:
        if self.statistic == "k1" and self.over == "max":
            raise ValueError("over: max needs statistic: k2 or k3; log w is signed, so its maximum misses small w")
        if self.statistic != "k1" and self.at_least is not None:
            raise ValueError(
                f"at_least: {self.at_least} would reject the tokens that agree best; {self.statistic} has at_most only"
            )
        if self.at_least is None and self.at_most is None:
            raise ValueError("a criterion without at_least and at_most rejects nothing; set one")
        if self.at_least is not None and self.at_most is not None:
            _check_order("at_least", self.at_least, "at_most", self.at_most)

    def __call__(self, inputs: CorrectionInputs) -> torch.Tensor:
        """Return which tokens pass, `[N]` bool."""
        log_w = inputs.log_weights()
        values = log_w if self.statistic == "k1" else divergence(self.statistic, log_w)
        if self.over == "max":
            return ~hits_sequence(values > self._bound(self.at_most), inputs.trajectory_ids)
        if self.over != "token":
            sums, counts, index = sequence_sums(values, inputs.trajectory_ids)
            values = (sums if self.over == "sum" else sums / counts)[index]
        if self.statistic == "k1":
            values = values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return (values >= (self.at_least or 0.0)) & (values <= self._bound(self.at_most))

    @staticmethod
    def _bound(largest: float | None) -> float:
        return float("inf") if largest is None else largest


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Rejection(RejectionBase):
    """Rejection sampling: keep the tokens that pass every criterion, with weight 1, and reject the others.

    What is rejected is as if it had never been sampled: unlike a weight of 0 it does not count in the numbers that the
    reduction divides by, and a trajectory of which nothing is left does not count as one. The gradient is that of the
    accepted tokens at its usual size, biased towards where engine and trainer agree.

    Source: verl, `compute_rollout_rejection_mask`; slime, `examples/train_infer_mismatch_helper`. Bounds differ from
    verl's, see `Criterion`.
    """

    criteria: Annotated[tuple[Criterion, ...], Field(min_length=1)] = (Criterion(at_least=0.999, at_most=1.001),)
    """All of them must pass. The default keeps trajectories whose geometric mean of w is within a thousandth of 1."""

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        """Return which tokens of a step are kept."""
        kept = torch.ones_like(inputs.trajectory_ids, dtype=torch.bool)
        for criterion in self.criteria:
            kept = kept & criterion(inputs)
        return self._output(inputs, torch.ones_like(inputs.log_weights()), kept)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Bypass:
    """No recomputation: the engine's log-probs are π_old, and the loss's ratio π / μ is the correction.

    Cheapest, and clipping then cuts the disagreement with the engine and the policy's movement as one. A loss without a
    ratio, such as REINFORCE without `max_weight`, is not corrected at all.

    Source: verl, bypass mode.
    """

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        """Return weight 1 for every token."""
        return CorrectionOutput(torch.ones_like(inputs.log_weights()))
