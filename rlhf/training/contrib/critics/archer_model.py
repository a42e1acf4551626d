"""The model of ArCHer's critic: two Q-values of a turn and two values of its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.training.contrib.critics.turn_buffer import Episode, outputs_at
from rlhf.training.critics.value_model import BackboneModel


@dataclass(frozen=True)
class Judged:
    """Outputs of two pairs of heads for the K turns of some trajectories, one after the other.

    Attributes:
        actions: Q-values `[2, K]`, of each turn in its state.
        states: values `[2, K]`, of the state that each turn was taken in.
        after: values `[2, K]`, of the state after each turn's last token, in which the environment has not yet replied.
    """

    actions: Tensor
    states: Tensor
    after: Tensor


class TurnModel(BackboneModel):
    """Two Q-heads on the states before and after a turn, two V-heads on one of them alone.

    The state after the last token of what the policy has read is the embedding of o, that after the turn's last token
    the embedding of a. A head is one hidden layer, float32; its last layer is 0 at first, so that a critic that has
    seen nothing expects nothing.
    """

    head: nn.ModuleDict

    def __init__(self, backbone: Any, *, shared: bool, trains_backbone: bool) -> None:
        super().__init__(backbone, shared=shared, trains_backbone=trains_backbone)
        size = backbone.config.hidden_size
        self.head = nn.ModuleDict(
            {name: _head(size * (2 if name[0] == "q" else 1), size) for name in ("q1", "q2", "v1", "v2")}
        )

    def forward(self, *, logits_to_keep: Tensor, **inputs: Any) -> Any:
        """Hidden states `[1, N, d]`, as `logits`, at places `logits_to_keep` `[N]` of the packed rows."""
        return SimpleNamespace(logits=self.states(logits_to_keep, **inputs)[None])

    def judge(self, episodes: Sequence[Episode]) -> Judged:
        """Return what the critic says of the turns of `episodes`, in one forward pass."""
        hidden = outputs_at(self, episodes, [e.states for e in episodes], [e.ends for e in episodes])
        before, after = hidden.chunk(2)
        both = torch.cat([before, after], 1)
        return Judged(self._read("q", both), self._read("v", before), self._read("v", after))

    def _read(self, name: str, embedding: Tensor) -> Tensor:
        return torch.stack([self.head[f"{name}{j}"](embedding)[:, 0] for j in (1, 2)])


def _head(n_in: int, size: int) -> nn.Sequential:
    last = nn.Linear(size, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(n_in, size), nn.ReLU(), last)
