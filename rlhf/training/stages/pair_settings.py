"""What stages that learn from pairs have in common: their recipe keys."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rlhf.settings import STRICT
from rlhf.training.backends.optimizer import AdamW
from rlhf.training.backends.settings import Torch
from rlhf.training.stages.pairs import Pairs


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OnPairs:
    """Pairs come from somewhere, and TRL's trainer passes over them in batches."""

    pairs: Pairs = Field(default_factory=Pairs)
    """Where the pairs come from."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the pairs."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Pairs per optimiser update."""
    pairs_per_microbatch: Annotated[int, Field(ge=1)] = 8
    """Pairs of one forward pass; they are padded to the longest. A larger `batch_size` is a multiple of it. Changes
    memory and speed only: means are over the pairs, or the chosen tokens, of an update."""
    optimizer: AdamW = Field(default_factory=AdamW)
    """How the weights are updated."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass and keep those between layers only."""
    split: str = "train"
    """Where the tasks come from."""

    def __post_init__(self) -> None:
        if self.batch_size % self.at_once:
            raise ValueError("pairs_per_microbatch must divide batch_size")

    @property
    def trainer(self) -> Torch:
        """TRL's trainer is plain torch in one process."""
        return Torch(gradient_checkpointing=self.gradient_checkpointing)

    @property
    def at_once(self) -> int:
        """Pairs of one forward pass."""
        return min(self.pairs_per_microbatch, self.batch_size)

    def n_updates(self, n_pairs: int) -> int:
        """Optimiser updates of the stage: an epoch's last one may be smaller than the others."""
        return self.epochs * math.ceil(math.ceil(n_pairs / self.at_once) / (self.batch_size // self.at_once))
