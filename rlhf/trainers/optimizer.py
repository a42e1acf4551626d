"""AdamW with a schedule, as a recipe writes it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdamW:
    """Decoupled weight decay Adam (Loshchilov & Hutter, arXiv 1711.05101) with linear warm-up and a schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the mean square."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Each update shrinks the weights by `lr` times this."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: stay, or fall towards `final_lr_share` of the peak, where the stage ends."""
    final_lr_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What is left of the peak at the end of the stage, where the schedule falls."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates over which the rate rises linearly from 0."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global norm; None leaves them."""

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
        """Optimiser over the parameters that require a gradient."""
        trainable = [p for p in parameters if p.requires_grad]
        return torch.optim.AdamW(
            trainable, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, foreach=True
        )

    def lr_at(self, update: int, n_updates: int) -> float:
        """Learning rate of update number `update` of `n_updates`, from 0; a pure function, so resume needs no state."""
        if update < self.warmup_steps:
            return self.lr * (update + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return self.lr
        span = max(n_updates - self.warmup_steps, 1)
        done = min((update - self.warmup_steps) / span, 1.0)
        falling = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.final_lr_share + (1 - self.final_lr_share) * falling)
