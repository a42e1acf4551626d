"""Opponents: seats of a game that another engine samples for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rlhf.inference.engine import RolloutEngine


@dataclass(frozen=True, slots=True)
class OpponentEngine:
    """Whoever has a seat.

    Attributes:
        name: what its generations are told by (`Generation.by`); empty for the policy.
        engine: samples for it; knows the policy's tokens.
    """

    name: str
    engine: RolloutEngine


class Players(Protocol):
    """Says who plays along."""

    def __call__(self, seed: int, attempt: int) -> Mapping[str, OpponentEngine]:
        """Opponent engines by seat; the same for the same arguments.

        Args:
            seed: of the attempt's task in this step, whichever the attempt.
            attempt: its number within the group.
        """
        ...
