"""AdamW with a schedule, as a recipe writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.checking import CheckContext, Problem, no_effect
from rlhf.errors import TrainingError
from rlhf.settings import STRICT
from rlhf.training.backends.master_weights import MasterAdamW, is_short
from rlhf.training.backends.sharded import full_tensor_of

#: Updates in a row that may be skipped because the gradient was not finite.
MAX_SKIPPED = 5


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdamW:
    """Decoupled weight decay Adam (Loshchilov & Hutter, arXiv 1711.05101) with linear warm-up and a schedule."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW β₁ and β₂."""
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    """AdamW ε."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after warm-up: constant, or decay to `min_lr_ratio` of the peak after the updates of the
    whole stage. Steps that leave nothing to train on, as where no group has an advantage, do not count: the decay then
    ends above it."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate as a share of the peak, for schedules that decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up, in updates: update n of w has n / (w + 1) of the peak, of two 1/3 and 2/3; transformers and TRL
    begin at 0: 0 and 1/2."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradient clipping by global norm; null disables it."""

    def check(self, context: CheckContext) -> Iterator[Problem]:
        """Refuse to say where a schedule ends that never falls."""
        if self.schedule == "constant" and self.min_lr_ratio:
            yield no_effect(context.at("min_lr_ratio"), self.min_lr_ratio, "the schedule is constant")

    def endless_warmup(self, n_updates: int, where: str) -> str:
        """Caution on a warm-up that takes all updates of a stage or round; empty where it does not."""
        if self.warmup_steps < n_updates:
            return ""
        why = f"its optimizer.warmup_steps is {self.warmup_steps}"
        return f"{where} makes {n_updates} updates and {why}: the learning rate never reaches {self.lr:g}"

    def build(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        masters: bool = True,
        kind: Callable[..., torch.optim.AdamW] | None = None,
    ) -> torch.optim.AdamW:
        """Optimiser over the parameters that require a gradient.

        Args:
            parameters: of one model.
            masters: whether those in 16 bits are updated in float32 beside them; False where another sees to that.
            kind: of optimiser; None is by the number formats.
        """
        trainable = [p for p in parameters if p.requires_grad]
        on_gpu = bool(trainable) and all(p.is_cuda for p in trainable)
        options: dict[str, Any] = {"fused": True} if on_gpu else {"foreach": True}
        if kind is None:
            kind = MasterAdamW if masters and any(map(is_short, trainable)) else torch.optim.AdamW
        return kind(trainable, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, **options)

    def lr_at(self, update: int, n_updates: int) -> float:
        """Learning rate of update `update` of `n_updates`, from 0; pure, so resume needs no state."""
        if update < self.warmup_steps:
            return self.lr * (update + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return self.lr
        span = max(n_updates - self.warmup_steps, 1)
        done = min((update - self.warmup_steps) / span, 1.0)
        falling = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * falling)


def load_moments(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Restore an optimiser's state; learning rate, weight decay and the like stay those that it was made with.

    Masters in float32, as trainers save them that compute in 16 bits, become the parameters where these are float32.
    """
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, options in zip(optimizer.param_groups, own, strict=True):
        group.update(options)
    if isinstance(optimizer, torch.optim.Optimizer):
        with torch.no_grad():
            for p, kept in optimizer.state.items():
                if "master" in kept and not is_short(p):
                    p.copy_(kept.pop("master"))


@plain_dataclass
class Stepper:
    """Applies gradients by a schedule, and leaves out those that are not finite.

    A group of parameters with a key `lr_scale` has that many times the schedule's learning rate.

    Attributes:
        settings: of the optimiser.
        optimizer: over the parameters.
        total_updates: the schedule's horizon.
        where: the settings' place in the stage, for messages.
        n_updates: applied so far.
        n_off_schedule: those among them that are no part of the schedule: each has the learning rate of the update
            before it, and the schedule goes on as if it had not been.
        n_skipped: left out.
    """

    settings: AdamW
    optimizer: torch.optim.Optimizer
    total_updates: int
    where: str = "optimizer"
    n_updates: int = 0
    n_off_schedule: int = 0
    n_skipped: int = 0
    _n_skipped_in_a_row: int = 0

    @property
    def lr(self) -> float:
        """Learning rate of the last update."""
        return self.settings.lr_at(max(self.n_updates - self.n_off_schedule - 1, 0), self.total_updates)

    def step(self, *, off_schedule: bool = False) -> float:
        """Update the parameters that have a gradient, and return its norm before it was bounded.

        Args:
            off_schedule: the update is no part of the schedule.

        Raises:
            TrainingError: too many gradients in a row were not finite.
        """
        groups = self.optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        limit = self.settings.max_grad_norm if self.settings.max_grad_norm is not None else math.inf
        norm = float(full_tensor_of(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        if not math.isfinite(norm):
            self._skip(norm)
            return norm
        self._n_skipped_in_a_row = 0
        self._set_lr(off_schedule)
        self.optimizer.step()
        self.n_updates += 1
        self.n_off_schedule += off_schedule
        return norm

    def _set_lr(self, off_schedule: bool) -> None:
        lr = self.lr if off_schedule else self.settings.lr_at(self.n_updates - self.n_off_schedule, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)

    def _skip(self, norm: float, *, counts: bool = True) -> None:
        self.n_skipped += 1
        self._n_skipped_in_a_row += counts
        if self._n_skipped_in_a_row >= MAX_SKIPPED:
            raise TrainingError(
                f"{MAX_SKIPPED} updates in a row had a gradient that is not finite",
                where=f"update {self.n_updates}",
                got=f"gradient norm {norm}",
                expected="finite gradients",
                hint=f"lower {self.where}.lr or the reward's scale; the weights are those of the last good update",
            )
