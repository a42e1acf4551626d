"""The contract of a policy loss.

Arrays are flat over the policy tokens of a micro-batch, `[N]`; prompts, observations and padding are not in them. The
reduction is already inside `weights`: a loss is Σ weights · l, so that micro-batches and processes simply add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from rlhf.capabilities import Capability, CapabilityView
from rlhf.checking import CheckContext, Problem
from rlhf.errors import DataError
from rlhf.losses.trajectories import Trajectories


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a loss. All `[N]`, N = policy tokens of the micro-batch; log-probs in nats.

    Attributes:
        policy_logprobs: of the current policy; carries the gradient.
        old_logprobs: of the policy that made the trajectories, as computed for training; those of the engine where it
            shares the trainer's weights and where the correction is bypassed.
        sampler_logprobs: as reported by the engine that sampled.
        ref_logprobs: of the frozen reference, or None when no KL term is asked for.
        entropy: of the current policy's distribution at each token, or None; carries the gradient.
        advantages: one number per token.
        weights: reduction coefficients (`rlhf.losses.reduction`), computed over the whole minibatch, times the factor
            for the difference of trainer and engine (`rlhf.losses.importance_correction`).
        trajectory_ids: int64, which trajectory a token belongs to.
        trajectories: figures of the whole trajectories that the tokens belong to, or None when the loss looks at single
            tokens.
        n_minibatch_tokens: policy tokens of the whole minibatch, over all its micro-batches and processes; diagnostic
            metrics are means over them. None: `weights` are used instead, which is the same for `token_mean`.
        token_positions: int64, which of the policy tokens of its trajectory a token is, by their order, with a gap
            before each reply: tokens of one have consecutive numbers, and lie in one micro-batch.
        log_normalizers: log Σ exp of the current policy's logits, over the temperature; carries the gradient.
        ref_log_normalizers: of the frozen reference.
        mean_logprobs: mean of the current policy's log-probs over the vocabulary, where the token was sampled; without
            gradient.
        old_mean_logprobs: of the policy before the first update; None where that is the current one.
        teacher_logprobs: of a teacher, NaN on tokens that it does not teach; None without one.
        off_policy: bool, True on tokens that another than the policy wrote; None where there are none.
        staleness: int64, how many versions the policy that sampled a token is behind the one that is trained, also
            within a reply during which weights arrived; -1 where no policy sampled it. None where that is not known.
        whole: every token of the trajectories that these tokens belong to, in order, without gradient; None when the
            loss does not look at them.
    """

    policy_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    trajectory_ids: torch.Tensor
    ref_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    trajectories: Trajectories | None = None
    n_minibatch_tokens: int | None = None
    token_positions: torch.Tensor | None = None
    log_normalizers: torch.Tensor | None = None
    ref_log_normalizers: torch.Tensor | None = None
    mean_logprobs: torch.Tensor | None = None
    old_mean_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    off_policy: torch.Tensor | None = None
    staleness: torch.Tensor | None = None
    whole: LossInputs | None = None

    def __post_init__(self) -> None:
        shapes = {
            f.name: tuple(value.shape)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor) and value.shape != (len(self.policy_logprobs),)
        }
        if shapes:
            raise DataError(
                "the arrays of a loss differ in shape",
                where="LossInputs",
                got=str(shapes),
                expected=f"[N] with N = {len(self.policy_logprobs)}, as policy_logprobs",
            )

    def mean_share(self, values: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's share of the minibatch's mean of `values` `[N]`: a detached scalar."""
        if self.n_minibatch_tokens is None:
            return (self.weights * values.detach()).sum()
        return values.detach().sum() / max(self.n_minibatch_tokens, 1)

    def replies(self) -> torch.Tensor:
        """Return for each token the number of its reply among those of this micro-batch, int64 `[N]`, ascending.

        Raises:
            DataError: `token_positions` are not given.
        """
        if self.token_positions is None:
            raise DataError(
                "this loss needs token_positions",
                where="LossInputs.token_positions",
                got="None",
                expected="one per token",
            )
        new = torch.ones_like(self.token_positions, dtype=torch.bool)
        follows = (self.token_positions[1:] == self.token_positions[:-1] + 1) & (
            self.trajectory_ids[1:] == self.trajectory_ids[:-1]
        )
        new[1:] = ~follows
        return new.cumsum(0) - 1

    def whole_trajectories(self) -> Trajectories:
        """Return `trajectories`. Raises DataError where they are not given."""
        if self.trajectories is None:
            raise DataError(
                "this loss needs trajectories",
                where="LossInputs.trajectories",
                got="None",
                expected="the figures of the trajectories that the tokens belong to",
                hint="compute what the loss's needs_whole asks for",
            )
        return self.trajectories

    def whole_tokens(self) -> tuple[LossInputs, torch.Tensor]:
        """Return (`whole`, where in it these tokens are `[N]`). Raises DataError where they are not given."""
        whole = self.whole
        if whole is None or whole.token_positions is None or self.token_positions is None:
            raise DataError(
                "this loss needs whole trajectories",
                where="LossInputs.whole",
                got="None",
                expected="all tokens of the trajectories that the tokens belong to, and the positions of both",
                hint="compute what the loss's needs_whole asks for",
            )
        stride = int(torch.cat([whole.token_positions, whole.token_positions.new_zeros(1)]).max()) + 1
        keys, own = (
            x.trajectory_ids * stride + x.token_positions for x in (whole, self) if x.token_positions is not None
        )
        return whole, torch.searchsorted(keys, own)


def whole_of(parts: Sequence[LossInputs]) -> LossInputs:
    """Return the tokens of all micro-batches of a minibatch as one: in order and without gradient.

    An array that a part lacks is None. At least one part; each has `token_positions`.
    """
    names = [f.name for f in fields(LossInputs) if isinstance(getattr(parts[0], f.name), torch.Tensor)]
    found = {name: [getattr(part, name) for part in parts] for name in names}
    joined = {name: torch.cat([x.detach() for x in xs]) for name, xs in found.items() if all(x is not None for x in xs)}
    order = torch.argsort(joined["token_positions"], stable=True)
    order = order[torch.argsort(joined["trajectory_ids"][order], stable=True)]
    arrays: dict[str, Any] = {name: values[order] for name, values in joined.items()}
    return LossInputs(**arrays)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A scalar to differentiate, and figures for the log.

    Attributes:
        loss: scalar, Σ weights · l over the tokens of the micro-batch.
        metrics: name -> this micro-batch's share, detached; the sum over the micro-batches and processes of a minibatch
            is the figure to log. `loss/total` and `loss/policy` are sums with `weights`; the others are means over the
            policy tokens of the minibatch.
        metrics_max: name -> the largest value in this micro-batch, detached; the maximum over the micro-batches and
            processes is the figure to log.
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics_max: Mapping[str, torch.Tensor] = field(default_factory=dict)


@runtime_checkable
class PolicyLoss(Protocol):
    """Policy loss: from the arrays of a micro-batch to a scalar and metrics; a frozen dataclass of its recipe keys.

    A loss that reads `ref_logprobs` also has an attribute `needs_ref`, one that reads `entropy` an attribute
    `needs_entropy`, and so on with `needs_log_normalizers` (those of the reference come with `needs_ref`) and
    `needs_mean_logprobs`; where they are absent or False the trainer computes none of it and passes None. One that
    looks at whole trajectories has an attribute `needs_whole`: `trajectory` if it wants `trajectories` to hold those
    that its tokens belong to, `group` if it wants all of their groups that are in the minibatch, `tokens` if it wants
    `whole` to hold all their tokens. Rows with off-policy tokens are for losses whose attribute `takes_off_policy` is
    True. One whose attribute `needs_fresh_samples` is True is right for the first update of a step alone, one whose
    attribute `needs_unscaled_advantages` is True takes no selection that multiplies advantages, one whose attribute
    `needs_score` is False learns where no reward has a weight, and `reductions` names those with which it equals its
    published formula; recipes that do otherwise are cautioned.
    """

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch's share of the minibatch."""


class LossNeeds(CapabilityView):
    """Optional attributes of a loss, see `PolicyLoss`, with a default for each that it leaves out."""

    needs_ref = Capability[object](False)
    """True if it reads log-probs of the reference."""
    needs_mean_logprobs = Capability[object](False)
    """True if it reads the mean of the log-probs of all tokens of the vocabulary."""
    needs_whole = Capability[Literal["trajectory", "group", "tokens"] | None](None, str)
    """Unit that must stay together: `trajectory`, `group` or `tokens`."""
    takes_off_policy = Capability[object](False)
    """True if it knows what to do with tokens that the policy did not sample."""
    needs_fresh_samples = Capability[object](False)
    """True if it is right for the first update of a step alone."""
    needs_unscaled_advantages = Capability[object](False)
    """True if it reads more off an advantage than its sign and its share in the update."""
    needs_score = Capability[object](True)
    """True if it learns nothing where every attempt scores 0; False where something else than the score teaches."""
    reductions = Capability[Sequence[str]](())
    """Reductions with which it equals its published formula; empty for any."""
    max_weight = Capability[object](())
    """Bound of its ratio of new to old probability; an empty tuple where it has no such key."""
    teacher = Capability[str | None](None, str)
    """Folder or hub name of a model whose log-probs it reads."""

    @property
    def bounds_ratio(self) -> bool:
        """True if a key `max_weight` gives it a ratio of new to old probability."""
        return self.max_weight != ()


def refuse_without_ratio(context: CheckContext, key: str, result: str) -> Iterator[Problem]:
    """Refuse a loss without a ratio beside `key`, which trains on older samples; `result` says what would happen."""
    traits = LossNeeds(context.stage.loss)
    if traits.needs_fresh_samples:
        yield Problem(
            f"this loss has no ratio, so {result}",
            where=context.path,
            got=f"{key} with {context.kind_of('loss', context.stage.loss)}",
            expected="a loss with a ratio of new to old probability",
            do="set loss.max_weight" if traits.bounds_ratio else "use loss: {kind: ppo_clip}",
        )
