"""ArCHer's critic as a recipe writes it, and its model: two Q-values of a turn and two values of its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from rlhf.inference.embedded.attention import packed_forward
from rlhf.settings import STRICT
from rlhf.training.contrib.turn_buffer import Episode
from rlhf.training.critics.value_model import BackboneModel, OnBackbone
from rlhf.training.policy.model import Policy

if TYPE_CHECKING:
    from rlhf.training.contrib.archer import ArcherTrainer
    from rlhf.training.stages.policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ArcherCritic(OnBackbone):
    """Learns what turns and their states are worth from the trajectories of many steps.

    Two Q-heads read a turn, two V-heads its state. A copy of the critic that follows it slowly says what they should
    have said: Q_j(o, a) should be r + γ V̄_j(o') and V_j(o) should be Q̄_j(o, a) with a of the present policy.

    Source: ArCHer, arXiv 2402.19446.
    """

    bootstrap: bool = True
    """What follows a trajectory that a limit cut counts as much as the critic expects of it; False takes the limit for
    an end, after which nothing comes."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Discount per turn."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.1
    """How far the copy follows the critic in each update: 1 leaves no copy."""
    updates_per_step: Annotated[int, Field(ge=1)] = 50
    """Updates of the critic in each step."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Trajectories of the buffer, and as many of the step, that one update is made from."""
    capacity: Annotated[int, Field(ge=1)] = 100_000
    """Turns that are kept; the oldest trajectories go first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone == "policy" and self.trains_backbone:
            raise ValueError(
                "gradient: backbone would move the policy in every update of the critic; "
                "use backbone: own, or gradient: head"
            )

    def start(self, stage: PolicyGradient, policy: Policy, start: Path | None, seed: int) -> ArcherTrainer:
        """Return what trains it through a stage; see `CriticKind.start`."""
        from rlhf.training.contrib.archer import ArcherTrainer

        return ArcherTrainer(self, self.build(policy, start, seed), stage, seed)

    def build(self, policy: Policy, start: Path | None, seed: int) -> TurnModel:
        """Return the critic's model before its first update: every value is 0. See `backbone_for`."""
        backbone = self.backbone_for(policy, start, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = TurnModel(backbone, shared=self.backbone == "policy", trains_backbone=self.trains_backbone)
        return model.to(next(policy.model.parameters()).device)


@plain_dataclass(frozen=True)
class Judged:
    """What two pairs of heads say of the K turns of some trajectories, one after the other.

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
        device = next(self.head.parameters()).device
        ids = torch.from_numpy(np.concatenate([e.token_ids for e in episodes])).long().to(device)
        first = np.cumsum([0, *map(len, episodes)])
        places = [np.concatenate([getattr(e, n) + at for e, at in zip(episodes, first, strict=False)]) for n in _PLACES]
        lengths = np.concatenate([e.lengths for e in episodes]).tolist()
        hidden = packed_forward(self, ids, lengths, torch.from_numpy(np.concatenate(places)).to(device))
        before, after = hidden.chunk(2)
        both = torch.cat([before, after], 1)
        return Judged(self._read("q", both), self._read("v", before), self._read("v", after))

    def _read(self, name: str, embedding: Tensor) -> Tensor:
        return torch.stack([self.head[f"{name}{j}"](embedding)[:, 0] for j in (1, 2)])


#: Places of an episode whose hidden states are read, in this order.
_PLACES = ("states", "ends")


def _head(n_in: int, size: int) -> nn.Sequential:
    last = nn.Linear(size, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(n_in, size), nn.ReLU(), last)
